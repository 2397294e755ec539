"""Blocks that are served over TCP where a thread, or the arena, fails."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.echo_server import PATIENCE_S, end
from numpy.typing import NDArray

from raykv.protocol import LOCATION
from raykv.system import wire
from raykv.transports.block_server import CLAIM, BlockServer

REQUEST = wire.frame(np.zeros(1, LOCATION).tobytes() + bytes(16))
BYTES = 3000


class Arena:
    """Has one block, or fails."""

    error: Exception | None = None

    def read_for_peer(self, locations: NDArray[np.void], keys: NDArray[np.uint8]) -> Any:
        if self.error:
            raise self.error
        one = np.ones(len(keys), np.uint8)
        runs = [SimpleNamespace(data=bytes(BYTES))]
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
