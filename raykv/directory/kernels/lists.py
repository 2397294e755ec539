"""The LRU lists, and operations on a single row: holds, and changes of state.

A row that somebody holds (`holds` > 0) is never evicted: an eviction that finds such a row at the old end of a list
removes the row from the list. When the last hold ends, the row is put at the young end. The holds of a request end in
reverse order, last block first, so that plain LRU never evicts a parent before its children.
"""

import numpy as np

from raykv.directory.kernels.columns import (
    CLOCK,
    CLOSED,
    COUNTER,
    DEMOTING,
    DROPPED,
    EPOCH,
    EXTERNAL,
    FREE,
    FREE_LIST,
    IN_MEMORY,
    IN_TIME,
    IN_USE,
    INT,
    LAST_KEPT,
    LISTS_PER_CLASS,
    NOWHERE,
    PAGE_BITS,
    QUARANTINED,
    READY,
    READY_LISTS,
    REPLICA,
    REPLICA_LIST,
    ROWS,
    SECOND,
    STAGING,
    TENANTS,
    TO_ALL,
    WRITING,
    C,
)
from raykv.directory.kernels.quotas import tenant_of
from raykv.directory.kernels.table import alone, close_gap, delete, first_of, insert, probe
from raykv.protocol.location import COUNTER_BITS
from raykv.system.jit import kernel


@kernel
def list_of(c, row, state):
    """Return the index of the list for rows in this state, in the row's size class."""
    size_class = size_class_of(c, row)
    if state == FREE:
        return size_class * LISTS_PER_CLASS + FREE_LIST
    if state == REPLICA:
        return size_class * LISTS_PER_CLASS + REPLICA_LIST
    counts = c.state[TENANTS] > 1 and c.size_classes[size_class].charge > 0  # else the size class has one list
    return ready_list(size_class, tenant_of(c, row) if counts else 0)


@kernel
def ready_list(size_class, tenant):
    """Return the index of the list of a tenant's READY (or EXTERNAL) rows."""
    return size_class * LISTS_PER_CLASS + READY_LISTS + tenant


@kernel
def charge(c, row, blocks):
    """Charge a row's tenant for `blocks` more blocks (1 or -1)."""
    c.quotas[tenant_of(c, row)].used += blocks * c.size_classes[size_class_of(c, row)].charge


@kernel
def claim(c, first, tenant):
    """Charge a key to a tenant that uses it, unless the tenant that pays now would fall below its minimum."""
    owner, size = tenant_of(c, first), np.int64(0)
    row = np.int64(first)
    while row >= 0:
        if c.rows[row].state == READY or c.rows[row].state == WRITING:
            size += c.size_classes[size_class_of(c, row)].charge
        row = np.int64(c.rows[row].same)
    if size == 0 or c.quotas[owner].used - size >= c.quotas[owner].minimum:
        assign(c, first, tenant)


@kernel
def assign(c, first, tenant):
    """Charge a key to a tenant. first: the key's first row."""
    row = np.int64(first)
    while row >= 0:
        if tenant_of(c, row) != tenant:
            _assign_row(c, row, tenant)
        row = np.int64(c.rows[row].same)


@kernel
def _assign_row(c, row, tenant):
    state = c.rows[row].state
    is_primary = (state == READY) | (state == WRITING)
    moves = state == READY and c.size_classes[size_class_of(c, row)].charge > 0
    if moves and listed(c, row):
        unlink(c, list_of(c, row, READY), row)
    if is_primary:
        charge(c, row, -1)
    c.tenants[row] = tenant
    keep_until(c, row, 0)
    if is_primary:
        charge(c, row, 1)
    if moves and c.rows[row].holds == 0:
        touch(c, row)


