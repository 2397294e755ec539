"""A server of blocks over TCP when a thread or the arena fails."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.line.echo_server import PATIENCE_S, end
from helpers.pools import eventually
from numpy.typing import NDArray

from raykv.line import wire
from raykv.protocol.location import LOCATION
from raykv.transports.block_server import CLAIM, BlockServer

REQUEST = wire.frame(np.zeros(1, LOCATION).tobytes() + bytes(16))
BYTES = 3000


class Arena:
    """Stands for an arena. A read raises `error` if it is set."""

    error: Exception | None = None
    blocks = 1  # how many blocks' bytes a read gives

    def read_for_peer(self, locations: NDArray[np.void], keys: NDArray[np.uint8]) -> Any:
        if self.error:
            raise self.error
        one = np.ones(len(keys), np.uint8)
        runs = [SimpleNamespace(data=memoryview(bytes(BYTES * self.blocks)))]
        return SimpleNamespace(there=one.astype(np.bool_), positions=one, checksums=one, runs=runs)


@contextmanager
def serving(arena: Any) -> Iterator[BlockServer]:
    server = BlockServer(arena, "127.0.0.1")
    try:
        yield server
    finally:
        server.close()
        end(server._listener)


def read(server: BlockServer) -> bool:
    with wire.connect(server.address) as peer:
        peer.sendall(REQUEST)
        peer.settimeout(PATIENCE_S)
        return len(wire.receive(peer, CLAIM.itemsize + BYTES)) == CLAIM.itemsize + BYTES


def test_blocks_are_served_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving(Arena()) as server:
        monkeypatch.setattr(threading.Thread, "start", fail)
        assert all(read(server) for _ in range(50))


@pytest.mark.parametrize("error", [ValueError("nonsense"), KeyError("a bug")], ids=repr)
def test_a_request_that_fails_ends_its_connection_only(error: Exception) -> None:
    arena = Arena()
    with serving(arena) as server:
        arena.error = error
        with pytest.raises(ConnectionError):
            read(server)
        arena.error = None
        assert read(server)
        assert len(server._listener.served) <= 1


def test_a_reader_that_takes_its_bytes_slowly_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each system call moves some bytes, so no call ever times out."""
    monkeypatch.setattr("raykv.transports.block_server.data_deadline", lambda size: 1.0)
    arena, taken = Arena(), 0
    arena.blocks = 128 << 10  # more than the sockets' buffers take
    with serving(arena) as server, wire.connect(server.address) as peer:
        peer.sendall(REQUEST)
        with suppress(ConnectionError):
            while got := len(peer.recv(1 << 17)):
                taken += got
                if taken == CLAIM.itemsize + arena.blocks * BYTES:
                    break
                time.sleep(0.01)  # reads slowly
        assert taken < arena.blocks * BYTES
        eventually(lambda: not server._listener.served)
