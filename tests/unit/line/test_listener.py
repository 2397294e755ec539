"""Who is served on a port, and that nobody else hinders it: real sockets, floods, nonsense."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from helpers.line.echo_server import (
    PATIENCE_S,
    Server,
    end,
    expected,
    flood,
    open_files,
    question,
    serving,
)
from helpers.line.fuzz import SECONDS, SEED
from helpers.pools import eventually

from raykv.line import tls, wire
from raykv.line.listener import BULK_BYTES, Connection, Listener
from raykv.line.wire import frame
from raykv.protocol.calls import CLIENT, STORE
from raykv.protocol.location import Address

both = pytest.mark.usefixtures("plain_and_tls")
LONGEST = 1000
FLOOD = 12_000  # connections
HONEST = b"is always answered"
RESET = b"\1\0\0\0\0\0\0\0"  # of SO_LINGER: to close is to reset


@pytest.fixture
def listener() -> Iterator[Listener]:
    """One that answers; nothing is left of it, nor of who connected to it."""
    before = open_files()
    with serving(LONGEST) as listener:
        yield listener
        eventually(lambda: not listener.unproven and not listener.served)
        assert len(listener._selector.get_map()) == 2, "the socket, and what wakes the thread"
    assert open_files() <= before


@contextmanager
def stranger(address: Address) -> Iterator[Any]:
    """A connection that has not proved the token. Where TLS is used it has a certificate."""
    peer: Any = socket.create_connection(address[:2], PATIENCE_S)
    if tls.used():
        peer = tls.TlsSocket(peer, address.host)
        peer.agree(time.monotonic() + PATIENCE_S)
        peer.settimeout(PATIENCE_S)
    with peer:
        yield peer


def answer_to(peer: socket.socket, token: bytes) -> bytes:
    """What a client answers to the challenge of a listener: a challenge of its own, and its proof."""
    both = wire.receive(peer, wire.CHALLENGE_BYTES) + wire.challenge()
    return both[wire.CHALLENGE_BYTES :] + wire.proof(token, CLIENT, both)


@contextmanager
def friend(address: Address) -> Iterator[Any]:
    """A connection that has."""
    with wire.connect(address) as peer:
        peer.settimeout(PATIENCE_S)
        yield peer


def receive_frame(peer: socket.socket) -> bytes:
    def receive(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = peer.recv(count - len(data))
            if not more:
                raise ConnectionError(f"closed after {len(data)} of {count} bytes")
            data += more
        return data

    return receive(wire.LENGTH.unpack(receive(wire.LENGTH.size))[0])


def asked(peer: socket.socket, number: int = 7) -> bool:
    """Whether the right answer comes."""
    peer.sendall(frame(question(number, 100)))
    return receive_frame(peer) == expected(number, 100)


def served(address: Address) -> bool:
    with friend(address) as peer:
        return asked(peer)


def closed(peer: socket.socket) -> bool:
    """Whether the other side closes it; what comes before is left out."""
    with suppress(ConnectionError):
        while peer.recv(1 << 16):
            pass
    return True


# ---------------------------------------------------------------------- who does not know the token


def test_who_does_not_prove_the_token_in_time_is_closed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.3)
    with stranger(listener.address) as silent, stranger(listener.address) as slow, friend(listener.address) as honest:
        slow.sendall(bytes(wire.CHALLENGE_BYTES + wire.PROOF_BYTES - 1))
        assert closed(silent) and closed(slow)
        assert asked(honest)


@both
@pytest.mark.parametrize("shift", (0, 1), ids=["guessed", "of another connection"])
def test_a_wrong_proof_ends_the_connection(listener: Listener, shift: int) -> None:
    with stranger(listener.address) as first, stranger(listener.address) as second:
        challenges = [wire.receive(peer, wire.CHALLENGE_BYTES, None) for peer in (first, second)]
        assert challenges[0] != challenges[1]
        token = listener.address.token if shift else b"guessed"
        for i, peer in enumerate((first, second)):
            mine = wire.challenge()
            shown = wire.proof(token, CLIENT, challenges[(i + shift) % 2] + mine)
            peer.sendall(mine + shown + frame(question(1)))
            assert closed(peer)
    assert served(listener.address)


@contextmanager
def impostor(address: Address, greet: Callable[[socket.socket], None]) -> Iterator[Address]:
    """Who took the port of a listener that is gone: it does not know the token, and greets in its own way."""

    def serve() -> None:
        with suppress(OSError):
            peer, _ = taken.accept()
            with peer:
                greet(peer)
                while peer.recv(1 << 16):
                    pass

    with socket.create_server((address.host, 0)) as taken:
        thread = threading.Thread(target=serve)
        thread.start()
        yield address._replace(port=taken.getsockname()[1])
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


def sends_the_proof_back(peer: socket.socket) -> None:
    peer.sendall(bytes(wire.CHALLENGE_BYTES))
    peer.sendall(wire.receive(peer, wire.CHALLENGE_BYTES + wire.PROOF_BYTES)[-wire.PROOF_BYTES :])


def relays_to(other: Address) -> Callable[[socket.socket], None]:
    """It has a listener whose token is another one prove to know it."""

    def greet(peer: socket.socket) -> None:
        with stranger(other) as there:
            peer.sendall(wire.receive(there, wire.CHALLENGE_BYTES))
            there.sendall(wire.receive(peer, wire.CHALLENGE_BYTES + wire.PROOF_BYTES))
            peer.sendall(wire.receive(there, wire.PROOF_BYTES))

    return greet


def test_who_listens_without_the_token_is_refused(listener: Listener) -> None:
    """Before anything is asked there, and in time."""
    gone = listener.address._replace(token=b"of a listener that is gone")
    rng = random.Random(SEED)

    def guesses(peer: socket.socket) -> None:
        peer.sendall(rng.randbytes(wire.CHALLENGE_BYTES + wire.PROOF_BYTES))

    def says_anything(peer: socket.socket) -> None:
        peer.sendall(rng.randbytes(rng.randrange(200)))
        peer.shutdown(socket.SHUT_WR)

    for greet in (guesses, sends_the_proof_back, relays_to(listener.address), *[says_anything] * 100):
        with impostor(gone, greet) as address, pytest.raises(ConnectionError):
            wire.connect(address)
    assert served(listener.address)


def test_who_listens_and_proves_nothing_is_refused_in_time(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.1)
    for greeting in (b"", bytes(wire.CHALLENGE_BYTES), bytes(wire.CHALLENGE_BYTES + wire.PROOF_BYTES - 1)):
        says = partial(lambda said, peer: peer.sendall(said), greeting)
        with impostor(listener.address, says) as address, pytest.raises(ConnectionError, match="says nothing"):
            wire.connect(address)


def test_bytes_before_the_proof_are_few(listener: Listener) -> None:
    with stranger(listener.address) as peer:
        with suppress(ConnectionError):
            for _ in range(100):
                peer.sendall(bytes(1 << 20))
        assert closed(peer)


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


# ---------------------------------------------------------------------- floods


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
                with suppress(ConnectionError):  # pushed out by others before it proved itself: it tries again
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


def test_a_port_is_listened_at_again_after_the_system_could_not_accept(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if for a while it could not watch the port either."""
    failures = {"accept": 2, "register": 2}

    def failing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if failures[name] and listener._socket in args:
                failures[name] -= 1
                raise OSError(f"can't {name}")
            return method(*args)

        return call

    monkeypatch.setattr(socket.socket, "accept", failing("accept", socket.socket.accept))
    monkeypatch.setattr(listener._selector, "register", failing("register", listener._selector.register))
    with friend(listener.address) as peer:
        assert asked(peer)
    assert failures == {"accept": 0, "register": 0}


