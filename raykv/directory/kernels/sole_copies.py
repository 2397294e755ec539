"""Finds the blocks that would be lost with a node."""

import numpy as np

from raykv.directory.kernels.columns import EXTERNAL, INT, READY, ROWS, TENANTS, WRITING, C
from raykv.directory.kernels.eviction import oldest
from raykv.directory.kernels.lists import listed, node_of, present, ready_list, stays
from raykv.directory.kernels.table import first_of
from raykv.system.jit import kernel


@kernel(C, INT, INT, INT, ROWS, INT)
def held(c, base, slots, tier, out, n):
    """Like `in_lists`, but for a slab's primaries that are in no list. Only held primaries are in no list."""
    for row in range(base, base + slots):
        if n < len(out) and c.rows[row].state == READY and not listed(c, row) and _is_sole_copy(c, row, tier):
            out[n] = row
            n += 1
    return n


@kernel(C, INT, INT, INT)
def count(c, base, slots, tier):
    """Count a slab's sole copies, including blocks that are still being written."""
    n = 0
    for row in range(base, base + slots):
        state = c.rows[row].state
        if (state == READY) | (state == WRITING):
            n += _is_sole_copy(c, row, tier)
    return n


@kernel(C, INT, INT, ROWS, ROWS, INT)
def in_lists(c, size_class, tier, heads, out, n):
    """Append a size class's primaries that are sole copies to out[n:], youngest first: see `_is_sole_copy`.

    tier: index of an external tier that outlives the node, -1 if there is none. heads: scratch space, an entry for each
    tenant. Returns the new n.
    """
    oldest(c, size_class)  # removes held rows at the old end from the lists, so that `held` finds them
    for tenant in range(c.state[TENANTS]):
        heads[tenant] = c.lists[ready_list(size_class, tenant)].head
    while n < len(out):
        youngest = 0
        for tenant in range(1, c.state[TENANTS]):
            head, best = heads[tenant], heads[youngest]
            if head >= 0 and (best < 0 or c.rows[head].last > c.rows[best].last):
                youngest = tenant
        row = heads[youngest]
        if row < 0:
            break
        if _is_sole_copy(c, row, tier):
            out[n] = row
            n += 1
        heads[youngest] = c.rows[row].next
    return n


@kernel
def _is_sole_copy(c, row, tier):
    """Whether a row's key has no copy on a node that stays, and no copy in the external tier with index `tier`."""
    other = first_of(c, row)
    while other >= 0:
        state = c.rows[other].state
        if (present(state) and stays(c, other)) or (state == EXTERNAL and node_of(c, other) == tier):
            return False
        other = np.int64(c.rows[other].same)
    return True
