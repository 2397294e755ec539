"""Which block is evicted: the line that evicts is in `evict`.

Each size class keeps its primaries in a list by age. A writer's own size class evicts its oldest, unless the oldest of
the whole cluster was idle much longer (`victim`). Called by `placement.reserve` for a writer, and by `restore_window`
where blocks have used up a staging window.
"""

import numpy as np

from raykv.directory.kernels.columns import CLOCK, INT, LISTS_PER_CLASS, REPLICA, TO_ALL, C
from raykv.directory.kernels.index import (
    alone,
    delete,
    forget,
    free,
    list_of,
    prefetch,
    prefetch_entry,
    probe,
    row_at,
    unlink,
)
from raykv.directory.kernels.slots import room
from raykv.system.jit import kernel


@kernel(C, INT)
def oldest(c, size_class):
    """The size class's oldest primary that nobody holds, or -1. Held ones that are older leave the list for good."""
    row = np.int64(c.lists[size_class * LISTS_PER_CLASS + 1].tail)
    while row >= 0 and c.rows[row].holds > 0:
        unlink(c, size_class * LISTS_PER_CLASS + 1, row)
        row = np.int64(c.lists[size_class * LISTS_PER_CLASS + 1].tail)
    return row


@kernel
def coldest(c, heap):
    """The size class whose oldest primary is the oldest of all, or -1.

    heap: of one slot size; each tick is a lower bound of the last use of that size class's oldest primary. The oldest
    primary of a size class only ever gets younger, so a stale tick is too low, never too high: correct the top until
    it is exact.
    """
    clock = c.state[CLOCK]
    while True:
        size_class = heap[0].size_class
        tail = oldest(c, size_class)
        exact = c.rows[tail].last if tail >= 0 and c.size_classes[size_class].offered == TO_ALL else clock + 1
        if heap[0].tick == exact:
            return size_class if exact <= clock else np.int64(-1)
        i = 0
        while True:
            child = 2 * i + 1
            if child + 1 < len(heap) and heap[child + 1].tick < heap[child].tick:
                child += 1
            if child >= len(heap) or heap[child].tick >= exact:
                break
            heap[i].tick = heap[child].tick
            heap[i].size_class = heap[child].size_class
            i = child
        heap[i].tick = exact
        heap[i].size_class = size_class


@kernel
def victim(c, size_class, heap, locality, may_leave):
    """The size class that evicts for a writer on `size_class`, or -1: its own, or that of the cluster's oldest block.

    locality: how many times as long that one must have been idle. may_leave: whether a slot on another node will do.
    """
    tail = oldest(c, size_class)
    far_class = coldest(c, heap) if may_leave else np.int64(-1)
    if far_class < 0:  # no other will do; a GPU is not in the heap, and may have a victim
        return np.int64(size_class) if tail >= 0 else np.int64(-1)
    if tail < 0:
        return far_class
    far = c.state[CLOCK] - c.rows[oldest(c, far_class)].last
    near = c.state[CLOCK] - c.rows[tail].last
    return far_class if far > locality * near else np.int64(size_class)


@kernel
def drop_replicas(c, first):
    """Free the replicas of a key that nobody holds. first: the key's first row."""
    other = np.int64(first)
    while other >= 0:
        after = np.int64(c.rows[other].same)
        if c.rows[other].state == REPLICA and c.rows[other].holds == 0:
            unlink(c, list_of(c, other, REPLICA), other)
            delete(c, other)
            free(c, other)
        other = after


@kernel
def evict(c, size_class):
    """Forget the size class's oldest primary, which must exist. Its row is the caller's.

    Replicas that nobody holds go with it: they are as old, since `release` touches the primary of what was read. One
    that became the primary would use up the staging window of its node.
    """
    row = oldest(c, size_class)
    position = probe(c, c.rows[row].k0, c.rows[row].k1)
    if not alone(c, position, row):
        drop_replicas(c, row_at(c, position))
    forget(c, row)  # the eviction
    c.size_classes[size_class].evicted += 1
    return row


@kernel(C, INT, INT)
def restore_window(c, size_class, slots):
    """Evict until the staging window lacks no slot, at most `slots` times. Returns how many are still to be freed."""
    while slots > 0 and room(c, size_class) < 0 and oldest(c, size_class) >= 0:
        free(c, evict(c, size_class))
        slots -= 1
    return slots if room(c, size_class) < 0 else 0


@kernel
def victim_ahead(c, size_class, steps):
    """The row that the size class evicts `steps` evictions from now, or -1. Prefetches all before it."""
    row = np.int64(c.lists[size_class * LISTS_PER_CLASS + 1].tail)
    for _ in range(steps):
        if row < 0:
            break
        prefetch_entry(c, row)
        row = np.int64(c.rows[row].prev)
    return row


@kernel
def next_ahead(c, row):
    """The next younger victim. Prefetches both: each cache miss of the list overlaps with the work of one grant."""
    if row < 0:
        return row
    prefetch_entry(c, row)
    row = np.int64(c.rows[row].prev)
    if row >= 0:
        prefetch(c.rows, row)
    return row