@kernel(C, INT, INT)
def give_up_list(c, size_class, tenant):
    """Merge a tenant's primaries into the list of tenant 0, by age. After that, no row of the lists counts as clean."""
    source, target = ready_list(size_class, tenant), ready_list(size_class, 0)
    for which in (source, target):
        oldest_in(c, which)  # removes held rows from the old end, else they would end up in the middle
        c.lists[which].clean_tail = -1
        c.lists[which].clean_count = 0
        pass_over_none(c, which)
    c.lists[target].done = younger_of(c, c.lists[target].done, c.lists[source].done)
    c.lists[target].late = younger_of(c, c.lists[target].late, c.lists[source].late)
    younger = np.int64(c.lists[target].tail)
    row = np.int64(c.lists[source].tail)
    while row >= 0:
        after = np.int64(c.rows[row].prev)
        while younger >= 0 and c.rows[younger].last < c.rows[row].last:
            younger = np.int64(c.rows[younger].prev)
        older = np.int64(c.rows[younger].next if younger >= 0 else c.lists[target].head)
        link_between(c, target, younger, row, older)
        row = after
    row = np.int64(c.lists[target].head)
    while row >= 0:  # evictions may have given a kept row the age of a row of the other list: make all ages different
        older = np.int64(c.rows[row].next)
        if older >= 0:
            c.rows[older].last = min(c.rows[older].last, c.rows[row].last - 1)
        row = older
    c.lists[source].head = c.lists[source].tail = c.lists[source].done = c.lists[source].late = -1
    c.lists[source].count = 0


@kernel
def younger_of(c, row, other):
    """Return the younger of two rows; -1 stands for no row."""
    return other if row < 0 or (other >= 0 and c.rows[other].last > c.rows[row].last) else row


@kernel
def link_between(c, which, younger, row, older):
    """Put a row into a list, between two rows that are neighbours there; -1 stands for no row."""
    c.rows[row].prev = younger
    c.rows[row].next = older
    if younger >= 0:
        c.rows[younger].next = row
    else:
        c.lists[which].head = row
    if older >= 0:
        c.rows[older].prev = row
    else:
        c.lists[which].tail = row
    c.lists[which].count += 1


@kernel
def pass_over_none(c, which):
    """Make the next search for a row that is not kept begin at the list's old end."""
    c.lists[which].kept = -1
    c.lists[which].kept_count = c.lists[which].passes = 0


@kernel
def link(c, which, row):
    """Put a row at the young end of a list."""
    link_between(c, which, np.int64(-1), row, np.int64(c.lists[which].head))


@kernel
def link_old(c, which, row):
    """Put a row at the old end of a list, as its oldest row."""
    tail = np.int64(c.lists[which].tail)
    if tail >= 0:
        c.rows[row].last = min(c.rows[row].last, c.rows[tail].last - 1)
    if c.lists[which].done < 0 and c.rows[row].last < IN_USE:
        c.lists[which].done = row
    if c.lists[which].late < 0 and c.rows[row].last < IN_TIME:
        c.lists[which].late = row
    link_between(c, which, tail, row, np.int64(-1))


@kernel
def unlink(c, which, row):
    """Remove a row from its list."""
    before, after, clean_tail = c.rows[row].prev, c.rows[row].next, c.lists[which].clean_tail
    if clean_tail >= 0 and c.rows[row].last <= c.rows[clean_tail].last:
        c.lists[which].clean_count -= 1
        c.lists[which].clean_tail = after if clean_tail == row else clean_tail
    kept = c.lists[which].kept
    if kept >= 0 and IN_USE < c.rows[row].last <= c.rows[kept].last:
        c.lists[which].kept_count -= 1
        if c.lists[which].kept_count == 0:
            pass_over_none(c, which)
        elif kept == row:
            c.lists[which].kept = after
    if c.lists[which].done == row:
        c.lists[which].done = after
    if c.lists[which].late == row:
        c.lists[which].late = after
    if before >= 0:
        c.rows[before].next = after
    else:
        c.lists[which].head = after
    if after >= 0:
        c.rows[after].prev = before
    else:
        c.lists[which].tail = before
    c.lists[which].count -= 1
    c.rows[row].prev = NOWHERE


@kernel
def keep_until(c, row, second):
    """Keep a row until `second`; 0 ends this. While no row is kept, nobody reads the column `kept_until`."""
    if second > c.state[LAST_KEPT]:
        c.state[LAST_KEPT] = second
    if c.state[LAST_KEPT] > c.state[SECOND]:
        c.kept_until[row] = second


