"""Where a writer's blocks go: `reserve` grants slots, `commit` offers the blocks that were written there."""

import numpy as np

from raykv.directory.kernels.columns import (
    FLAGS,
    FLAGS_OUT,
    FLOAT,
    HEAPS,
    HOLDS_MAX,
    INT,
    KEYS,
    READY,
    ROWS,
    TO_ALL,
    WRITING,
    C,
)
from raykv.directory.kernels.eviction import evict, next_ahead, oldest, victim, victim_ahead
from raykv.directory.kernels.index import free, grant, hold, present, quarantine, taken
from raykv.directory.kernels.slots import can_stage, room, stage, take
from raykv.system.jit import kernel

AHEAD = 4  # victims whose rows are prefetched


@kernel(C, ROWS)
def missing(c, firsts):
    """How many keys are neither in memory nor being written there. firsts: the keys' first rows, of `find`."""
    count = 0
    for first in firsts:
        row = np.int64(first)
        while row >= 0 and not (present(c.rows[row].state) or c.rows[row].state == WRITING):
            row = np.int64(c.rows[row].same)
        if row < 0:
            count += 1
    return count


@kernel(C, KEYS, ROWS, INT, INT, ROWS, HEAPS, FLOAT, ROWS, ROWS, ROWS)
def reserve(c, keys, firsts, start, size_class, others, heap, locality, source, staged, granted):
    """Hold what is present of keys[:], then grant slots to what is missing of keys[start:].

    A key goes to the writer's size class while that has room, else to one of `others` that has, else a block is
    evicted (`victim`).

    firsts: the keys' first rows, of `find`. size_class: of the writer's node. others: the other size classes of this
    slot size, in the order in which they are tried. source[i], out: the held or granted row, -1 where another client
    writes the key. staged[i], out: the row on the writer's node to write into where the granted one is elsewhere, else
    -1. granted, out: indices of the granted keys.
    Returns (leading keys that are covered, number of grants). The first key that is not covered found no room, or came
    after this call had used up the staging window.
    """
    n, grants, tried, elsewhere = len(keys), 0, 0, 0
    ahead = victim_ahead(c, size_class, AHEAD)
    for i in range(n):  # hold all before the first eviction: a batch must not evict its own keys
        source[i] = -1
        staged[i] = -1
        row = np.int64(firsts[i])
        while row >= 0 and not (present(c.rows[row].state) and c.rows[row].holds < HOLDS_MAX):
            row = np.int64(c.rows[row].same)
        if row >= 0:
            hold(c, row)
            source[i] = row
    for i in range(start, n):
        k0, k1 = keys[i, 0], keys[i, 1]
        if source[i] >= 0 or taken(c, k0, k1):
            continue
        ahead = next_ahead(c, ahead)
        can_leave = can_stage(c, size_class)
        may_leave = can_leave or elsewhere > 0  # else other calls use the window, and the block is stored here or not
        target = np.int64(-1)
        if room(c, size_class) > 0:
            target = np.int64(size_class)
        while target < 0 and may_leave and tried < len(others):
            if c.size_classes[others[tried]].offered == TO_ALL and room(c, others[tried]) > 0:
                target = np.int64(others[tried])
            else:
                tried += 1
        has_room = target >= 0
        if not has_room:
            target = victim(c, size_class, heap, locality, can_leave or (may_leave and locality == 1.0))
            if target < 0:
                return i, grants
        if target != size_class:
            if not can_leave:  # this call used up the window: the rest is for another call, and evicts nothing here
                return i, grants
            elsewhere += 1
            staged[i] = stage(c, size_class, k0, k1)  # before an eviction promotes a replica, which uses the window
        row = take(c, target) if has_room else evict(c, target)
        grant(c, row, k0, k1, WRITING)
        source[i] = row
        granted[grants] = i
        grants += 1
        if not has_room and room(c, target) < 0 and oldest(c, target) >= 0:
            free(c, evict(c, target))  # replicas that became primaries have used up its staging window
    return n, grants


@kernel(C, ROWS, KEYS, ROWS, FLAGS, FLAGS_OUT)
def commit(c, rows, keys, gens, written, accepted):
    """Make WRITING rows READY, or QUARANTINED where the write failed.

    accepted[i], out: whether the block is offered now. Idempotent: each row is judged by its key and generation.
    """
    for i in range(len(rows)):
        row = np.int64(rows[i])
        accepted[i] = 0
        if row < 0 or c.rows[row].gen != gens[i] or c.rows[row].k0 != keys[i, 0] or c.rows[row].k1 != keys[i, 1]:
            continue
        state = c.rows[row].state
        if state == WRITING and not written[i]:
            quarantine(c, row)
        elif written[i] and (state == WRITING or present(state)):
            if state == WRITING:
                c.rows[row].state = READY
            accepted[i] = 1
