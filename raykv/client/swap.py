"""Blocks of preempted requests: the pool keeps them until the engine resumes the request, then forgets them."""

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from raykv import keys as key_chain
from raykv.arena import buffers
from raykv.arena.buffers import Rows
from raykv.client.leases.match import Match
from raykv.client.reservation import store_rows
from raykv.client.session import Session
from raykv.keys import CacheId, Keys
from raykv.protocol.transfers import data_deadline

SLACK = 4  # a swap-in waits for this many deadlines of a read; blocks that are still missing are lost
RETRY_S = 0.05  # interval between two matches for kept blocks that were not read yet


@dataclass
class Swapped:
    """A preempted request."""

    blocks: int
    keys: Keys
    stored: Future[int] | None = None

    def kept(self) -> bool:
        """Whether the pool had room for the request's blocks. Waits until that is known."""
        return self.stored is not None and self.stored.result() > 0


class Swaps:
    """The requests that one process has swapped out of one cache.

    The directory keeps their blocks, in memory or in an external tier, for as long as this process lives.
    """

    def __init__(self, session: Session, cache: CacheId, root: bytes) -> None:
        """root: root of the cache's keys."""
        self._session, self._cache, self._root = session, cache, root
        self._secret = secrets.token_bytes(8)  # another process may use the same request ids
        self._requests: dict[str, Swapped] = {}
        self._numbers = itertools.count()  # for unique keys: an engine may reuse a request id for other blocks
        self._lock = threading.Lock()  # guards _requests

    def out(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """See KVCache.swap_out."""
        rows = buffers.paged(paged, block_ids, len(block_ids), self._cache.block_bytes)
        self.drop(request_id)
        prefix = self._secret + next(self._numbers).to_bytes(8, "little")
        hashes = [prefix + i.to_bytes(8, "little") for i in range(len(rows))]
        request = Swapped(len(rows), Keys(key_chain.rekey(self._root, hashes), self._cache))
        request.stored = self._session.background(self._out, rows, request)
        with self._lock:
            self._requests[request_id] = request
        return request.stored

    def back(self, paged: Any, block_ids: Sequence[int], request_id: str) -> Future[int]:
        """See KVCache.swap_in."""
        rows = buffers.paged(paged, block_ids, len(block_ids), self._cache.block_bytes, writable=True)
        with self._lock:
            request = self._requests.get(request_id)
            if request and request.blocks != len(rows):
                raise ValueError(f"{len(rows)} block_ids for request {request_id!r}, which has {request.blocks} blocks")
            self._requests.pop(request_id, None)
        return self._session.background(self._back, rows, request)

    def drop(self, request_id: str) -> None:
        """See KVCache.swap_drop."""
        with self._lock:
            request = self._requests.pop(request_id, None)
        if request:
            self._session.background(self._drop, request)

    def _out(self, rows: Rows, request: Swapped) -> int:
        store_rows(self._session, request.keys, rows)
        kept = self._session.directory.preempted(request.keys.tobytes())
        if kept is None:  # the directory may keep the blocks although no answer came
            self._session.directory.forget_later(request.keys.tobytes())
        return kept or 0

    def _back(self, rows: Rows, request: Swapped | None) -> int:
        if request is None or not request.kept():
            return 0
        tokens_per_s = float(self._cache.block_tokens)  # so that a read waits at most one second per block for a tier
        end, done = time.monotonic() + SLACK * data_deadline(request.blocks * self._cache.block_bytes), 0
        try:
            while done < request.blocks:
                with Match(self._session, request.keys[done:], tokens_per_s).ask() as match:
                    done += match.read_rows(rows[done : done + match.num_blocks])
                if time.monotonic() > end:
                    break
                time.sleep(RETRY_S if done < request.blocks else 0.0)
            return done
        finally:
            self._session.directory.forget_later(request.keys.tobytes())

    def _drop(self, request: Swapped) -> None:
        if request.kept():
            self._session.directory.forget_later(request.keys.tobytes())
