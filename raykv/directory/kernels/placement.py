"""Which slot a block gets, and which block is evicted for it."""

import numpy as np

from raykv.directory.kernels.index import (
    CLOCK,
    LISTS_PER_SHELF,
    PINS_MAX,
    READY,
    REPLICA,
    STAGING,
    TO_ALL,
    WRITING,
    alone,
    delete,
    forget,
    free,
    grant,
    list_of,
    pin,
    prefetch,
    prefetch_entry,
    present,
    probe,
    taken,
    to_limbo,
    unlink,
)
from raykv.system.jit import kernel

AHEAD = 4  # victims whose rows are on their way to the processor


@kernel
def take(c, shelf):  # type: ignore[no-untyped-def]
    """A row of the shelf that costs no primary: a free one, else the coldest replica's. -1 if there is none."""
    free_list = shelf * LISTS_PER_SHELF
    row = np.int64(c.lists[free_list].head)
    if row >= 0:
        unlink(c, free_list, row)
        return row
    row = np.int64(c.lists[free_list + 2].tail)
    if row >= 0:
        forget(c, row)
    return row


@kernel
def takeable(c, shelf):  # type: ignore[no-untyped-def]
    return c.lists[shelf * LISTS_PER_SHELF].count + c.lists[shelf * LISTS_PER_SHELF + 2].count


@kernel
def room(c, shelf):  # type: ignore[no-untyped-def]
    """Slots that stores may take without evicting: the staging window stays free."""
    return takeable(c, shelf) - max(0, c.shelves[shelf].window - c.shelves[shelf].staging)


@kernel
def can_stage(c, shelf):  # type: ignore[no-untyped-def]
    return c.shelves[shelf].staging < c.shelves[shelf].window and takeable(c, shelf) > 0


@kernel
def stage(c, shelf, k0, k1):  # type: ignore[no-untyped-def]
    """A staging row for a key on the reader's (or remote writer's) own node. -1 if the window is used up."""
    if shelf < 0 or not can_stage(c, shelf):
        return np.int64(-1)
    row = take(c, shelf)
    grant(c, row, k0, k1, STAGING)
    c.shelves[shelf].staging += 1
    return row


@kernel
def oldest(c, shelf):  # type: ignore[no-untyped-def]
    """The shelf's coldest primary that nobody holds, or -1. Held ones at the old end leave the list for good."""
    row = np.int64(c.lists[shelf * LISTS_PER_SHELF + 1].tail)
    while row >= 0 and c.rows[row].pins > 0:
        unlink(c, shelf * LISTS_PER_SHELF + 1, row)
        row = np.int64(c.lists[shelf * LISTS_PER_SHELF + 1].tail)
    return row


@kernel
def coldest(c, heap):  # type: ignore[no-untyped-def]
    """Shelf whose oldest unheld primary is the oldest of all, or -1. heap[0] is the minimum of lower bounds.

    A tail only ever grows younger, so a stale entry is too low, never too high: correct the top until it is true.
    """
    clock = c.state[CLOCK]
    while True:
        shelf = heap[0].shelf
        tail = oldest(c, shelf)
        true = c.rows[tail].last if tail >= 0 and c.shelves[shelf].offered == TO_ALL else clock + 1
        if heap[0].tick == true:
            return shelf if true <= clock else np.int64(-1)
        i = 0
        while True:
            child = 2 * i + 1
            if child + 1 < len(heap) and heap[child + 1].tick < heap[child].tick:
                child += 1
            if child >= len(heap) or heap[child].tick >= true:
                break
            heap[i].tick = heap[child].tick
            heap[i].shelf = heap[child].shelf
            i = child
        heap[i].tick = true
        heap[i].shelf = shelf


@kernel
def victim(c, shelf, heap, locality, may_leave):  # type: ignore[no-untyped-def]
    """Shelf that evicts for a writer on `shelf`: its own, unless the cluster's coldest block is much colder."""
    tail = oldest(c, shelf)
    far_shelf = coldest(c, heap) if may_leave else np.int64(-1)
    if far_shelf < 0:  # a GPU's own blocks are none of the cluster's
        return np.int64(shelf) if tail >= 0 else np.int64(-1)
    if tail < 0:
        return far_shelf
    far = c.state[CLOCK] - c.rows[oldest(c, far_shelf)].last
    near = c.state[CLOCK] - c.rows[tail].last
    return far_shelf if far > locality * near else np.int64(shelf)


@kernel
def drop_replicas(c, first):  # type: ignore[no-untyped-def]
    """Free the replicas of a key that nobody holds. first: its first row."""
    other = np.int64(first)
    while other >= 0:
        after = np.int64(c.rows[other].same)
        if c.rows[other].state == REPLICA and c.rows[other].pins == 0:
            unlink(c, list_of(c, other, REPLICA), other)
            delete(c, other)
            free(c, other)
        other = after


