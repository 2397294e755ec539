"""Exact caches that serve a trace: lower and upper bounds of what a pool serves.

Each cache function returns the number of served leading blocks of each request.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Sequence

from raykv.bench.trace.formats import Request

NEVER = 1 << 60  # a block's next request, if no later request asks for the block


def leading(request: Request, cache: Container[int]) -> int:
    """Number of leading blocks of a request that a cache has."""
    return next((i for i, block in enumerate(request.ids) if block not in cache), len(request.ids))


def lru(requests: Sequence[Request], capacities: list[int], nodes: Sequence[int]) -> list[int]:
    """Isolated LRUs. nodes: index of each request's LRU. A request touches its blocks from last to first."""
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
    hits = []
    for request, node in zip(requests, nodes, strict=True):
        cache = caches[node]
        hits.append(leading(request, cache))
        for block in reversed(request.ids):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacities[node]:
            cache.popitem(last=False)
    return hits


def endless(requests: Sequence[Request]) -> list[int]:
    """A cache that never evicts."""
    cache, hits = set[int](), []
    for request in requests:
        hits.append(leading(request, cache))
        cache.update(request.ids)
    return hits


def optimum(requests: Sequence[Request], capacity: int) -> list[int]:
    """A cache that knows all later requests: it evicts the block whose next request comes last (Belady, 1966)."""
    following = _following(requests)
    due, farthest, hits = dict[int, int](), list[tuple[int, int, int]](), []
    for request, later in zip(requests, following, strict=True):
        hits.append(leading(request, due))
        for depth, (block, again) in enumerate(zip(request.ids, later, strict=True)):
            due[block] = again
            heapq.heappush(farthest, (-again, -depth, block))  # if blocks are due together, evict the deepest
        while len(due) > capacity:
            again, _, block = heapq.heappop(farthest)
            if due.get(block) == -again:  # otherwise the entry is outdated: the block was requested again
                del due[block]
    return hits


def _following(requests: Sequence[Request]) -> list[list[int]]:
    """Return, by request and block, the number of the next request for the same block."""
    due, found = dict[int, int](), list[list[int]]()
    for number in reversed(range(len(requests))):
        ids = requests[number].ids
        found.append([due.get(block, NEVER) for block in ids])
        due.update(dict.fromkeys(ids, number))
    return found[::-1]
