"""Chooses the blocks to evict, and evicts them (`evict`).

Each size class keeps the primaries of each tenant in a list by age. A writer evicts the oldest block of its own size
class, unless the oldest block of the whole cluster was idle much longer (`victim`). `placement.reserve` evicts blocks
for a writer. `restore_window` evicts blocks if primaries or leases use up a staging window. quotas.py decides which
tenants' blocks may be evicted. If there is only one tenant, all blocks may be evicted.

Among blocks that users will ask for again (`done`), the blocks of the user who left last are evicted first, since users
who have waited longer return sooner. A late user may not return at all, so this user's blocks are evicted even earlier
(`end_late`). In a pool with an external tier, the blocks of the user who left first are evicted first, since demotion
copies the oldest blocks.

A block may be kept until a given time (`keep`). If the oldest block of a list is kept, an eviction takes the list's
oldest block that is not kept (`_instead_of`).
"""

import numpy as np

from raykv.directory.kernels.columns import (
    BOOL,
    CLOCK,
    FIRST_TICK,
    FOR_GOOD,
    IN_TIME,
    IN_USE,
    INT,
    LAST_KEPT,
    LISTS_PER_CLASS,
    NOT_OFFERED,
    OVERDUE,
    READY,
    REPLICA,
    ROWS,
    SECOND,
    TENANTS,
    TIERED,
    TO_ALL,
    WAITING,
    C,
)
from raykv.directory.kernels.lists import (
    forget_at,
    free,
    in_external_tier,
    is_tier_row,
    keep_until,
    link_between,
    link_old,
    list_of,
    oldest_in,
    ready_list,
    size_class_of,
    stored,
    touch,
    unlink,
)
from raykv.directory.kernels.quotas import ANYBODY, OTHERS, OWN, may_go, tenant_of, whose
from raykv.directory.kernels.slots import room
from raykv.directory.kernels.table import alone, delete, prefetch, prefetch_entry, probe, row_at
from raykv.system.jit import kernel

KEPT_MOST = 1 << 16  # maximum number of rows of a list that evictions pass over: one eviction may look at all of them


@kernel(C, INT)
def oldest(c, size_class):
    """Return a size class's oldest primary without a hold, or -1. Takes older held rows out of the list."""
    return _oldest_for(c, size_class, -1, ANYBODY)


@kernel
def oldest_of(c, size_class, tenant):
    """Like `oldest`, but only among the blocks of one tenant."""
    return oldest_in(c, ready_list(size_class, tenant))


@kernel(C, INT)
def oldest_in_use(c, size_class):
    """Like `oldest`, but only among rows in use, for which `done` was not called. The row may be held."""
    found = np.int64(-1)
    for tenant in range(c.state[TENANTS]):
        row = oldest_of(c, size_class, tenant)
        if row >= 0 and c.rows[row].last < IN_USE:
            row = np.int64(c.rows[c.lists[ready_list(size_class, tenant)].done].prev)
        if found < 0 or (row >= 0 and c.rows[row].last < c.rows[found].last):
            found = row
    return found


@kernel
def _oldest_for(c, size_class, tenant, who):
    """Like `oldest`, but only among blocks that may be evicted for a tenant: see `may_go`."""
    row = np.int64(-1)
    for owner in range(c.state[TENANTS]):
        if may_go(c, owner, tenant, who, c.size_classes[size_class].charge):
            tail = oldest_of(c, size_class, owner)
            if row < 0 or (tail >= 0 and c.rows[tail].last < c.rows[row].last):
                row = tail
    return row


@kernel(C, INT, INT)
def oldest_candidate(c, size_class, tenant):
    """Like `oldest`, but only among blocks that may be evicted for a new block of a tenant: see `whose`."""
    who = whose(c, tenant, c.size_classes[size_class].charge) if tenant >= 0 else ANYBODY
    return _oldest_for(c, size_class, tenant, who)


@kernel
def near_victim(c, size_class, tenant):
    """Return the row of a size class to evict for a tenant's new block, or -1. Last resort: the tenant's own row."""
    row = oldest_candidate(c, size_class, tenant)
    return row if row >= 0 else _oldest_for(c, size_class, tenant, OWN)


