"""Chains of readers: readers of the same long prefix pull each block one after another, from the newest copy.

Without a chain, all readers would read the same copy, on one node. A reader waits while another reader pulls a copy of
its next block. When that copy has arrived, the waiting reader pulls the block from the copy, and the next reader waits
for this new copy. A reader that has waited too long gives up the copies that are on their way: no reader waits for
these copies any more. `leases.next_window` grants the slots.
"""

import numpy as np

from raykv.directory.kernels.columns import HOLDS_MAX, INT, KEYS, STAGING, TO_ALL, UNSTAGED, C
from raykv.directory.kernels.lists import is_tier_row, node_of, present, stays
from raykv.directory.kernels.table import first_row
from raykv.system.jit import kernel

GIVEN_UP = 0  # `last` of a STAGING row for which no reader waits


@kernel
def in_chains(c, size_class):
    """Whether readers of a size class form chains.

    Readers on GPUs form no chains, as their node's memory is nearer than any copy. Readers on nodes that are leaving or
    late with heartbeats form no chains either.
    """
    return size_class >= 0 and c.size_classes[size_class].offered == TO_ALL


@kernel
def is_crowded(c, row):
    """Whether a copy is in memory and has holders besides the reader."""
    return c.rows[row].holds > 1 and not is_tier_row(c, row)


@kernel
def copies_elsewhere(c, first, node):
    """Check a key's copies on other nodes. Returns (row of newest copy in memory or -1, whether a copy is arriving).

    A copy is arriving while a reader pulls it into a staging slot, unless the copy was given up. Ignores copies on
    GPUs, and on nodes that are leaving or late with heartbeats.
    """
    newest, arrives = np.int64(-1), False
    row = np.int64(first)
    while row >= 0:
        if node_of(c, row) != node and stays(c, row):
            arrives |= c.rows[row].state == STAGING and c.rows[row].last != GIVEN_UP
            if present(c.rows[row].state) and c.rows[row].holds < HOLDS_MAX:
                newest = row
        row = np.int64(c.rows[row].same)
    return newest, arrives


@kernel
def arrives_elsewhere(c, firsts, n, reader, blocks):
    """Whether a reader must wait because another reader is pulling a copy of its next block.

    The next block is the first block without a staging slot. n: number of the reader's blocks.
    """
    for i in range(n):
        if blocks.staged[i] == UNSTAGED:
            crowded = in_chains(c, reader.size_class) and is_crowded(c, np.int64(blocks.source[i]))
            return crowded and copies_elsewhere(c, firsts[i], reader.node)[1]
    return False


@kernel(C, KEYS, INT, INT)
def give_up(c, keys, node, gen):
    """Give up the copies that readers on other nodes are pulling, so that no reader waits for these copies any more.

    gen: newest generation of the copies to give up.
    """
    for i in range(len(keys)):
        row = first_row(c, keys[i, 0], keys[i, 1])
        while row >= 0:
            if c.rows[row].state == STAGING and node_of(c, row) != node and c.rows[row].gen <= gen:
                c.rows[row].last = GIVEN_UP
            row = np.int64(c.rows[row].same)
