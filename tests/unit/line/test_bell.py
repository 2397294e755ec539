"""What wakes a thread that rests."""

import socket
import threading
from collections.abc import Iterator

import pytest

from raykv.line.bell import Bell

LONG_S = 1000.0


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_ring_before_the_wait_ends_it_and_no_other() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    assert bell.wait(None) and not bell.wait(0.01)


@pytest.mark.parametrize("seconds", (None, LONG_S))
def test_a_ring_ends_a_wait(seconds: float | None) -> None:
    bell, rung = Bell(), threading.Event()

    def wait() -> None:
        if bell.wait(seconds):
            rung.set()

    threading.Thread(target=wait, daemon=True).start()
    bell.ring()
    assert rung.wait(20.0)


def test_the_end_of_a_connection_ends_a_wait(connection: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = connection
    threading.Timer(0.02, theirs.close).start()
    assert not Bell().wait(None, ours)


def test_what_comes_in_there_does_not_and_is_left(connection: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = connection
    theirs.send(b"answer")
    bell = Bell()
    threading.Timer(0.02, bell.ring).start()
    assert bell.wait(None, ours) and ours.recv(16) == b"answer"