@kernel
def coldest(c, heap, tenant):
    """Return a tenant's oldest primary in all size classes of one slot size, or -1.

    heap: heap of this tenant and slot size, with an entry for each size class. An entry's tick is at most the tick of
    the tenant's oldest primary in the size class. If a call makes that primary older, `reset_heaps` follows. Corrects
    the top entry until its tick is exact.
    """
    clock = c.state[CLOCK]
    while True:
        size_class = heap[0].size_class
        tail = oldest_of(c, size_class, tenant)
        exact = c.rows[tail].last if tail >= 0 and c.size_classes[size_class].offered == TO_ALL else clock + 1
        if heap[0].tick == exact:
            return tail if exact <= clock else np.int64(-1)
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
def _coldest_for(c, writer, who):
    """Like `coldest`, but only among blocks that may be evicted for a writer's tenant."""
    row = np.int64(-1)
    for owner in range(c.state[TENANTS]):
        has_some = c.quotas[owner].used > 0  # a search that finds nothing costs the most
        if has_some and may_go(c, owner, writer.tenant, who, writer.size):
            tail = coldest(c, writer.heaps[owner], owner)
            if row < 0 or (tail >= 0 and c.rows[tail].last < c.rows[row].last):
                row = tail
    return row


@kernel
def victim(c, writer, may_leave):
    """Return the row to evict for a writer, or -1.

    It is the oldest row of the writer's size class, unless the oldest row of the cluster was idle more than `locality`
    times as long. may_leave: whether the writer can use a slot on another node.
    """
    if c.state[TENANTS] == 1:  # the same result as below, at half the cost
        far_tail = coldest(c, writer.heaps[0], 0) if may_leave else np.int64(-1)
        return _idler(c, oldest_of(c, writer.size_class, 0), far_tail, writer.locality)
    near = whose(c, writer.tenant, c.size_classes[writer.size_class].charge)
    far = whose(c, writer.tenant, writer.size)
    row = _victim(c, writer, may_leave, near, far)
    if row < 0 and far == OTHERS:
        row = _victim(c, writer, may_leave, OWN, OWN)
    return row


@kernel
def _victim(c, writer, may_leave, near, far):
    """Like `victim`. near, far: results of `whose` for the writer's size class and for the whole cluster."""
    tail = _oldest_for(c, writer.size_class, writer.tenant, near)
    far_tail = _coldest_for(c, writer, far) if may_leave else np.int64(-1)
    return _idler(c, tail, far_tail, writer.locality)


@kernel
def _idler(c, tail, far_tail, locality):
    """Return `far_tail` if it was idle more than `locality` times as long as `tail`, else `tail`. -1: no row."""
    if far_tail < 0:  # `tail` may be on a GPU, which is in no heap
        return tail
    if tail < 0:
        return far_tail
    idle, far_idle = c.state[CLOCK] - c.rows[tail].last, c.state[CLOCK] - c.rows[far_tail].last
    return far_tail if far_idle > locality * idle else tail


@kernel
def drop_replicas(c, first):
    """Free a key's replicas that nobody holds. first: the key's first row."""
    other = np.int64(first)
    while other >= 0:
        after = np.int64(c.rows[other].same)
        if c.rows[other].state == REPLICA and c.rows[other].holds == 0:
            unlink(c, list_of(c, other, REPLICA), other)
            delete(c, other)
            free(c, other)
        other = after


@kernel
def evict(c, row):
    """Evict a row, which is the oldest of its list and not held. If the row is kept, evict another row (`_instead_of`).

    Returns the evicted row, which is in the same size class. The caller must fill or free this row. Also frees the
    key's replicas that nobody holds. These are as old as the primary, since `release` touches the primary after a read
    of a replica. If a replica became the primary, it would take a slot of its node's staging window.
    """
    oldest_row = row
    if c.state[LAST_KEPT] > c.state[SECOND]:
        row = _instead_of(c, row)
    position = probe(c, c.rows[row].k0, c.rows[row].k1)
    if not alone(c, position, row):
        drop_replicas(c, row_at(c, position))
    forget_at(c, row, position)  # the eviction
    if row != oldest_row:
        _passed_over(c, list_of(c, row, READY), c.rows[row].last)
    c.size_classes[size_class_of(c, row)].evicted += 1
    c.quotas[tenant_of(c, row)].evicted += 1
    return row


@kernel
def _is_kept(c, row):
    return c.kept_until[row] > c.state[SECOND]


@kernel
def _instead_of(c, row):
    """Return the row to evict instead of `row`, the oldest row of a list: the list's oldest row that is not kept.

    Returns `row` itself if too many older rows are kept, or if an unclean row would be evicted instead of a clean row.
    """
    if not _is_kept(c, row):
        return row
    which = list_of(c, row, READY)
    other = _first_not_kept(c, which)
    clean_tail = c.lists[which].clean_tail
    if other < 0 or (clean_tail >= 0 and c.rows[other].last > c.rows[clean_tail].last):
        return row
    return other


@kernel
def _first_not_kept(c, which):
    """Return a list's oldest row that is neither held nor kept, or -1 if too many older rows are held or kept."""
    while 2 * c.lists[which].kept_count <= c.lists[which].count and c.lists[which].kept_count < KEPT_MOST:
        kept = c.lists[which].kept
        row = np.int64(c.rows[kept].prev if kept >= 0 else c.lists[which].tail)
        if row < 0 or not (c.rows[row].holds > 0 or _is_kept(c, row)):
            return row
        c.lists[which].kept = row
        c.lists[which].kept_count += 1
    return np.int64(-1)


