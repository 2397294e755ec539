"""What is counted and shown of a directory."""

from collections.abc import Iterator
from typing import Any

from raykv.directory.calls.readers import locate_prefix
from raykv.directory.calls.upkeep import check
from raykv.directory.kernels.columns import ENTRIES
from raykv.directory.state.state import COUNTERS, State


def totals(state: State) -> dict[str, int]:
    """What has happened since the pool started, counted by this directory and by those before it."""
    return {**state.counters, "evicted": state.evicted_before + int(state.c.size_classes["evicted"].sum())}


def resume(state: State, totals: dict[str, int]) -> None:
    """Go on counting from the totals of the directory before. Unknown names are left out."""
    state.evicted_before = totals.get("evicted", 0)
    state.counters.update({name: totals[name] for name in COUNTERS if name in totals})


def gauges(state: State) -> dict[str, int]:
    """What is so now, without a look at every slot."""
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
    """Since when, by the callers' clock, the oldest lease is held; inf where there is none."""
    held = (hold for client in state.clients.values() for hold in client.holds.values())
    return min((hold.since for hold in held if not hold.writes), default=float("inf"))


def coldest(state: State, name: str) -> int:
    """Tick of the last use of the block that a node evicts next; -1 where it has none."""
    node = state.nodes.get(name)
    ticks = [state.size_classes.oldest_tick(number) for number in node.size_classes.values()] if node else []
    return min((tick for tick in ticks if tick >= 0), default=-1)


def memory_stats(state: State, name: str, now: float, slots_a_step: int) -> Iterator[dict[str, Any] | None]:
    """Slots by state, and bytes, of the memory of that name, which must be there. It looks at every slot.

    So it is done in steps: None after every so many slots, then the answer. Others may call between two steps.
    """
    return state.allocator.stats_in_steps(state.nodes[name], now, slots_a_step)


def tier_fill(state: State) -> dict[str, dict[str, Any]]:
    """By the node that owns a tier, or "" for one that all share; see TierCatalog.fill."""
    return state.tier_catalog.fill()


def largest_prefixes(state: State, n: int, now: float) -> list[dict[str, Any]]:
    """At most `n` that look-ups ended with since this directory began, that of the most blocks found first.

    key: of the last block, in hex. blocks, bytes: of the prefix. hits: look-ups that ended there. idle_s: since the
    last. nodes: where the last block is in memory.
    """
    return [
        {
            "key": prefix.key.hex(),
            "blocks": prefix.blocks,
            "bytes": prefix.blocks * prefix.block_bytes,
            "hits": prefix.hits,
            "idle_s": now - prefix.last,
            "nodes": list(locate_prefix(state, prefix.key)),
        }
        for prefix in state.prefixes.largest(n)
    ]


def stats(state: State, now: float) -> dict[str, Any]:
    """Slots by node and state, leases and reservations, and totals since start."""
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
        "external_cache_usage": used / max(1, sum(tier["capacity"] for tier in tiers.values())),
    }
