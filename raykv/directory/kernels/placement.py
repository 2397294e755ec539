"""Places a writer's blocks: `reserve` grants slots, and `commit` offers the blocks that were written into them."""

import numpy as np

from raykv.directory.kernels.columns import (
    BLOCKS,
    BOOL,
    FLAGS,
    HOLDS_MAX,
    INDICES_OUT,
    KEYS,
    LOCATIONS,
    PLACES,
    READY,
    ROWS,
    TENANTS,
    TO_ALL,
    WRITER,
    WRITING,
    Blocks,
    C,
    Places,
    Writer,
)
from raykv.directory.kernels.eviction import evict, evict_surplus, keep_maximum, next_ahead, victim, victim_ahead
from raykv.directory.kernels.lists import (
    assign,
    claim,
    finish,
    free,
    grant,
    hold,
    present,
    quarantine,
    size_class_of,
    taken,
)
from raykv.directory.kernels.quotas import is_full
from raykv.directory.kernels.slabs import locate, row_of
from raykv.directory.kernels.slots import can_stage, room, stage, take
from raykv.directory.kernels.table import find, first_of, first_row
from raykv.protocol.clients import NOT_WRITTEN, WRITTEN
from raykv.system.jit import kernel

AHEAD = 4  # number of victims to prefetch


@kernel
def _missing(c, firsts, start):
    """Return how many keys from `start` on are neither in memory nor being written there. firsts: from `find`."""
    count = np.int64(0)
    for i in range(start, len(firsts)):
        count += not taken(c, firsts[i])
    return count


@kernel(C, KEYS, ROWS, WRITER, BLOCKS, INDICES_OUT, PLACES, BOOL)
def reserve(c, keys, firsts, writer, blocks, granted, places, found):
    """Grant slots: see `_grant_missing`. places, out: entry j is the location of the slot of keys[granted[j]].

    found: whether `find` has filled `firsts` already. If `found` is False and the writer's size class lacks room for n
    missing keys, this function grants nothing and returns (-n, 0).
    """
    writer, blocks, places = Writer(*writer), Blocks(*blocks), Places(*places)
    if not found:
        find(c, keys, firsts)
        need = _missing(c, firsts, writer.start)
        if max(0, room(c, writer.size_class)) < need:
            return -need, 0
    source, staged = blocks.source, blocks.staged
    covered, grants = _grant_missing(c, keys, firsts, writer, source, staged, granted)
    for i in range(len(keys)):
        blocks.gens[i] = c.rows[source[i]].gen if source[i] >= 0 else 0
        blocks.staged_gens[i] = c.rows[staged[i]].gen if staged[i] >= 0 else 0
    for j in range(grants):
        locate(c, source[granted[j]], writer.block_bytes, places.locations, j)
        locate(c, staged[granted[j]], writer.block_bytes, places.staged_locations, j)
    return covered, grants


@kernel
def _grant_missing(c, keys, firsts, writer, source, staged, granted):
    """Hold all keys that are present, then grant slots for the missing keys from the writer's `start` on.

    A key gets a slot of the writer's size class while that class has room, else a slot of one of `others` with room. If
    no class has room, the key gets the slot of an evicted block (`victim`). A tenant at its maximum may not use free
    room: each of its new blocks evicts an older block of this tenant.

    firsts: the keys' first rows, from `find`. source[i], out: the held or granted row; -1 if another client is writing
    the key. staged[i], out: if the granted row is on another node, the row on the writer's node to write into; else -1.
    granted, out: indices of the granted keys.
    Returns (number of leading keys that are covered, number of grants). The first key that is not covered found no
    slot, or earlier keys of this call had used up the staging window.
    """
    size_class, others, tenant = np.int64(writer.size_class), writer.others, writer.tenant
    n, grants, tried, elsewhere = len(keys), 0, 0, 0
    ahead = victim_ahead(c, size_class, tenant, AHEAD)
    for i in range(n):  # hold all rows before the first eviction: a batch must not evict its own keys
        source[i] = -1
        staged[i] = -1
        row = np.int64(firsts[i])
        while row >= 0 and not (present(c.rows[row].state) and c.rows[row].holds < HOLDS_MAX):
            row = np.int64(c.rows[row].same)
        if row >= 0:
            hold(c, row)
            if c.state[TENANTS] > 1:
                claim(c, firsts[i], tenant)
            source[i] = row
    for i in range(writer.start, n):
        k0, k1 = keys[i, 0], keys[i, 1]
        if source[i] >= 0 or taken(c, first_row(c, k0, k1)):
            continue
        ahead = next_ahead(c, ahead)
        can_leave = can_stage(c, size_class)
        may_leave = can_leave or elsewhere > 0  # False if other calls fill the window: the key needs a slot here
        leaving, target = np.int64(-1), np.int64(-1)
        if room(c, size_class) > 0 and not is_full(c, tenant, c.size_classes[size_class].charge):
            target = size_class
        while target < 0 and may_leave and tried < len(others) and not is_full(c, tenant, writer.size):
            if c.size_classes[others[tried]].offered == TO_ALL and room(c, others[tried]) > 0:
                target = np.int64(others[tried])
            else:
                tried += 1
        has_room = bool(target >= 0)
        if not has_room:
            has_own_room = room(c, size_class) > 0  # a tenant at its maximum must evict before it uses the room
            leaving = victim(c, writer, can_leave or has_own_room or (may_leave and writer.locality == 1.0))
            if leaving < 0:
                return i, grants
            target = size_class_of(c, leaving)
            if has_own_room and target != size_class:
                free(c, evict(c, leaving))
                has_room, target = True, size_class
        if target != size_class:
            if not can_leave:  # this call used up the window: evict nothing for keys that another call must store
                return i, grants
            elsewhere += 1
            staged[i] = stage(c, size_class, k0, k1)  # before the eviction, which may promote a replica in the window
        row = take(c, target) if has_room else evict(c, leaving)
        grant(c, row, k0, k1, WRITING, 1)
        if c.state[TENANTS] > 1:
            assign(c, first_of(c, row), tenant)
            keep_maximum(c, tenant, target)
        source[i] = row
        granted[grants] = i
        grants += 1
        if not has_room and room(c, target) < 0:
            evict_surplus(c, target)  # replicas that became primaries have used up the staging window of `target`
    return n, grants


@kernel(C, LOCATIONS, KEYS, FLAGS)
def commit(c, locations, keys, written):
    """Make WRITING rows READY where written[i] is WRITTEN, or QUARANTINED where it is NOT_WRITTEN.

    Idempotent: key and generation identify each row. Returns how many blocks are offered now.
    """
    accepted = 0
    for i in range(len(locations)):
        row = row_of(c, locations, i)
        if row < 0 or c.rows[row].gen != np.int64(locations[i].gen):
            continue
        if c.rows[row].k0 != keys[i, 0] or c.rows[row].k1 != keys[i, 1]:
            continue
        state = c.rows[row].state
        if state == WRITING and written[i] == NOT_WRITTEN:
            quarantine(c, row)
        elif written[i] == WRITTEN and (state == WRITING or present(state)):
            if state == WRITING:
                finish(c, row, READY)
            accepted += 1
    return accepted