@kernel
def _passed_over(c, which, last):
    """Make a list's oldest rows younger after an eviction passed over these rows. Their order stays the same.

    Without kept rows, n evictions would have evicted the n oldest rows. So after every n evictions, each passed-over
    row gets the age of the n-th next younger row. The youngest passed-over row gets `last`, the age of the evicted row.
    Thus the oldest row is at least as old as without kept rows, and a tenant's hints cost no other tenant a block. n is
    an eighth of the number of passed-over rows, so that an eviction changes eight ages on average.
    """
    c.lists[which].passes += 1
    count, age = c.lists[which].kept_count, c.rows[c.lists[which].kept].last
    if 8 * c.lists[which].passes <= count:
        return
    passes = min(c.lists[which].passes, count, last - age)
    c.lists[which].passes = 0
    row = ahead = np.int64(c.lists[which].tail)
    for _ in range(passes):
        ahead = np.int64(c.rows[ahead].prev)
    over, before = np.int64(-1), 0  # oldest row that is no longer kept, and the number of older rows
    for i in range(count):
        if over < 0 and c.rows[row].holds == 0 and not _is_kept(c, row):
            over, before = row, i
        if i < count - passes:
            c.rows[row].last = c.rows[ahead].last
            ahead = np.int64(c.rows[ahead].prev)
        else:
            age += 1
            c.rows[row].last = age
        row = np.int64(c.rows[row].prev)
    c.rows[c.lists[which].kept].last = last
    if over >= 0:  # the next eviction looks from there on
        c.lists[which].kept = c.rows[over].next
        c.lists[which].kept_count = before


@kernel(C, ROWS, INT, INT)
def keep(c, firsts, tenant, until):
    """Touch a tenant's keys, last to first, and keep them until second `until`. Returns how many keys are stored.

    Only copies in the memory of nodes are kept: evictions pass over them, see `_instead_of`. firsts: from `find`.
    """
    count = 0
    for i in range(len(firsts) - 1, -1, -1):
        row, is_there = np.int64(firsts[i]), False
        if row >= 0 and c.state[TENANTS] > 1 and tenant_of(c, row) != tenant:
            continue
        while row >= 0:
            if stored(c.rows[row].state):
                is_there = True
                if c.size_classes[size_class_of(c, row)].charge > 0:
                    keep_until(c, row, until)
                if c.rows[row].holds == 0:
                    touch(c, row)
            row = np.int64(c.rows[row].same)
        count += is_there
    return count


@kernel
def evict_surplus(c, size_class):
    """Evict the oldest block that no tenant's minimum protects. If all are protected, evict the oldest block.

    Returns whether there was any block to evict.
    """
    row = _oldest_for(c, size_class, -1, OTHERS)
    if row < 0:
        row = oldest(c, size_class)
    if row >= 0:
        free(c, evict(c, row))
    return row >= 0


@kernel
def keep_maximum(c, tenant, size_class):
    """If a tenant is above its maximum, evict its oldest block in this size class that nobody holds."""
    row = oldest_of(c, size_class, tenant) if c.quotas[tenant].used > c.quotas[tenant].maximum else np.int64(-1)
    if row >= 0:
        free(c, evict(c, row))


@kernel(C, INT, INT)
def restore_window(c, size_class, slots):
    """Evict up to `slots` blocks until the staging window lacks no slot. Returns how many blocks it could not evict."""
    while slots > 0 and room(c, size_class) < 0 and evict_surplus(c, size_class):
        slots -= 1
    return slots if room(c, size_class) < 0 else 0


@kernel
def victim_ahead(c, size_class, tenant, steps):
    """Return a tenant's next victim after `steps` evictions, or -1. Prefetches the table entries of earlier victims."""
    row = np.int64(c.lists[ready_list(size_class, tenant)].tail)
    for _ in range(steps):
        if row < 0:
            break
        prefetch_entry(c, row)
        row = np.int64(c.rows[row].prev)
    return row


@kernel
def next_ahead(c, row):
    """Return the next younger victim after a row. Prefetches this victim, and the table entry of the row.

    So each cache miss of the list overlaps with the work of one grant.
    """
    if row < 0:
        return row
    prefetch_entry(c, row)
    row = np.int64(c.rows[row].prev)
    if row >= 0:
        prefetch(c.rows, row)
    return row


