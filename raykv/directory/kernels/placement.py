"""Which slot a block gets, and which block is evicted for it."""

import numpy as np

from raykv.directory.kernels.index import (
    CLOCK,
    FLAGS,
    FLAGS_OUT,
    FLOAT,
    HEAPS,
    INT,
    KEYS,
    LISTS_PER_CLASS,
    PINS_MAX,
    READY,
    REPLICA,
    ROWS,
    STAGING,
    TO_ALL,
    WRITING,
    C,
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
    quarantine,
    taken,
    unlink,
)
from raykv.system.jit import kernel

AHEAD = 4  # victims whose rows are on their way to the processor


@kernel
def take(c, size_class):  # type: ignore[no-untyped-def]
    """A row of the size class that costs no primary: a free one, else the coldest replica's. -1 if there is none."""
    free_list = size_class * LISTS_PER_CLASS
    row = np.int64(c.lists[free_list].head)
    if row >= 0:
        unlink(c, free_list, row)
        return row
    row = np.int64(c.lists[free_list + 2].tail)
    if row >= 0:
        forget(c, row)
    return row


@kernel(C, INT)
def takeable(c, size_class):  # type: ignore[no-untyped-def]
    return c.lists[size_class * LISTS_PER_CLASS].count + c.lists[size_class * LISTS_PER_CLASS + 2].count


@kernel(C, INT)
def room(c, size_class):  # type: ignore[no-untyped-def]
    """Slots that stores may take without evicting: the staging window stays free."""
    return takeable(c, size_class) - max(0, c.size_classes[size_class].window - c.size_classes[size_class].staging)


@kernel
def can_stage(c, size_class):  # type: ignore[no-untyped-def]
    return c.size_classes[size_class].staging < c.size_classes[size_class].window and takeable(c, size_class) > 0


@kernel
def stage(c, size_class, k0, k1):  # type: ignore[no-untyped-def]
    """A staging row for a key on the reader's (or remote writer's) own node. -1 if the window is used up."""
    if size_class < 0 or not can_stage(c, size_class):
        return np.int64(-1)
    row = take(c, size_class)
    grant(c, row, k0, k1, STAGING)
    c.size_classes[size_class].staging += 1
    return row


@kernel(C, INT)
def oldest(c, size_class):  # type: ignore[no-untyped-def]
    """The size class's coldest primary that nobody holds, or -1. Held ones at the old end leave the list for good."""
    row = np.int64(c.lists[size_class * LISTS_PER_CLASS + 1].tail)
    while row >= 0 and c.rows[row].pins > 0:
        unlink(c, size_class * LISTS_PER_CLASS + 1, row)
        row = np.int64(c.lists[size_class * LISTS_PER_CLASS + 1].tail)
    return row


@kernel
def coldest(c, heap):  # type: ignore[no-untyped-def]
    """Shelf whose oldest unheld primary is the oldest of all, or -1. heap[0] is the minimum of lower bounds.

    A tail only ever grows younger, so a stale entry is too low, never too high: correct the top until it is true.
    """
    clock = c.state[CLOCK]
    while True:
        size_class = heap[0].size_class
        tail = oldest(c, size_class)
        true = c.rows[tail].last if tail >= 0 and c.size_classes[size_class].offered == TO_ALL else clock + 1
        if heap[0].tick == true:
            return size_class if true <= clock else np.int64(-1)
        i = 0
        while True:
            child = 2 * i + 1
            if child + 1 < len(heap) and heap[child + 1].tick < heap[child].tick:
                child += 1
            if child >= len(heap) or heap[child].tick >= true:
                break
            heap[i].tick = heap[child].tick
            heap[i].size_class = heap[child].size_class
            i = child
        heap[i].tick = true
        heap[i].size_class = size_class


