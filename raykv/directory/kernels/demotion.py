"""What goes down to an external tier, and what is evicted there for it.

A tier's blocks are rows of shelves of its own: EXTERNAL, or DEMOTING while they are being written. What goes down
stays where it is in memory; from then on its eviction loses nothing.
"""

import numpy as np

from raykv.directory.kernels.index import (
    DEMOTING,
    EXTERNAL,
    FLAGS,
    FLOAT,
    INT,
    KEYS,
    KEYS_OUT,
    LISTS_PER_CLASS,
    MASK,
    READY,
    ROWS,
    C,
    delete,
    forget,
    free,
    grant,
    list_of,
    node_of,
    present,
    probe,
    size_class_of,
    touch,
    unlink,
)
from raykv.directory.kernels.placement import oldest, room
from raykv.system.jit import kernel

LOOKS = 1 << 14  # at rows, by one call while others wait: what is clean already costs a look
CHANCES = 8  # blocks that are in memory too, which one eviction passes over


@kernel(C, INT, INT, FLOAT)
def short(c, size_class, slots, share):  # type: ignore[no-untyped-def]
    """How many more of a size class's `slots` should be free, or be free to take, to make `share` of them."""
    oldest(c, size_class)  # what is held at the old end can't be taken
    ready = c.lists[size_class * LISTS_PER_CLASS + 1]
    return np.int64(np.ceil(slots * share)) - max(0, room(c, size_class)) - ready.clean_count


@kernel
def in_external_tier(c, row):  # type: ignore[no-untyped-def]
    """Whether a row's key is in a tier below, or on its way there: into memory a GPU's blocks sink, too."""
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0:
        if c.rows[other].state == EXTERNAL or (c.rows[other].state == DEMOTING and node_of(c, other) & 1):
            return True
        other = np.int64(c.rows[other].same)
    return False


@kernel
def in_memory(c, row):  # type: ignore[no-untyped-def]
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0:
        if present(c.rows[other].state):
            return True
        other = np.int64(c.rows[other].same)
    return False


@kernel
def take_tier_slot(c, tier_class, gone, count):  # type: ignore[no-untyped-def]
    """A row of a tier's size class: a free one, else its oldest, whose key is appended to gone[:count].

    One that is in memory too was used lately, whatever its age says: another goes first. Returns (row or -1, count).
    """
    row = np.int64(c.lists[tier_class * LISTS_PER_CLASS].head)
    if row >= 0:
        unlink(c, tier_class * LISTS_PER_CLASS, row)
        return row, count
    row = oldest(c, tier_class)
    for _ in range(CHANCES):
        if row < 0 or not in_memory(c, row):
            break
        touch(c, row)
        row = oldest(c, tier_class)
    if row >= 0:
        gone[count, 0], gone[count, 1] = c.rows[row].k0, c.rows[row].k1
        count += 1
        forget(c, row)
        c.size_classes[tier_class].evicted += 1
    return row, count


@kernel(C, INT, INT, FLOAT, INT, INT, INT, ROWS, ROWS, ROWS, KEYS_OUT)
def demote(c, size_class, slots, share, min_uses, tier_class, looks, pinned, source, target, gone):  # type: ignore[no-untyped-def]
    """Choose a size class's oldest blocks that are not below yet, until `share` of its slots can be had for nothing.

    Where that takes more than nobody holds, then of the `pinned` rows, too. source[i], target[i]: the row in memory,
    which nobody holds for that (its reader finds out), and the DEMOTING one in `tier_class`. gone: keys of what is
    evicted there. looks: at so many rows. Returns (blocks, evicted ones).
    """
    which = size_class * LISTS_PER_CLASS + 1
    n, count, row = 0, 0, np.int64(0)
    for _ in range(looks):
        if n == len(source) or short(c, size_class, slots, share) <= 0:
            break
        clean_tail = c.lists[which].clean_tail
        row = np.int64(c.rows[clean_tail].prev if clean_tail >= 0 else c.lists[which].tail)
        if row < 0:
            break
        if share < 1.0 and c.rows[row].pins > 0:  # it can't be taken; once it is let go, it is the youngest
            unlink(c, which, row)
            continue
        if c.rows[row].uses >= min_uses and not in_external_tier(c, row):
            before = n
            n, count = _send(c, row, tier_class, source, target, gone, n, count)
            if n == before:
                break
        c.lists[which].clean_tail = row
        c.lists[which].clean_count += 1
    most = min(len(source), n + max(0, short(c, size_class, slots, share)))
    for held in pinned if row < 0 else pinned[:0]:
        if (
            n < most
            and size_class_of(c, held) == size_class
            and c.rows[held].state == READY
            and not in_external_tier(c, held)
        ):
            n, count = _send(c, held, tier_class, source, target, gone, n, count)
    return n, count


