"""Share of a trace's prompt tokens that a pool serves, by capacity and by routing of requests.

The bench needs no cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

from raykv.bench.trace import caches, formats
from raykv.bench.trace.formats import Trace
from raykv.bench.trace.pool import BLOCK_BYTES, Pool, Served, percent
from raykv.config import PoolConfig


def run(path: str | PathLike[str], nodes: int, capacities: list[int], external: int = 0) -> dict[str, Any]:
    """Return the token-weighted hit percent of a trace whose requests go to `nodes` nodes in turn, by capacity.

    capacities: total number of blocks of all nodes, without staging slots. Blocks have as many tokens as in the trace.
    external: total number of blocks of all external tiers; 0 for no tiers.
    ceiling: hit percent of a cache that never evicts.
    results: one row for each capacity. Caches: exact_lru, isolated, optimum (a cache that knows all later requests).
    Pools: pool_strict (locality 1) and pool. If all requests go to one node: pool_one_writer, pool_one_writer_strict.
    local_stores: percent of the stored blocks that stayed on the writer's node. hit_curve: the pool's own estimate of
    exact_lru, in percent of blocks. `pool` has three more figures: the other fields of `Served`.
    If the trace has sessions, there are two more pools: `sticky`, in which each session stays on a node (with the same
    three figures), and `told`, in which sessions report long waits and their end.
    With `external` there are exact_lru_external (an LRU of `external` blocks), pool_shared_tier (all nodes share a
    tier) and pool_own_tiers (each node has a tier).
    Raises ValueError for a malformed trace, nodes < 1, or less than one block for each node.
    """
    if nodes < 1 or any(blocks < nodes for blocks in [*capacities, external or nodes]):
        raise ValueError(f"nodes={nodes}, capacity={capacities}, external={external}: every node needs a block")
    trace = formats.read(path)
    requests, default = trace.requests, PoolConfig().locality
    turns, one = [number % nodes for number in range(len(requests))], [0] * len(requests)
    sessions = sticky(trace, nodes)
    results = []
    for capacity in capacities:
        row: dict[str, Any] = {"capacity": capacity}
        shares = divided(capacity, nodes)

        def figure(name: str, percent: float, row: dict[str, Any] = row) -> None:
            row[name] = round(percent, 2)

        def served(name: str, found: Served, row: dict[str, Any] = row) -> None:
            figure(name, found.percent)
            row |= {
                f"{name}_{field}": round(value, 2) for field, value in found._asdict().items() if field != "percent"
            }

        def pool(locality: float, to: Sequence[int], *tiers: list[int], shares: list[int] = shares) -> Served:
            return Pool(shares, locality, *tiers).serve(trace, to)

        figure("exact_lru", percent(trace, caches.lru(requests, [capacity], one)))
        figure("isolated", percent(trace, caches.lru(requests, shares, turns)))
        figure("optimum", percent(trace, caches.optimum(requests, capacity)))
        figure("pool_strict", pool(1.0, turns).percent)
        in_turn = Pool(shares, default)
        served("pool", in_turn.serve(trace, turns))
        figure("hit_curve", 100 * in_turn.directory.hit_curve.hit_rate(capacity * BLOCK_BYTES))
        row["local_stores"] = round(100 * in_turn.local / max(1, in_turn.stored), 2)
        figure("pool_one_writer", pool(default, one).percent)
        figure("pool_one_writer_strict", pool(1.0, one).percent)
        if sessions:
            served("sticky", pool(default, sessions))
            figure("told", Pool(shares, default).serve(trace, turns, waits(trace)).percent)
        if external:
            figure("exact_lru_external", percent(trace, caches.lru(requests, [external], one)))
            figure("pool_shared_tier", pool(default, turns, [external]).percent)
            figure("pool_own_tiers", pool(default, turns, divided(external, nodes)).percent)
        results.append(row)
    return {
        "requests": len(requests),
        "sessions": len({request.session for request in requests if request.session is not None}),
        "blocks": sum(len(request.ids) for request in requests),
        "block_tokens": trace.block_tokens,
        "nodes": nodes,
        "locality": default,
        "external": external,
        "ceiling": round(percent(trace, caches.endless(requests)), 2),
        "results": results,
    }


def sticky(trace: Trace, nodes: int) -> list[int]:
    """Return the node of each request, or [] if requests have no session. Sessions get nodes in turn."""
    homes = dict[int, int]()
    if any(request.session is None for request in trace.requests):
        return []
    return [homes.setdefault(request.session or 0, len(homes) % nodes) for request in trace.requests]


def waits(trace: Trace) -> list[float]:
    """Seconds from each request to the next request of its session; inf after the last request."""
    following, found = dict[int | None, float](), list[float]()
    for request in reversed(trace.requests):
        found.append(following.get(request.session, math.inf) - request.at)
        following[request.session] = request.at
    return found[::-1]


def divided(capacity: int, parts: int) -> list[int]:
    """Divide a capacity into shares that differ by at most one."""
    return [capacity // parts + (i < capacity % parts) for i in range(parts)]
