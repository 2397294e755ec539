"""Figures of a directory: counters, gauges, statistics."""

from typing import Any

from raykv.directory.calls.readers import locate_prefix
from raykv.directory.calls.upkeep import check
from raykv.directory.kernels.columns import ENTRIES
from raykv.directory.state.state import COUNTERS, State


def totals(state: State) -> dict[str, int]:
    """Return the counts since the pool started, including the counts of earlier directories."""
    return {**state.counters, "evicted": state.evicted_before + int(state.c.size_classes["evicted"].sum())}


def resume(state: State, totals: dict[str, int]) -> None:
    """Continue counting from the previous directory's totals. Ignores unknown names."""
    state.evicted_before = totals.get("evicted", 0)
    state.counters.update({name: totals[name] for name in COUNTERS if name in totals})


def gauges(state: State) -> dict[str, int]:
    """Return the figures of the present state that can be computed without looking at every slot."""
    held = [hold.writes for client in state.clients.values() for hold in client.holds.values()]
    return {
        "keys": int(state.c.state[ENTRIES]),
        "leases": held.count(False),
        "reservations": held.count(True),
        "clients": len(state.clients),
        "pinned": len(state.pins),
        "intents": len(state.intents),
    }


def oldest_lease(state: State) -> float:
    """Return the time at which the oldest lease began, on the callers' clock; inf if there are no leases."""
    held = (hold for client in state.clients.values() for hold in client.holds.values())
    return min((hold.since for hold in held if not hold.writes), default=float("inf"))


def coldest(state: State, name: str) -> int:
    """Return when a node's oldest block in use was last used, as a tick (`State.tick`); -1: no block is in use."""
    node = state.nodes.get(name)
    ticks = [state.size_classes.oldest_tick_in_use(number) for number in node.size_classes.values()] if node else []
    return min((tick for tick in ticks if tick >= 0), default=-1)


def largest_prefixes(state: State, n: int, now: float) -> list[dict[str, Any]]:
    """Return at most `n` prefixes that look-ups of this directory found, in descending order of `hits` times `blocks`.

    key: key of the last block, in hex. blocks, bytes: size of the prefix. hits: number of look-ups that found exactly
    this prefix. idle_s: seconds since the last hit. nodes: names of the nodes that have the last block in memory.
    """
    return [
        {
            "key": prefix.key.hex(),
            "blocks": prefix.blocks,
            "bytes": prefix.blocks * prefix.block_bytes,
            "hits": prefix.hits,
            "idle_s": now - prefix.last,
            "nodes": list(locate_prefix(state, prefix.key).nodes),
        }
        for prefix in state.prefixes.largest(n)
    ]


def stats(state: State, now: float) -> dict[str, Any]:
    """Return gauges, totals since the pool started, figures by node, tier and tenant, and the hit curve."""
    check(state, now)
    tiers = state.tier_catalog.stats()
    used = sum(tier["bytes_used"] for tier in tiers.values())
    return {
        "epoch": state.epoch,
        **gauges(state),
        **totals(state),
        "nodes": {name: state.allocator.stats(node, now) for name, node in state.nodes.items()},
        "tiers": tiers,
        "tenants": state.quotas.stats(),
        "hit_curve": state.hit_curve.figures(),
        "external_cache_usage": used / max(1, sum(tier["capacity"] for tier in tiers.values())),
    }