@kernel
def evict(c, shelf):  # type: ignore[no-untyped-def]
    """Forget the shelf's coldest primary; its row is the caller's.

    Unheld replicas go with it: they are as cold (`let_go`), and in its place they would use up the staging window.
    """
    row = oldest(c, shelf)
    at = probe(c, c.rows[row].k0, c.rows[row].k1)
    if not alone(c, at, row):
        drop_replicas(c, (c.table[at] & 0xFFFFFFFF) - 1)
    forget(c, row)
    c.shelves[shelf].evicted += 1
    return row


@kernel
def restore_window(c, shelf, slots):  # type: ignore[no-untyped-def]
    """Free as many slots as the staging window lacks, at most `slots`. Returns how many of them are to be freed yet."""
    while slots > 0 and room(c, shelf) < 0 and oldest(c, shelf) >= 0:
        free(c, evict(c, shelf))
        slots -= 1
    return slots if room(c, shelf) < 0 else 0


@kernel
def victim_ahead(c, shelf, steps):  # type: ignore[no-untyped-def]
    """The row that the shelf evicts `steps` evictions from now, or -1; all up to there are asked for."""
    row = np.int64(c.lists[shelf * LISTS_PER_SHELF + 1].tail)
    for _ in range(steps):
        if row < 0:
            break
        prefetch_entry(c, row)
        row = np.int64(c.rows[row].prev)
    return row


@kernel
def next_ahead(c, row):  # type: ignore[no-untyped-def]
    """One step on: a list can't be read faster than a miss a step, so each overlaps with the work of a grant."""
    if row < 0:
        return row
    prefetch_entry(c, row)
    row = np.int64(c.rows[row].prev)
    if row >= 0:
        prefetch(c.rows, row)
    return row


@kernel
def missing(c, firsts):  # type: ignore[no-untyped-def]
    """How many keys are neither in memory nor being written there. firsts: what `find` said."""
    count = 0
    for first in firsts:
        row = np.int64(first)
        while row >= 0 and not (present(c.rows[row].state) or c.rows[row].state == WRITING):
            row = np.int64(c.rows[row].same)
        if row < 0:
            count += 1
    return count


@kernel
def reserve(c, keys, firsts, start, shelf, others, heap, locality, source, staged, granted):  # type: ignore[no-untyped-def]
    """Pin what is present of keys[:], then grant slots to what is missing of keys[start:].

    firsts: what `find` said. shelf: of the writer's node. others: the other shelves of this size. source[i]: the
    pinned or granted row, -1 where another writes the key. staged[i]: the row on the writer's node to write into
    where the granted one is elsewhere, else -1. granted: indices of the granted. Returns (first key that found no
    room or, behind others of this call, no staging; else len(keys); grants).
    """
    n, grants, spill, away = len(keys), 0, 0, 0
    ahead = victim_ahead(c, shelf, AHEAD)
    for i in range(n):  # all pins before the first eviction: a batch must not evict its own keys
        source[i] = -1
        staged[i] = -1
        row = np.int64(firsts[i])
        while row >= 0 and not (present(c.rows[row].state) and c.rows[row].pins < PINS_MAX):
            row = np.int64(c.rows[row].same)
        if row >= 0:
            pin(c, row)
            source[i] = row
    for i in range(start, n):
        k0, k1 = keys[i, 0], keys[i, 1]
        if source[i] >= 0 or taken(c, k0, k1):
            continue
        ahead = next_ahead(c, ahead)
        can_leave = can_stage(c, shelf)
        may_leave = can_leave or away > 0  # else the window is others', and the block stays here or nowhere
        target = np.int64(-1)
        if room(c, shelf) > 0:
            target = np.int64(shelf)
        while target < 0 and may_leave and spill < len(others):
            if c.shelves[others[spill]].offered == TO_ALL and room(c, others[spill]) > 0:
                target = np.int64(others[spill])
            else:
                spill += 1
        has_room = target >= 0
        if not has_room:
            target = victim(c, shelf, heap, locality, can_leave or (may_leave and locality == 1.0))
            if target < 0:
                return i, grants
        if target != shelf:
            if not can_leave:  # this very call used up the window: the rest in another, not over what is here
                return i, grants
            away += 1
            staged[i] = stage(c, shelf, k0, k1)  # before a promoted replica can use up the window
        row = take(c, target) if has_room else evict(c, target)
        grant(c, row, k0, k1, WRITING)
        source[i] = row
        granted[grants] = i
        grants += 1
        if not has_room and room(c, target) < 0 and oldest(c, target) >= 0:
            free(c, evict(c, target))  # replicas that became primaries had used up its staging window
    return n, grants


@kernel
def commit(c, rows, keys, gens, written, accepted):  # type: ignore[no-untyped-def]
    """WRITING rows become READY, or go to limbo where the write failed. Idempotent: judged by row, key, generation."""
    for i in range(len(rows)):
        row = np.int64(rows[i])
        accepted[i] = 0
        if row < 0 or c.rows[row].gen != gens[i] or c.rows[row].k0 != keys[i, 0] or c.rows[row].k1 != keys[i, 1]:
            continue
        state = c.rows[row].state
        if state == WRITING and not written[i]:
            to_limbo(c, row)
        elif written[i] and (state == WRITING or present(state)):
            if state == WRITING:
                c.rows[row].state = READY
            accepted[i] = 1