@kernel
def victim(c, size_class, heap, locality, may_leave):  # type: ignore[no-untyped-def]
    """Shelf that evicts for a writer on `size_class`: its own, unless the cluster's coldest block is much colder."""
    tail = oldest(c, size_class)
    far_class = coldest(c, heap) if may_leave else np.int64(-1)
    if far_class < 0:  # a GPU's own blocks are none of the cluster's
        return np.int64(size_class) if tail >= 0 else np.int64(-1)
    if tail < 0:
        return far_class
    far = c.state[CLOCK] - c.rows[oldest(c, far_class)].last
    near = c.state[CLOCK] - c.rows[tail].last
    return far_class if far > locality * near else np.int64(size_class)


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
def evict(c, size_class):  # type: ignore[no-untyped-def]
    """Forget the size class's coldest primary; its row is the caller's.

    Unheld replicas go with it: they are as cold (`release`), and in its place they would use up the staging window.
    """
    row = oldest(c, size_class)
    at = probe(c, c.rows[row].k0, c.rows[row].k1)
    if not alone(c, at, row):
        drop_replicas(c, (c.table[at] & 0xFFFFFFFF) - 1)
    forget(c, row)
    c.size_classes[size_class].evicted += 1
    return row


@kernel(C, INT, INT)
def restore_window(c, size_class, slots):  # type: ignore[no-untyped-def]
    """Free as many slots as the staging window lacks, at most `slots`. Returns how many of them are to be freed yet."""
    while slots > 0 and room(c, size_class) < 0 and oldest(c, size_class) >= 0:
        free(c, evict(c, size_class))
        slots -= 1
    return slots if room(c, size_class) < 0 else 0


@kernel
def victim_ahead(c, size_class, steps):  # type: ignore[no-untyped-def]
    """The row that the size class evicts `steps` evictions from now, or -1; all up to there are asked for."""
    row = np.int64(c.lists[size_class * LISTS_PER_CLASS + 1].tail)
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


@kernel(C, ROWS)
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


@kernel(C, KEYS, ROWS, INT, INT, ROWS, HEAPS, FLOAT, ROWS, ROWS, ROWS)
def reserve(c, keys, firsts, start, size_class, others, heap, locality, source, staged, granted):  # type: ignore[no-untyped-def]
    """Pin what is present of keys[:], then grant slots to what is missing of keys[start:].

    firsts: what `find` said. shelf: of the writer's node. others: the other shelves of this size. source[i]: the
    pinned or granted row, -1 where another writes the key. staged[i]: the row on the writer's node to write into
    where the granted one is elsewhere, else -1. granted: indices of the granted. Returns (first key that found no
    room or, behind others of this call, no staging; else len(keys); grants).
    """
    n, grants, spill, away = len(keys), 0, 0, 0
    ahead = victim_ahead(c, size_class, AHEAD)
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
        can_leave = can_stage(c, size_class)
        may_leave = can_leave or away > 0  # else the window is others', and the block stays here or nowhere
        target = np.int64(-1)
        if room(c, size_class) > 0:
            target = np.int64(size_class)
        while target < 0 and may_leave and spill < len(others):
            if c.size_classes[others[spill]].offered == TO_ALL and room(c, others[spill]) > 0:
                target = np.int64(others[spill])
            else:
                spill += 1
        has_room = target >= 0
        if not has_room:
            target = victim(c, size_class, heap, locality, can_leave or (may_leave and locality == 1.0))
            if target < 0:
                return i, grants
        if target != size_class:
            if not can_leave:  # this very call used up the window: the rest in another, not over what is here
                return i, grants
            away += 1
            staged[i] = stage(c, size_class, k0, k1)  # before a promoted replica can use up the window
        row = take(c, target) if has_room else evict(c, target)
        grant(c, row, k0, k1, WRITING)
        source[i] = row
        granted[grants] = i
        grants += 1
        if not has_room and room(c, target) < 0 and oldest(c, target) >= 0:
            free(c, evict(c, target))  # replicas that became primaries had used up its staging window
    return n, grants


@kernel(C, ROWS, KEYS, ROWS, FLAGS, FLAGS_OUT)
def commit(c, rows, keys, gens, written, accepted):  # type: ignore[no-untyped-def]
    """WRITING rows become READY, or QUARANTINED where the write failed. Idempotent: judged by row, key, generation."""
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
