"""Blocks of requests that an engine has preempted: kept in the pool until the request comes back, then forgotten."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raykv import rows as row_checks
from raykv.rows import Rows

if TYPE_CHECKING:
    from raykv.cache import KVCache, Match
    from raykv.client import KVPool


@dataclass
class Swapped:
    """A preempted request."""

    blocks: int
    match: Match | None = None  # holds its blocks, once `stored` is done; None: there was no room
    stored: Future[int] | None = None


class Swaps:
    """What one process has swapped out of one cache. Each request's blocks are leased: none is evicted before it ends.

    A process that dies lets go of all.
    """

    def __init__(self, cache: KVCache, pool: KVPool) -> None:
        self._cache, self._pool = cache, pool
        self._secret = secrets.token_bytes(8)  # another process may use the same request ids
        self._requests: dict[str, Swapped] = {}
        self._lock = threading.Lock()

    def out(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        rows = row_checks.paged(paged, block_ids, len(block_ids), self._cache.block_bytes)
        self.drop(request_id)
        request = Swapped(len(rows))
        request.stored = self._pool.background(self._out, rows, request_id, request)
        with self._lock:
            self._requests[request_id] = request
        return request.stored

    def back(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        rows = row_checks.paged(paged, block_ids, len(block_ids), self._cache.block_bytes, writable=True)
        with self._lock:
            request = self._requests.get(request_id, Swapped(len(rows)))
            if request.blocks != len(rows):
                raise ValueError(f"{len(rows)} block_ids for request {request_id!r}, which has {request.blocks} blocks")
            self._requests.pop(request_id, None)
        return self._pool.background(self._back, rows, request)

    def drop(self, request_id: str) -> None:
        with self._lock:
            request = self._requests.pop(request_id, None)
        if request:
            self._pool.background(_forget, request)

    def _out(self, rows: Rows, request_id: str, request: Swapped) -> int:
        names = [self._secret + i.to_bytes(8, "little") + request_id.encode() for i in range(len(rows))]
        keys = self._cache.rekey(names)
        self._pool.link.call("preempted")
        self._cache.store_rows(keys, rows)
        match = self._cache.match(keys)
        if match.num_blocks < len(keys):  # part of a request is of no use
            match.release()
            self._pool.link.call("forget", keys.tobytes())
            return 0
        request.match = match
        return len(keys)

    def _back(self, rows: Rows, request: Swapped) -> int:
        if request.stored is None or not request.stored.result() or request.match is None:
            return 0
        try:
            return request.match.read_rows(rows)
        finally:
            request.match.forget()


def _forget(request: Swapped) -> None:
    if request.stored and request.stored.result() and request.match:
        request.match.forget()
