"""Blocks of requests that an engine has preempted: kept in the pool until the request comes back, then forgotten."""

from __future__ import annotations

import copy
import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raykv.arena import buffers as row_checks
from raykv.arena.buffers import Rows
from raykv.protocol import data_deadline

if TYPE_CHECKING:
    from raykv.client.cache import KVCache
    from raykv.client.pool import KVPool


SLACK = 4  # times a read's deadline: what is not back by then is lost
AGAIN_S = 0.05  # between looks for blocks that are kept, and did not come


@dataclass
class Swapped:
    """A preempted request."""

    blocks: int
    keys: NDArray[np.uint8]
    stored: Future[int] | None = None

    def kept(self) -> bool:
        """Whether the pool had room for it, once that is known."""
        return self.stored is not None and self.stored.result() > 0


class Swaps:
    """What one process has swapped out of one cache. The directory keeps those blocks, in memory or below, for as long
    as this process is there.
    """

    def __init__(self, cache: KVCache, pool: KVPool) -> None:
        self._cache, self._pool = cache, pool
        self._secret = secrets.token_bytes(8)  # another process may use the same request ids
        self._requests: dict[str, Swapped] = {}
        self._numbers = itertools.count()  # a key always means the same bytes, a request id does not
        self._lock = threading.Lock()

    def out(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        rows = row_checks.paged(paged, block_ids, len(block_ids), self._cache.block_bytes)
        self.drop(request_id)
        prefix = self._secret + next(self._numbers).to_bytes(8, "little")
        names = [prefix + i.to_bytes(8, "little") for i in range(len(rows))]
        request = Swapped(len(rows), self._cache.rekey(names))
        request.stored = self._pool.background(self._out, rows, request)
        with self._lock:
            self._requests[request_id] = request
        return request.stored

    def back(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        rows = row_checks.paged(paged, block_ids, len(block_ids), self._cache.block_bytes, writable=True)
        with self._lock:
            request = self._requests.get(request_id)
            if request and request.blocks != len(rows):
                raise ValueError(f"{len(rows)} block_ids for request {request_id!r}, which has {request.blocks} blocks")
            self._requests.pop(request_id, None)
        return self._pool.background(self._back, rows, request)

    def drop(self, request_id: str) -> None:
        with self._lock:
            request = self._requests.pop(request_id, None)
        if request:
            self._pool.background(self._drop, request)

    def _out(self, rows: Rows, request: Swapped) -> int:
        self._cache.store_rows(request.keys, rows)
        answer = self._pool.link.call("preempted", request.keys.tobytes())
        if answer is None:  # it may keep them yet
            self._pool.link.retry_later("forget", request.keys.tobytes())
        return int(answer[1]) if answer else 0

    def _back(self, rows: Rows, request: Swapped | None) -> int:
        if request is None or not request.kept():
            return 0
        patient = copy.copy(self._cache)
        patient.recompute_tokens_per_s = float(patient.block_tokens)  # a second a block, while it takes no longer
        end, done = time.monotonic() + SLACK * data_deadline(request.blocks * patient.block_bytes), 0
        try:
            while done < request.blocks:
                with patient.match(request.keys[done:]) as match:
                    done += match.read_rows(rows[done : done + match.num_blocks])
                if time.monotonic() > end:
                    break
                time.sleep(AGAIN_S if done < request.blocks else 0.0)
            return done
        finally:
            self._pool.link.retry_later("forget", request.keys.tobytes())

    def _drop(self, request: Swapped) -> None:
        if request.kept():
            self._pool.link.retry_later("forget", request.keys.tobytes())