@kernel
def _send(c, row, tier_class, source, target, gone, n, count):  # type: ignore[no-untyped-def]
    """Append a row, if there is a place for it in `tier_class`."""
    target_row, count = take_tier_slot(c, tier_class, gone, count)
    if target_row >= 0:
        grant(c, target_row, c.rows[row].k0, c.rows[row].k1, DEMOTING)
        c.rows[target_row].pins = 0
        source[n] = row
        target[n] = target_row
        n += 1
    return n, count


@kernel(C, ROWS, ROWS, FLAGS, MASK)
def demoted(c, rows, gens, stored, lost):  # type: ignore[no-untyped-def]
    """DEMOTING rows that were stored are EXTERNAL from now on; others are free. lost[i]: what was stored is not wanted.

    Idempotent. Returns how many are EXTERNAL that were not before.
    """
    fresh = 0
    for i in range(len(rows)):
        row = np.int64(rows[i])
        mine = row >= 0 and c.rows[row].gen == gens[i]
        lost[i] = not mine or (c.rows[row].state != DEMOTING and c.rows[row].state != EXTERNAL)
        if lost[i] or c.rows[row].state == EXTERNAL:
            continue
        if stored[i]:
            c.rows[row].state = EXTERNAL
            touch(c, row)
            fresh += 1
        else:
            delete(c, row)
            free(c, row)
    return fresh


@kernel(C, ROWS)
def give_up(c, rows):  # type: ignore[no-untyped-def]
    """Free DEMOTING rows."""
    for i in range(len(rows)):
        row = np.int64(rows[i])
        delete(c, row)
        free(c, row)


@kernel(C, INT, KEYS, MASK)
def in_tier(c, tier, keys, out):  # type: ignore[no-untyped-def]
    """out[i]: whether keys[i] lies in the tier of that index, or is on its way there."""
    for i in range(len(keys)):
        out[i] = _row_in(c, tier, keys[i, 0], keys[i, 1]) >= 0


@kernel
def _row_in(c, tier, k0, k1):  # type: ignore[no-untyped-def]
    at = probe(c, k0, k1)
    row = (c.table[at] & 0xFFFFFFFF) - 1 if at >= 0 else np.int64(-1)
    while row >= 0:
        if node_of(c, row) == tier and (c.rows[row].state == EXTERNAL or c.rows[row].state == DEMOTING):
            return row
        row = np.int64(c.rows[row].same)
    return np.int64(-1)


@kernel(C, INT, KEYS, MASK)
def report_existing(c, tier_class, keys, refused):  # type: ignore[no-untyped-def]
    """Keys that are in a tier already, oldest first. refused[i]: there is no room for it."""
    taken = 0
    for i in range(len(keys)):
        row = np.int64(c.lists[tier_class * LISTS_PER_CLASS].head)
        known = _row_in(c, c.size_classes[tier_class].node, keys[i, 0], keys[i, 1]) >= 0
        refused[i] = row < 0 and not known
        if row < 0 or known:
            continue
        unlink(c, list_of(c, row, 0), row)
        grant(c, row, keys[i, 0], keys[i, 1], EXTERNAL)
        c.rows[row].pins = 0
        touch(c, row)
        taken += 1
    return taken


@kernel(C, INT)
def forget_clean_tail(c, size_class):  # type: ignore[no-untyped-def]
    """Look at a size class's blocks again from the oldest on: some that were to go down did not."""
    c.lists[size_class * LISTS_PER_CLASS + 1].clean_tail = -1
    c.lists[size_class * LISTS_PER_CLASS + 1].clean_count = 0
