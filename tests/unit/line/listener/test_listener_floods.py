"""A listener serves its peers while strangers flood it with connections."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from helpers.line.echo_server import PATIENCE_S, Server, expected, flood
from helpers.line.listeners import listening
from helpers.line.peers import answer_to, asked, closed, friend, served, stranger
from helpers.pools import eventually

from raykv.line import wire
from raykv.line.listener import Connection, Listener
from raykv.line.wire import frame
from raykv.protocol.location import Address

FLOOD = 12_000  # connections


def test_a_connection_too_many_ends_the_oldest_of_those_that_wait(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", PATIENCE_S)
    monkeypatch.setattr(listener, "most_unproven", 100)
    with ExitStack() as stack:
        strangers = [stack.enter_context(stranger(listener.address)) for _ in range(120)]
        for peer in strangers[:20]:
            assert closed(peer)
        assert len(listener.unproven) == 100
        assert served(listener.address)
        assert closed(strangers[20])
        for peer in strangers[21:]:
            peer.setblocking(False)
            assert len(peer.recv(100)) == wire.CHALLENGE_BYTES
            with pytest.raises(BlockingIOError):
                peer.recv(1)


def test_a_proof_that_has_come_counts_however_many_connect_before_it_is_read() -> None:
    busy, go_on = threading.Event(), threading.Event()

    def serve(connection: Connection, body: bytes) -> bytes:
        busy.set()
        assert go_on.wait(PATIENCE_S)
        return frame(expected(7, 100))

    with listening(serve) as server, ExitStack() as stack:
        server.most_unproven = 5
        asking, honest = stack.enter_context(friend(server.address)), stack.enter_context(stranger(server.address))
        shown = answer_to(honest, server.address.token)
        asking.sendall(frame(b"what keeps the thread busy"))
        assert busy.wait(PATIENCE_S)
        for _ in range(20):
            stack.enter_context(stranger(server.address))
        honest.sendall(shown)
        go_on.set()
        wire.receive(honest, wire.PROOF_BYTES)
        assert asked(honest)


@contextmanager
def a_server(files: int = 1024) -> Iterator[Server]:
    server = Server(files=files, threads=300)
    try:
        yield server
    finally:
        server.end()


def test_a_flood_of_idle_connections_hinders_nobody_and_starts_no_thread() -> None:
    with a_server() as server, friend(server.address) as honest:
        assert asked(honest)
        threads, files = server.status()
        with flood(server.address, FLOOD) as flooding:
            rounds, newcomers = 0, 0
            while flooding.poll() is None or rounds < 20:
                assert asked(honest, rounds)
                with suppress(ConnectionError):  # others may push it out before its proof: then it tries again
                    newcomers += served(server.address)
                rounds += 1
                assert server.status()[0] == threads
        assert newcomers
        assert asked(honest) and served(server.address)
        eventually(lambda: server.status() == (threads, files))


def test_a_listener_without_files_serves_who_is_there_and_all_again_when_it_has_some() -> None:
    with a_server(files=60) as server:
        before = server.status()
        with ExitStack() as stack:
            friends = [stack.enter_context(friend(server.address))]
            with pytest.raises(ConnectionError):
                for _ in range(100):
                    friends.append(stack.enter_context(friend(server.address)))
            assert len(friends) > 40 and all(map(asked, friends))
            friends.pop().close()
            eventually(lambda: _gets_in(server.address))
            assert all(map(asked, friends))
        eventually(lambda: server.status() == before)
        assert served(server.address)


def _gets_in(address: Address) -> bool:
    try:
        return served(address)
    except ConnectionError:
        return False
