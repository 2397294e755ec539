"""Chooses the blocks to demote: from memory to an external tier, and from a GPU to the memory of its node.

A tier has its own size classes, and a row for each of its blocks: DEMOTING while the block is written, then EXTERNAL.
The block stays in memory too, and is *clean* there: evicting it loses nothing, as the tier has a copy. The tier may
evict other blocks to make room.

A block that was copied from a GPU becomes a primary in memory and a replica on the GPU: evicting that replica loses
nothing. During the copy the row in memory is DEMOTING and held, so that nobody evicts or reads it.
"""

import numpy as np

from raykv.directory.kernels.columns import (
    CHOSEN,
    DEMOTING,
    DROPPED,
    EXTERNAL,
    FLAGS,
    FREE,
    FREE_LIST,
    GOAL,
    IN_MEMORY,
    INT,
    KEYS,
    LISTS_PER_CLASS,
    MASK,
    NEEDED,
    READY,
    REPLICA,
    ROWS,
    TENANTS,
    C,
)
from raykv.directory.kernels.eviction import evict, near_victim, oldest
from raykv.directory.kernels.leases import has_primary
from raykv.directory.kernels.lists import (
    finish,
    first_in,
    forget,
    free,
    grant,
    in_external_tier,
    link_old,
    list_of,
    node_of,
    ready_list,
    size_class_of,
    suspend,
    touch,
    unhold,
    unlink,
    unlist_in_role,
)
from raykv.directory.kernels.quotas import is_full, tenant_of
from raykv.directory.kernels.slots import room, take
from raykv.directory.kernels.table import delete, first_of, first_row
from raykv.system.jit import kernel

ROWS_EXAMINED = 1 << 14  # maximum number of rows that one call examines, as other callers wait meanwhile
CHANCES = 8  # maximum number of blocks that an eviction from a tier passes over because they are in memory too


@kernel(C, GOAL)
def shortfall(c, goal):
    """Return how many blocks to demote so that `share` of a size class's `slots` can be taken without losing a block.

    Such slots are free, or hold a replica or a clean block. Staging slots do not count.
    """
    oldest(c, goal.size_class)  # removes held rows from the old end, since held rows can't be evicted
    want, short = _wanted(c, goal), np.int64(0)
    for tenant in range(c.state[TENANTS]):
        short += max(0, _lack(c, goal.size_class, tenant, want))
    return short


@kernel
def _wanted(c, goal):
    """Return how many blocks of a size class must be clean."""
    return np.int64(np.ceil(goal.slots * goal.share)) - max(0, room(c, goal.size_class))


