"""Finds the blocks that would be lost with a node."""

import numpy as np

from raykv.directory.kernels.columns import EXTERNAL, INT, READY, ROWS, WRITING, C
from raykv.directory.kernels.lists import node_of, present, stays
from raykv.directory.kernels.table import first_of
from raykv.system.jit import kernel


@kernel(C, INT, INT, INT, ROWS, INT)
def find_sole(c, base, slots, tier, out, n):
    """Append a slab's primaries that are sole copies to out[n:]: see `_is_sole_copy`.

    tier: index of an external tier that outlives the node, -1 if there is none. Returns the new n, and the number of
    sole copies that are still being written.
    """
    writing = 0
    for row in range(base, base + slots):
        state = c.rows[row].state
        if ((state == READY) | (state == WRITING)) and _is_sole_copy(c, row, tier):
            if state == READY:
                out[n] = row
                n += 1
            else:
                writing += 1
    return n, writing


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