@kernel
def oldest_in(c, which):
    """Return a list's oldest row without a hold, or -1. Takes older held rows out of the list."""
    row = np.int64(c.lists[which].tail)
    while row >= 0 and c.rows[row].holds > 0:
        unlink(c, which, row)
        row = np.int64(c.lists[which].tail)
    return row


@kernel
def listed(c, row):
    """Whether a row is in a list."""
    return c.rows[row].prev != NOWHERE


@kernel
def warm_neighbours(c, rows):
    """Read the rows' neighbours in their lists, so that the cache misses of `touch` overlap."""
    warm = 0
    for row in rows:
        if row >= 0 and listed(c, row):
            warm += c.rows[max(0, c.rows[row].prev)].state + c.rows[max(0, c.rows[row].next)].state
    return warm


@kernel
def touch(c, row):
    """Make a stored row that nobody holds the youngest of its list."""
    which = list_of(c, row, c.rows[row].state)
    if listed(c, row):
        unlink(c, which, row)
    c.state[CLOCK] += 1
    c.rows[row].last = c.state[CLOCK]
    link(c, which, row)


@kernel
def free(c, row):
    """Free a row that is neither in the table nor in a list."""
    c.rows[row].state = FREE
    c.rows[row].holds = 0
    link(c, list_of(c, row, FREE), row)


@kernel
def hold(c, row):
    """Hold a stored or STAGING row. Removes a replica from its list, as replicas in that list may lose their slots."""
    if listed(c, row) and c.rows[row].state == REPLICA:
        unlink(c, list_of(c, row, REPLICA), row)
    c.rows[row].holds += 1


@kernel
def unhold(c, row):
    """End one hold on a row.

    After the last hold, a row with a block becomes the youngest of its list, and a row without a block becomes free.
    """
    c.rows[row].holds -= 1
    if c.rows[row].holds == 0:
        if stored(c.rows[row].state):
            touch(c, row)
        else:
            give_back(c, row)


@kernel
def give_back(c, row):
    """Free a row that nobody holds and that stores no block."""
    if unfinished(c.rows[row].state):
        withdraw(c, row)
    free(c, row)


@kernel
def unfinished(state):
    """Whether a client or a node store still writes into rows in this state."""
    return state == WRITING or state == STAGING  # `state in (...)` would be a loop in numba


@kernel
def withdraw(c, row):
    """Remove an unfinished row from the table; the caller must set its next state."""
    if c.rows[row].state == STAGING:
        c.size_classes[size_class_of(c, row)].staging -= 1
    else:
        charge(c, row, -1)
        promote(c, row)
    delete(c, row)


@kernel
def size_class_of(c, row):
    return np.int64(c.slabs[c.pages[row >> PAGE_BITS]].size_class)


@kernel
def node_of(c, row):
    """Index of the node or external tier that a row is on."""
    return c.size_classes[size_class_of(c, row)].node


@kernel
def is_tier_row(c, row):
    """Whether a row is in an external tier: see `protocol.location.is_tier`."""
    return node_of(c, row) & 1 == 1


@kernel
def stays(c, row):
    """Whether a row is in the memory of a node that answers and is not about to leave."""
    return c.size_classes[size_class_of(c, row)].offered == TO_ALL


@kernel
def quarantine(c, row):
    """Quarantine an unfinished row: its holder may still write there."""
    withdraw(c, row)
    suspend(c, row)


@kernel
def suspend(c, row):
    """Quarantine a row that is neither in the table nor in a list."""
    c.rows[row].state = QUARANTINED
    c.rows[row].holds = 0
    c.size_classes[size_class_of(c, row)].quarantined += 1


@kernel
def present(state):
    """Whether a row stores a block in memory."""
    return state == READY or state == REPLICA  # no `in`: see `unfinished`


@kernel
def stored(state):
    """Whether a row stores a block, in memory or in an external tier."""
    return present(state) or state == EXTERNAL


@kernel
def first_in(c, row, states):
    """Return the first row in one of `states` (bits), from `row` on among the rows of a key; -1 if there is none."""
    while row >= 0 and not (states >> c.rows[row].state) & 1:
        row = np.int64(c.rows[row].same)
    return row