@kernel(C, ROWS, INT, BOOL)
def done(c, firsts, tenant, again):
    """Make a tenant's keys older than all blocks in use. Returns how many copies became older.

    Held copies do not change. firsts: from `find`. again: whether somebody will ask for the keys later. Keys without
    `again` are evicted first, the latest call first. Then keys with `again` are evicted: without an external tier, the
    latest call first; with an external tier, the earliest call first. Of each call, the last key is evicted first.
    """
    count = 0
    for i in range(len(firsts)):
        row = np.int64(firsts[len(firsts) - 1 - i if again and c.state[TIERED] else i])
        if row >= 0 and c.state[TENANTS] > 1 and tenant_of(c, row) != tenant:
            continue
        while row >= 0:
            keep_until(c, row, 0)
            if stored(c.rows[row].state) and c.rows[row].holds == 0 and _may_rest(c, row):
                which = list_of(c, row, c.rows[row].state)
                oldest_in(c, which)  # removes held rows from the old end, else they would end up in the middle
                if again:
                    count += _rest(c, which, row)
                else:
                    _end(c, which, row)
                    count += 1
            row = np.int64(c.rows[row].same)
    return count


@kernel
def _may_rest(c, row):
    """Whether `done` may make a row older.

    False on a GPU, as demotion moves the oldest blocks of a GPU to memory, where the blocks are young. False while the
    row's node is not offered, for example while the node is joining.
    """
    size_class = c.size_classes[size_class_of(c, row)]
    return is_tier_row(c, row) or (size_class.charge > 0 and size_class.offered != NOT_OFFERED)


@kernel
def _rest(c, which, row):
    """Put a row between the rows in use and the rows that nobody will ask for again. Returns whether the row moved.

    A row does not move if its new place would be among clean rows and the external tier lacks its block, since demotion
    skips clean rows.
    """
    clean_tail, done = c.lists[which].clean_tail, np.int64(c.lists[which].done)
    is_clean = clean_tail >= 0 and c.rows[row].last <= c.rows[clean_tail].last
    amidst = clean_tail >= 0 and (done < 0 or c.rows[clean_tail].last > c.rows[done].last)
    if amidst and not is_clean and not in_external_tier(c, row):
        return False
    unlink(c, which, row)
    c.state[CLOCK] += 1
    waited = c.state[CLOCK] - FIRST_TICK
    c.rows[row].last = WAITING + (waited if c.state[TIERED] else -waited)
    _link_above(c, which, row, np.int64(c.lists[which].done if c.state[TIERED] else c.lists[which].late))
    clean_tail = c.lists[which].clean_tail
    if clean_tail >= 0 and c.rows[clean_tail].last > c.rows[row].last:
        c.lists[which].clean_count += 1
    return True


@kernel
def _link_above(c, which, row, older):
    """Insert a row into the `done` part of a list, just younger than `older`; if `older` is -1, as the oldest row."""
    if c.lists[which].done == older:
        c.lists[which].done = row
    link_between(c, which, np.int64(c.rows[older].prev if older >= 0 else c.lists[which].tail), row, older)


@kernel(C, INT, INT, INT)
def end_late(c, size_classes, after, before):
    """Make rows late if their wait began at a tick in (after, before]. Late rows are evicted before other waiting rows.

    Returns the number of these rows. Their order stays the same. size_classes: number of size classes. With an external
    tier no row moves, as the rows with the longest wait are evicted first anyway.
    """
    count = 0
    for which in range(0 if c.state[TIERED] else size_classes * LISTS_PER_CLASS):
        row, oldest = np.int64(c.lists[which].done), np.int64(-1)
        while row >= 0 and c.rows[row].last > IN_TIME and _since(c, row) <= before:
            row, oldest = np.int64(c.rows[row].next), row
        while oldest >= 0:
            row, younger = oldest, np.int64(c.rows[oldest].prev)
            oldest = np.int64(-1) if c.lists[which].done == row else younger
            unlink(c, which, row)
            c.rows[row].last = after + before - _since(c, row) - OVERDUE
            _link_above(c, which, row, np.int64(c.lists[which].late))
            c.lists[which].late = row
            count += 1
    return count


@kernel
def _since(c, row):
    """Return the tick at which a row began to wait. Not valid in a pool with an external tier."""
    return FIRST_TICK + WAITING - c.rows[row].last


@kernel
def _end(c, which, row):
    """Make a row the next victim of its list. The row counts as clean, as no external tier needs its block."""
    unlink(c, which, row)
    c.state[CLOCK] += 1
    c.rows[row].last = FIRST_TICK - FOR_GOOD - (c.state[CLOCK] - FIRST_TICK)
    link_old(c, which, row)
    if c.rows[row].state == READY and c.size_classes[size_class_of(c, row)].charge > 0:
        c.lists[which].clean_count += 1
        if c.lists[which].clean_tail < 0:
            c.lists[which].clean_tail = row