@both
def test_no_error_ends_the_loop(listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """As none of memory, or a bug of ours."""
    errors = [MemoryError(), RuntimeError("can't start new thread"), KeyError("bug")]

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if errors:
                raise errors.pop()
            return method(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(wire, "challenge", failing(wire.challenge))
        for _ in range(3):
            with stranger(listener.address) as peer:
                assert closed(peer)
    assert served(listener.address) and not errors
    errors[:] = [MemoryError(), RuntimeError("can't start new thread"), KeyError("bug")]
    monkeypatch.setattr(listener, "_expire", failing(listener._expire))
    assert served(listener.address)
    assert eventually(lambda: not errors)
    assert "can't start new thread" in caplog.text


# ---------------------------------------------------------------------- frames


@both
def test_a_frame_may_come_byte_by_byte(listener: Listener) -> None:
    with stranger(listener.address) as peer:
        shown = answer_to(peer, listener.address.token)
        for byte in shown + frame(question(1, 10)) + frame(question(2)):
            peer.sendall(bytes([byte]))
        wire.receive(peer, wire.PROOF_BYTES)
        assert [receive_frame(peer), receive_frame(peer)] == [expected(1, 10), expected(2)]


@both
def test_frames_may_come_together_and_with_the_proof(listener: Listener) -> None:
    with stranger(listener.address) as peer:
        shown, last = answer_to(peer, listener.address.token), frame(question(99))
        peer.sendall(shown + b"".join(frame(question(i, i)) for i in range(99)) + frame(b"") + last[:5])
        wire.receive(peer, wire.PROOF_BYTES)
        assert [receive_frame(peer) for _ in range(99)] == [expected(i, i) for i in range(99)]
        assert receive_frame(peer) == b""
        peer.sendall(last[5:])
        assert receive_frame(peer) == expected(99)


def test_a_frame_longer_than_allowed_ends_the_connection(listener: Listener) -> None:
    with friend(listener.address) as peer, friend(listener.address) as other:
        peer.sendall(frame(bytes(LONGEST)))
        assert len(receive_frame(peer)) == 8
        peer.sendall(wire.LENGTH.pack(LONGEST + 1))
        assert closed(peer)
        assert asked(other)


@both
def test_a_peer_that_never_reads_its_answers_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one of them waiting at most, and no question more is read."""
    monkeypatch.setattr(wire, "GONE_S", 0.5)
    size = 1 << 20
    with serving() as listener, friend(listener.address) as peer, friend(listener.address) as other:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)  # it is not the one to give up
        assert asked(other)
        with pytest.raises(ConnectionError):
            for number in range(1_000_000):
                peer.sendall(frame(question(number, size) + bytes(10_000)))
                waiting = [len(connection.outbox) for connection in list(listener.served)]
                assert max(waiting, default=0) <= size + 100
                assert number % 10 or asked(other)
        eventually(lambda: len(listener.served) == 1)
        assert asked(other)


@both
@pytest.mark.parametrize("sent", ["nothing", "half a proof", "the proof", "half a frame", "more than is answered"])
def test_a_peer_that_resets_hinders_nobody(listener: Listener, sent: str) -> None:
    with friend(listener.address) as other:
        for _ in range(20):
            with stranger(listener.address) as peer:
                shown = answer_to(peer, listener.address.token)
                if sent == "half a proof":
                    peer.sendall(shown[:-16])
                elif sent == "the proof":
                    peer.sendall(shown)
                elif sent == "half a frame":
                    peer.sendall(shown + frame(question(1))[:9])
                elif sent == "more than is answered":
                    peer.sendall(shown + 300 * frame(question(1, 20_000)))
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            assert asked(other)


# ---------------------------------------------------------------------- the server's side


@contextmanager
def listening(serve: Callable[[Connection, bytes], bytes | None]) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", "raykv-test", {CLIENT: LONGEST}, serve)
    try:
        yield listener
    finally:
        end(listener)


def test_what_a_server_raises_ends_that_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    errors: dict[bytes, Exception] = {b"v": ValueError("nonsense"), b"o": OSError("gone"), b"b": KeyError("a bug")}

    def serve(connection: Connection, body: bytes) -> bytes:
        if body in errors:
            raise errors[body]
        return frame(expected(7, 100))

    with listening(serve) as listener, friend(listener.address) as other:
        for body in errors:
            with friend(listener.address) as peer:
                peer.sendall(frame(body))
                assert closed(peer)
            assert asked(other)
        assert len(listener.served) == 1
    assert "a bug" in caplog.text and "nonsense" not in caplog.text


class Lender:
    """Lends every connection whose question is empty. lent: those that it has lent."""

    def __init__(self) -> None:
        self.lent: list[Connection] = []

    def __call__(self, connection: Connection, body: bytes) -> bytes | None:
        if body:
            return frame(expected(7, 100))
        self.lent.append(connection)
        return None

    def one(self) -> Connection:
        """That was lent last."""
        eventually(lambda: self.lent)
        return self.lent.pop()


def lend(lender: Lender, peer: socket.socket, more: bytes = b"") -> Connection:
    peer.sendall(frame(b"") + more)
    return lender.one()


def test_a_lent_connection_is_left_alone_until_it_is_given_back() -> None:
    lender = Lender()
    with listening(lender) as listener, friend(listener.address) as peer, friend(listener.address) as other:
        for blocking in (True, False):
            more = frame(question(1)) + frame(b"") + frame(question(2)) + frame(question(3))[:5]
            lent = lend(lender, peer, more)
            assert asked(other)
            lent.socket.setblocking(blocking)  # as it is used by a thread
            lent.socket.settimeout(PATIENCE_S)
            lent.socket.sendall(b"from another thread")
            assert wire.receive(peer, 19) == b"from another thread"
            listener.give_back(lent)
            assert receive_frame(peer) == expected(7, 100)
            again = lender.one()
            assert again is lent
            listener.give_back(again)
            assert receive_frame(peer) == expected(7, 100)
            peer.sendall(frame(question(3))[5:])
            assert receive_frame(peer) == expected(7, 100)


@both
def test_a_lent_connection_that_is_dropped_or_whose_peer_is_gone_ends() -> None:
    lender = Lender()
    with listening(lender) as listener, friend(listener.address) as other:
        with friend(listener.address) as peer:
            listener.drop(lend(lender, peer, frame(question(1))))
            assert closed(peer)
        with friend(listener.address) as peer:
            lent = lend(lender, peer)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        listener.give_back(lent)
        eventually(lambda: len(listener.served) == 1)
        assert asked(other)


@both
def test_connections_that_threads_give_back_and_drop_at_once_are_served() -> None:
    """Before the listener's thread has seen that it lent them, too."""
    rng = random.Random(3)

    def serve(connection: Connection, body: bytes) -> bytes | None:
        if body[0] < 100:
            return frame(body)

        def finish() -> None:
            if body[0] == 255:
                server.drop(connection)
                return
            connection.socket.settimeout(PATIENCE_S)
            connection.socket.sendall(frame(body))
            server.give_back(connection)

        threading.Thread(target=finish).start()
        return None

    def use() -> None:
        for _ in range(10):
            with friend(server.address) as peer:
                bodies = [bytes([rng.randrange(200), i]) for i in range(30)]
                peer.sendall(b"".join(map(frame, bodies)) + frame(b"\xff"))
                assert [receive_frame(peer) for _ in bodies] == bodies
                assert closed(peer)

    with listening(serve) as server:
        users = [threading.Thread(target=use) for _ in range(4)]
        for user in users:
            user.start()
        for user in users:
            user.join(PATIENCE_S)
        eventually(lambda: not server.served)


def test_close_ends_all_connections_and_the_lent_ones_when_they_come_back() -> None:
    before = open_files(), threading.active_count()
    lender = Lender()
    with (
        listening(lender) as listener,
        stranger(listener.address) as waiting,
        friend(listener.address) as peer,
        friend(listener.address) as reader,
        friend(listener.address) as other,
    ):
        lent, late = lend(lender, reader), lend(lender, other)
        listener.close()
        assert all(map(closed, (waiting, peer, reader, other)))
        listener._thread.join(PATIENCE_S)
        assert lent.socket.fileno() >= 0, "its thread may be using the descriptor"
        listener.give_back(lent)
        listener.drop(late)
        assert lent.socket.fileno() == late.socket.fileno() == -1
        with pytest.raises(ConnectionError):
            socket.create_connection(listener.address[:2])
        listener.close()
    assert open_files() <= before[0] and threading.active_count() <= before[1]


# ---------------------------------------------------------------------- nonsense


class Fuzzer:
    """Opens connections, says anything on them in any pieces, and closes them in any way."""

    def __init__(self, seed: str) -> None:
        self.rng, self.served_by = random.Random(seed), random.Random(f"server/{seed}")
        self.peers: list[Any] = []
        self.answers = 0
        self.threads = ThreadPoolExecutor(4)

    def serve(self, listener: Listener, connection: Connection, body: bytes) -> bytes | None:
        """Answer, refuse, or have a thread do one of both."""
        if self.served_by.random() < 0.7 or body == HONEST:
            return frame(body)
        if self.served_by.random() < 0.2:
            raise ValueError("refused")
        self.threads.submit(self.serve_lent, listener, connection, body)
        return None

    def serve_lent(self, listener: Listener, connection: Connection, body: bytes) -> None:
        try:
            connection.socket.settimeout(0.1)
            connection.socket.sendall(frame(body))
        except OSError:
            listener.drop(connection)
        else:
            listener.drop(connection) if body[:1] < b"\x20" else listener.give_back(connection)

    def step(self, address: Address) -> None:
        rng = self.rng
        try:
            if not self.peers or rng.random() < 0.3:
                self.open(address)
            else:
                rng.choice((self.say, self.say, self.hear, self.leave))(rng.choice(self.peers))
        except OSError:  # the listener has ended it, or says nothing
            pass
        if len(self.peers) > 15:
            self.leave(self.peers[0])

    def open(self, address: Address) -> None:
        if self.rng.random() < 0.2:
            address = address._replace(token=b"guessed")
        side = self.rng.choice((*[CLIENT] * 4, STORE, wire.LISTENER))  # the last two may not connect there
        if self.rng.random() < 0.8:
            peer: Any = wire.connect(address, side)
        else:
            peer = socket.create_connection(address[:2], PATIENCE_S)
        peer.settimeout(0.001)
        self.peers.append(peer)

    def say(self, peer: socket.socket) -> None:
        rng = self.rng
        data = b"".join(frame(rng.randbytes(rng.randrange(LONGEST))) for _ in range(rng.randrange(20)))
        data += rng.randbytes(rng.choice((0, 0, 0, 1, 31, 32, 33, 5000)))
        while data:
            piece = data[: rng.choice((1, 7, 100, 10_000))]
            peer.sendall(piece)
            data = data[len(piece) :]

    def hear(self, peer: socket.socket) -> None:
        self.answers += len(peer.recv(1 << 16)) > wire.CHALLENGE_BYTES

    def leave(self, peer: socket.socket) -> None:
        self.peers.remove(peer)
        with peer, suppress(OSError):
            if self.rng.random() < 0.3:
                peer.shutdown(self.rng.choice((socket.SHUT_WR, socket.SHUT_RD)))
            if self.rng.random() < 0.5:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def test_nonsense_of_all_kinds_hinders_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """For an hour: RAYKV_FUZZ_SECONDS=14400. RAYKV_FUZZ_SEED=2 is another one."""
    end_at = time.monotonic() + SECONDS / 4
    fuzzer, before, rounds = Fuzzer(SEED), open_files(), 0
    with (
        fuzzer.threads,
        listening(lambda connection, body: fuzzer.serve(server, connection, body)) as server,
        friend(server.address) as honest,
    ):
        while time.monotonic() < end_at:
            fuzzer.step(server.address)
            rounds += 1
            if rounds % 10 == 0:
                honest.sendall(frame(HONEST))
                assert receive_frame(honest) == HONEST
        while fuzzer.peers:
            fuzzer.leave(fuzzer.peers[0])
        eventually(lambda: len(server.served) == 1 and not server.unproven)
        honest.sendall(frame(HONEST))
        assert receive_frame(honest) == HONEST
    assert open_files() <= before
    assert fuzzer.answers > 10, "it proved the token now and then"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@both
def test_what_a_peer_said_before_it_left_is_served() -> None:
    served: list[bytes] = []
    first, go, done = threading.Event(), threading.Event(), threading.Event()

    def serve(connection: Connection, body: bytes) -> bytes:
        first.set()
        go.wait(10)
        served.append(body)
        if len(served) == 8:
            done.set()
        return frame(b"an answer that nobody reads")

    listener = Listener("127.0.0.1", "test-listen", {CLIENT: 1 << 20}, serve)
    peer = wire.connect(listener.address)
    peer.sendall(b"".join(frame(b"%d" % i) for i in range(8)))
    assert first.wait(10)
    peer.close()
    go.set()
    assert done.wait(10), f"{len(served)} of 8"
    assert served == [b"%d" % i for i in range(8)]
    listener.close()


def test_short_frames_are_served_before_long_ones_which_take_turns() -> None:
    served: list[int] = []
    all_sent, done = threading.Event(), threading.Event()

    def serve(connection: Connection, body: bytes) -> bytes:
        all_sent.wait(10)
        served.append(len(body))
        if len(served) == 7:
            done.set()
        return wire.frame(b"ok")

    listener = Listener("127.0.0.1", "test-listen", {CLIENT: 1 << 20}, serve)
    first, *peers = [wire.connect(listener.address) for _ in range(4)]
    first.sendall(wire.frame(b"the one that all others wait for"))
    long = bytes(BULK_BYTES)
    for peer in peers:
        peer.sendall(wire.frame(long) + wire.frame(b"short"))
    all_sent.set()
    assert done.wait(10)
    assert served[0] == 32 and sorted(served[1:]) == [5] * 3 + [len(long)] * 3
    for peer in (first, *peers):
        assert wire.receive(peer, 6) == wire.frame(b"ok")
        peer.close()
    listener.close()
