"""What an administrator asks of a pool."""

from raykv.config import Quota
from raykv.directory.calls.upkeep import check
from raykv.directory.kernels import slabs
from raykv.directory.kernels.columns import ENTRIES
from raykv.directory.state.state import State


def indices(state: State) -> dict[int, str]:
    """Names of nodes by the index that locations carry: their memory's, and their own tier's."""
    own = {tier.index: name for name, tier in state.tier_catalog.tiers.items() if tier.owner}
    return {node.index: name for name, node in state.nodes.items()} | own


def clear(state: State, now: float) -> int:
    """Forget every block. Who holds one keeps its slot until then. Returns how many keys there were."""
    check(state, now)
    keys = int(state.c.state[ENTRIES])
    state.floor = state.size_classes.last_gen
    for node in state.nodes.values():
        for record in node.slabs.values():
            slabs.clear_rows(state.c, *state.size_classes.span(record))
    state.tier_catalog.clear()
    state.pins.repair()
    return keys


def set_quota(state: State, tenant: str, quota: Quota, now: float) -> None:
    """Set what a tenant has at least and at most. ValueError where the minima of all would be above 1."""
    check(state, now)
    state.quotas.set(tenant, quota)


def remove_quota(state: State, tenant: str, now: float) -> bool:
    """Have a tenant compete with all that have no quota. Returns whether it had one."""
    check(state, now)
    return state.quotas.remove(tenant)