@kernel(C, ROWS)
def replace_by_stored(c, found):
    """Set found[i] to 1 if a row of a key stores the block, else to 0. found, in: the keys' first rows; -1: no row."""
    for i in range(len(found)):
        found[i] = first_in(c, np.int64(found[i]), IN_MEMORY | 1 << EXTERNAL) >= 0


@kernel
def taken(c, first):
    """Whether a key is in memory or being written there. first: the key's first row, or -1."""
    return first_in(c, np.int64(first), IN_MEMORY | 1 << WRITING) >= 0


@kernel
def in_external_tier(c, row):
    """Whether a row's key is in an external tier, or on its way there. Demotion from a GPU to memory does not count."""
    other = first_of(c, row)
    while other >= 0:
        if c.rows[other].state == EXTERNAL or (c.rows[other].state == DEMOTING and is_tier_row(c, other)):
            return True
        other = np.int64(c.rows[other].same)
    return False


@kernel
def promote(c, row):
    """Make a key's first replica the primary. `row` is the key's old primary or WRITING row, which is being removed."""
    other = first_in(c, first_of(c, row), 1 << REPLICA)
    if other >= 0:
        set_role(c, other, READY)


@kernel
def set_role(c, row, state):
    """Make a replica the primary (READY), or a primary a REPLICA."""
    unlist_in_role(c, row, state)
    if c.rows[row].holds == 0:
        touch(c, row)


@kernel
def unlist_in_role(c, row, state):
    """Like `set_role`, but keep the row out of all lists."""
    if listed(c, row):
        unlink(c, list_of(c, row, c.rows[row].state), row)
    c.rows[row].state = state
    charge(c, row, 1 if state == READY else -1)


@kernel
def finish(c, row, state):
    """Set the state of a row whose block has been written: READY, REPLICA or EXTERNAL."""
    before = c.rows[row].state
    c.rows[row].state = state
    if before == STAGING:
        c.size_classes[size_class_of(c, row)].staging -= 1
    if state == READY and before != WRITING:  # a WRITING row was charged when it was granted
        charge(c, row, 1)


@kernel
def drop_or_free(c, row):
    """Free a forgotten row, now or when its last hold ends."""
    if c.rows[row].holds == 0:
        free(c, row)
    else:
        c.rows[row].state = DROPPED


@kernel
def close(c, row):
    """Set a row that is neither in the table nor in a list to CLOSED: it no longer belongs to a slab."""
    c.rows[row].state = CLOSED
    c.rows[row].holds = 0
    c.rows[row].gen = 0


@kernel
def forget(c, row):
    """Remove a stored row from the table and its list. If it was the primary, a replica becomes the primary."""
    forget_at(c, row, probe(c, c.rows[row].k0, c.rows[row].k1))


@kernel
def forget_at(c, row, position):
    """Like `forget`. position: position of the key's entry in the table."""
    if listed(c, row):
        unlink(c, list_of(c, row, c.rows[row].state), row)
    if c.rows[row].state == READY:
        charge(c, row, -1)
    if alone(c, position, row):  # true for most rows, which need no second probe
        close_gap(c, position)
        return
    if c.rows[row].state == READY:
        promote(c, row)
    delete(c, row)


@kernel
def grant(c, row, k0, k1, state, holds):
    """Give a row that is in no list to a key, and set the row's state. holds: number of the row's holders."""
    c.state[COUNTER] += 1
    fill(c, row, k0, k1, c.state[EPOCH] << COUNTER_BITS | c.state[COUNTER], state)
    c.rows[row].holds = holds
    if state == STAGING:
        c.size_classes[size_class_of(c, row)].staging += 1
        c.rows[row].last = c.state[CLOCK]  # any value but GIVEN_UP, so that other readers may wait for this copy


@kernel
def fill(c, row, k0, k1, gen, state):
    """Make a row another copy of a key. The row stays outside all lists."""
    c.rows[row].k0 = k0
    c.rows[row].k1 = k1
    c.rows[row].gen = gen
    c.rows[row].holds = 0
    c.rows[row].uses = 0
    keep_until(c, row, 0)
    c.rows[row].state = state
    insert(c, row)
    if (state == WRITING) | (state == READY):
        charge(c, row, 1)
