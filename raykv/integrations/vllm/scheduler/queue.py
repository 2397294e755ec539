"""Requests in the engine's queue. While they wait, their chunks are fetched to the node of the engine's scheduler."""

from __future__ import annotations

from collections.abc import Callable

from raykv.client.stores.local_store import LocalStore
from raykv.config import staging_window
from raykv.integrations.vllm.chunks.chain import Chain

AT_ONCE = 2  # number of requests whose chunks are fetched ahead; more would evict the first requests' chunks


def ahead_bytes(local: LocalStore | None) -> int:
    """Return how many bytes to fetch ahead for a request. All requests together get half of the node's staging window.

    The window is the node's room for blocks from other nodes. local: the node's store.
    """
    capacity = local.arena.offered * local.arena.slab_bytes if local else 0
    return staging_window(capacity) // (2 * AT_ONCE)


class Queue:
    """Requests that vLLM has not scheduled yet, in the order of their arrival. Only one thread uses it."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Chain, int]] = {}  # each request's chain, and the step in which it arrived
        self._ahead: set[str] = set()  # requests of `_waiting` whose chunks are fetched
        self._step = 0

    def add(self, request: str, chain: Chain) -> None:
        self._waiting[request] = chain, self._step

    def leave(self, request: str) -> None:
        """Remove a request that is looked up, is scheduled, or has ended."""
        self._waiting.pop(request, None)
        self._ahead.discard(request)

    def step(self, fetch: Callable[[Chain], None]) -> None:
        """Call `fetch` once for each of the first requests that have waited for a whole step."""
        for request, (chain, step) in self._waiting.items():
            if step == self._step or len(self._ahead) == AT_ONCE:
                break
            if request not in self._ahead and chain.is_named:
                self._ahead.add(request)
                fetch(chain)
        self._step += 1
