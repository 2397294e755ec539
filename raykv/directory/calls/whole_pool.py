"""Calls of an administrator about a whole pool."""

from raykv.config import Quota
from raykv.directory.calls.upkeep import check
from raykv.directory.kernels import slabs
from raykv.directory.kernels.columns import ENTRIES
from raykv.directory.state.state import State


def indices(state: State) -> dict[int, str]:
    """Return nodes' names by their index in locations. A node with its own tier has a second index for the tier."""
    own = {tier.index: name for name, tier in state.tier_catalog.tiers.items() if tier.owner}
    return {node.index: name for name, node in state.nodes.items()} | own


def clear(state: State, now: float) -> int:
    """Forget every block. A held block keeps its slot until the hold ends. Returns how many keys there were."""
    check(state, now)
    keys = int(state.c.state[ENTRIES])
    state.floor = state.size_classes.last_gen
    for node in state.nodes.values():
        for record in node.slabs.values():
            slabs.clear_rows(state.c, *state.size_classes.span(record))
    state.tier_catalog.clear()
    state.pins.repair()
    state.hit_curve.begin()  # the old curve would expect hits on cleared blocks
    return keys


def set_quota(state: State, tenant: str, quota: Quota, now: float) -> None:
    """Set a tenant's minimum and maximum. ValueError if the sum of all tenants' minima would exceed 1.

    While any tenant has a quota, no memory is reserved for copies: see `nodes.follow`.
    """
    check(state, now)
    state.quotas.set(tenant, quota)
    state.plan = state.plan._replace(copies=0.0)
    for node in state.nodes.values():
        if node.copies:
            node.copies = 0.0
            state.allocator.resize_windows(node)


def remove_quota(state: State, tenant: str, now: float) -> bool:
    """Remove a tenant's quota. Returns whether the tenant had a quota."""
    check(state, now)
    return state.quotas.remove(tenant)