@kernel
def _lack(c, size_class, tenant, want):
    """Return how many of a tenant's blocks to demote, so that every tenant has the same share of clean blocks.

    Otherwise all clean blocks could belong to one tenant within its minimum, and no other tenant could evict them.
    """
    total = np.int64(0)
    for other in range(c.state[TENANTS]):
        total += c.lists[ready_list(size_class, other)].count
    primaries = c.lists[ready_list(size_class, tenant)]
    if total == 0:
        return want if tenant == 0 else np.int64(0)
    return -(-want * primaries.count // total) - primaries.clean_count


@kernel
def start_demotion(c, row, target_row, holds, source, target, n):
    """Begin to demote a block to `target_row`, a taken row of the lower tier. Writes source[n] and target[n]."""
    grant(c, target_row, c.rows[row].k0, c.rows[row].k1, DEMOTING, holds)
    source[n] = row
    target[n] = target_row


@kernel
def take_tier_slot(c, tier_class, evicted, count):
    """Take a free row of a tier's size class. If none is free, evict the oldest block, and append its key to `evicted`.

    A block that is also in memory is read from memory, so its row in the tier gets old although the block is used. The
    eviction passes over at most CHANCES such blocks. Returns (row or -1, new count of evicted keys).
    """
    row = np.int64(c.lists[tier_class * LISTS_PER_CLASS + FREE_LIST].head)
    if row >= 0:
        unlink(c, tier_class * LISTS_PER_CLASS + FREE_LIST, row)
        return row, count
    row = oldest(c, tier_class)
    for _ in range(CHANCES):
        if row < 0 or c.rows[row].last < NEEDED or first_in(c, first_of(c, row), IN_MEMORY) < 0:
            break
        touch(c, row)
        row = oldest(c, tier_class)
    if row >= 0:
        evicted[count, 0], evicted[count, 1] = c.rows[row].k0, c.rows[row].k1
        count += 1
        forget(c, row)
        c.size_classes[tier_class].evicted += 1
    return row, count


@kernel(C, GOAL, INT, INT, INT, ROWS, CHOSEN)
def demote(c, goal, min_uses, tier_class, examined, pinned, chosen):
    """Demote a size class's oldest blocks that are not in a tier yet, until there is no `shortfall`.

    min_uses: minimum number of matches of a block. examined: maximum number of rows to examine. pinned: rows to demote
    once no other rows are left. Returns (number of demoted blocks, number of keys evicted from the tier).
    """
    n, count, row = 0, 0, np.int64(0)
    for _ in range(examined):
        if n == len(chosen.source) or shortfall(c, goal) <= 0:
            break
        row = _oldest_unclean(c, goal.size_class, _wanted(c, goal))
        if row < 0:
            break
        which = list_of(c, row, READY)
        if goal.share < 1.0 and c.rows[row].holds > 0:  # not evictable: becomes the youngest when its last hold ends
            unlink(c, which, row)
            continue
        if c.rows[row].uses >= min_uses and c.rows[row].last >= NEEDED and not in_external_tier(c, row):
            before = n
            n, count = _start_in_tier(c, row, tier_class, chosen, n, count)
            if n == before:
                break
        c.lists[which].clean_tail = row
        c.lists[which].clean_count += 1
    most = min(len(chosen.source), n + max(0, shortfall(c, goal)))
    for held in pinned if row < 0 else pinned[:0]:
        if (
            n < most
            and size_class_of(c, held) == goal.size_class
            and c.rows[held].state == READY
            and not in_external_tier(c, held)
        ):
            n, count = _start_in_tier(c, held, tier_class, chosen, n, count)
    return n, count


@kernel
def _oldest_unclean(c, size_class, want):
    """Return the oldest primary that is not known to be clean, among tenants that lack clean blocks; or -1."""
    oldest_row = np.int64(-1)
    for tenant in range(c.state[TENANTS]):
        if _lack(c, size_class, tenant, want) <= 0:
            continue
        primaries = c.lists[ready_list(size_class, tenant)]
        row = np.int64(c.rows[primaries.clean_tail].prev if primaries.clean_tail >= 0 else primaries.tail)
        if oldest_row < 0 or (row >= 0 and c.rows[row].last < c.rows[oldest_row].last):
            oldest_row = row
    return oldest_row


@kernel
def _start_in_tier(c, row, tier_class, chosen, n, count):
    """Begin to demote a row if `tier_class` has a slot. Returns the new numbers (demoted blocks, evicted keys)."""
    target_row, count = take_tier_slot(c, tier_class, chosen.evicted, count)
    if target_row >= 0:
        start_demotion(c, row, target_row, 0, chosen.source, chosen.target, n)
        n += 1
    return n, count


@kernel(C, ROWS, ROWS, FLAGS, MASK)
def demoted(c, rows, gens, stored, lost):
    """Set each DEMOTING row to EXTERNAL if it was stored, else free it. Idempotent.

    lost[i], out: whether the row no longer belongs to this demotion, so that the stored bytes are not needed. Returns
    how many rows became EXTERNAL.
    """
    count = 0
    for i in range(len(rows)):
        row = np.int64(rows[i])
        mine = row >= 0 and c.rows[row].gen == gens[i]
        lost[i] = not mine or (c.rows[row].state != DEMOTING and c.rows[row].state != EXTERNAL)
        if lost[i] or c.rows[row].state == EXTERNAL:
            continue
        if stored[i]:
            finish(c, row, EXTERNAL)
            touch(c, row)
            count += 1
        else:
            delete(c, row)
            free(c, row)
    return count


@kernel(C, ROWS)
def cancel(c, rows):
    """Free DEMOTING rows."""
    for i in range(len(rows)):
        row = np.int64(rows[i])
        delete(c, row)
        free(c, row)


@kernel(C, INT, KEYS, MASK)
def in_tier(c, tier, keys, out):
    """Set out[i] to whether keys[i] is in the external tier with index `tier`, or is being demoted to this tier."""
    for i in range(len(keys)):
        out[i] = _row_in(c, tier, keys[i, 0], keys[i, 1]) >= 0


@kernel
def _row_in(c, tier, k0, k1):
    """Return the row of a key in an external tier, or -1."""
    row = first_row(c, k0, k1)
    while row >= 0:
        if node_of(c, row) == tier and (c.rows[row].state == EXTERNAL or c.rows[row].state == DEMOTING):
            return row
        row = np.int64(c.rows[row].same)
    return np.int64(-1)


@kernel(C, INT, KEYS, MASK)
def report_existing(c, tier_class, keys, refused):
    """Adopt blocks that were in a tier before, oldest first. refused[i], out: whether there was no room for keys[i]."""
    for i in range(len(keys)):
        row = np.int64(c.lists[tier_class * LISTS_PER_CLASS + FREE_LIST].head)
        known = _row_in(c, c.size_classes[tier_class].node, keys[i, 0], keys[i, 1]) >= 0
        refused[i] = row < 0 and not known
        if row < 0 or known:
            continue
        unlink(c, list_of(c, row, FREE), row)
        grant(c, row, keys[i, 0], keys[i, 1], EXTERNAL, 0)
        touch(c, row)


@kernel(C, INT)
def forget_clean_tail(c, size_class):
    """Make demotion look at a size class's blocks again, oldest first, as some clean blocks may no longer be clean."""
    for tenant in range(c.state[TENANTS]):
        c.lists[ready_list(size_class, tenant)].clean_tail = -1
        c.lists[ready_list(size_class, tenant)].clean_count = 0


@kernel(C, INT, INT, INT, ROWS, ROWS)
def demote_gpu(c, size_class, host_class, want, source, target):
    """Demote at most `want` of a GPU's oldest primaries that nobody holds. Returns how many blocks were demoted.

    Each block takes a slot of the node's memory (`host_class`): a slot that needs no eviction, else the slot of an
    evicted block. The evicted block is the oldest block there that may be evicted for the demoted block's tenant.
    source[i], out: the row on the GPU. Nobody holds this row: the copier checks the row's generation instead.
    target[i], out: the DEMOTING row in memory.
    """
    n, row = 0, oldest(c, size_class)
    while row >= 0 and n < want:
        younger = np.int64(c.rows[row].prev)
        if c.rows[row].holds == 0 and not _being_demoted(c, row):
            target_row = _take_in_memory(c, host_class, tenant_of(c, row))
            if target_row >= 0:
                start_demotion(c, row, target_row, 1, source, target, n)
                c.rows[target_row].uses = c.rows[row].uses
                n += 1
            elif c.state[TENANTS] == 1:  # younger blocks would find no slot either
                break
        row = younger
    return n


@kernel
def _take_in_memory(c, host_class, tenant):
    """Take a row of the node's memory for a tenant. Returns -1 if there is none."""
    if room(c, host_class) > 0 and not is_full(c, tenant, c.size_classes[host_class].charge):
        return take(c, host_class)
    row = near_victim(c, host_class, tenant)
    return evict(c, row) if row >= 0 else row


@kernel
def _being_demoted(c, row):
    """Whether a row's key is being copied to memory, possibly from another GPU."""
    other = first_of(c, row)
    while other >= 0:
        if c.rows[other].state == DEMOTING and c.rows[other].holds > 0:
            return True
        other = np.int64(c.rows[other].same)
    return False


@kernel(C, ROWS, MASK)
def gpu_demoted(c, rows, stored):
    """Turn each stored DEMOTING row into a primary, or into a replica if its key has another lasting primary.

    If a row becomes the primary, the key's copies on GPUs become replicas that are evicted first. A row that was not
    stored is quarantined, since somebody may still write to its slot. Returns how many rows were stored.
    """
    count = 0
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row < 0:
            continue
        if c.rows[row].state == DROPPED:
            suspend(c, row)
        elif not stored[i]:
            delete(c, row)
            suspend(c, row)
        else:
            finish(c, row, REPLICA if has_primary(c, row) else READY)
            unhold(c, row)
            count += 1
    for i in range(len(rows)):  # youngest first, so that the oldest is evicted first
        row = np.int64(rows[len(rows) - 1 - i])
        if row >= 0 and c.rows[row].state == READY:
            _make_replicas(c, row)
    return count


@kernel
def _make_replicas(c, row):
    """Make `row` the only primary of its key: other primaries become the oldest replicas of their size classes."""
    other = first_of(c, row)
    while other >= 0:
        if other != row and c.rows[other].state == READY:
            unlist_in_role(c, other, REPLICA)
            if c.rows[other].holds == 0:
                link_old(c, list_of(c, other, REPLICA), other)
        other = np.int64(c.rows[other].same)
