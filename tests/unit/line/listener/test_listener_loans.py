"""A listener lends connections to threads, which give the connections back or drop them."""

import random
import socket
import threading

import pytest
from helpers.line.echo_server import PATIENCE_S, expected, open_files, question
from helpers.line.listeners import both, listening
from helpers.line.peers import RESET, asked, closed, friend, receive_frame, stranger
from helpers.pools import eventually

from raykv.line import wire
from raykv.line.listener import Connection
from raykv.line.wire import frame


class Lender:
    """Lends every connection whose question is empty. lent: the lent connections."""

    def __init__(self) -> None:
        self.lent: list[Connection] = []

    def __call__(self, connection: Connection, body: bytes) -> bytes | None:
        if body:
            return frame(expected(7, 100))
        self.lent.append(connection)
        return None

    def one(self) -> Connection:
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
            lent.socket.setblocking(blocking)  # a thread may use it either way
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
    """A thread may do so before the listener's own thread has noted the loan."""
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
