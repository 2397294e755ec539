"""A pool without Ray: a directory behind its socket, in this process, and one node that has no arena.

Managers get real answers. A `Content` sets which blocks the pool has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from raykv.actors.directory.metrics import DirectoryMetrics
from raykv.actors.directory.server import DirectoryServer
from raykv.client import directory_client, tending
from raykv.client.directory_client import DirectoryClient
from raykv.client.pool import KVPool
from raykv.client.session import Session
from raykv.client.tending import Tending
from raykv.directory.directory import Directory
from raykv.keys import CacheId, Keys
from raykv.line.directory_line import DirectoryLine
from raykv.line.pipeline import Pipeline
from raykv.protocol.calls import STORE
from raykv.protocol.clients import Reserved
from raykv.protocol.location import Address
from raykv.protocol.stores import ArenaDescription, Inventory, SlabReport

NODE, SLABS, SLAB_BYTES, BLOCK_BYTES = "node", 4096, 1 << 20, 4096
CACHE = CacheId("contract", 1, BLOCK_BYTES, b"")
STATES = MISSING, PENDING, READY = range(3)


class Line(DirectoryLine):
    address_of_all: ClassVar[Address]

    def find(self) -> bool:
        if self.connection is None:
            self._pipeline = Pipeline(self.address_of_all, self._side)
        return True


@contextmanager
def open_pool() -> Iterator[KVPool]:
    patch = pytest.MonkeyPatch()
    patch.setattr(directory_client, "DirectoryLine", Line)
    for module in (directory_client, tending):
        patch.setattr(module, "ray", SimpleNamespace(is_initialized=lambda: True))
    server = DirectoryServer("contract", DirectoryMetrics("contract", ""), lambda: 0.0)  # time stands still
    server.serve(Directory(1))
    Line.address_of_all = server.listen("127.0.0.1")
    session = object.__new__(Session)
    session.name, session.node_id, session.secret, session.local = "contract", NODE, bytes(32), None
    session.directory = _client()
    _join()
    pool = object.__new__(KVPool)
    pool.name, pool.session, pool.node_id = session.name, session, NODE
    yield pool
    pool.close()
    server.close()
    patch.undo()


def _client() -> DirectoryClient:
    client = DirectoryClient("contract", lambda: 0, deadline=60.0)  # a late answer on a busy machine would be a miss
    Tending(client)
    return client


def _join() -> None:
    line = Line("contract", STORE)
    line.find()
    report, nothing = tuple(SlabReport(SLABS, SLABS, b"")), Inventory(b"", b"", b"", b"", b"")
    arena = ArenaDescription(os.urandom(16), SLAB_BYTES, SLABS, 0)
    line.call("join", NODE, tuple(arena), seconds=10)
    line.call("adopt", NODE, report, tuple(nothing), seconds=10)
    line.call("heartbeat", NODE, report, seconds=10)
    line.close()


class Content:
    """Another engine's blocks in the pool: ready ones, and pending ones that it still writes."""

    def __init__(self) -> None:
        self._client = _client()
        self._pending: dict[bytes, tuple[int, Reserved]] = {}
        self._ready: set[bytes] = set()

    def close(self) -> None:
        """The engine leaves. Its ready blocks stay."""
        self._client.close()

    def set(self, key: bytes, state: int) -> None:
        """Set the state of a key of the pool. state: one of STATES."""
        if state == self.state(key):
            return
        if key in self._ready:
            self._ready.remove(key)
            assert self._client.forget(key)
        if state == MISSING:
            if key in self._pending:
                self._client.release(self._pending.pop(key)[0])
                self._client.heartbeat()
            return
        if key not in self._pending:
            reservation, granted = self._client.reserve(NODE, Keys(np.frombuffer(key, np.uint8)[None], CACHE), 0)
            assert granted is not None and np.frombuffer(granted.indices, np.int32).tolist() == [0]
            self._pending[key] = reservation, granted
        if state == READY:
            reservation, granted = self._pending.pop(key)
            assert self._client.commit(reservation, granted.locations, key, b"\1") == 1
            self._ready.add(key)

    def state(self, key: bytes) -> int:
        return READY if key in self._ready else PENDING if key in self._pending else MISSING
