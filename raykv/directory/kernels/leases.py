"""Holds: pin what is ready, stage what is elsewhere, let go. A lease is a reader's hold, a reservation a writer's."""

import numpy as np

from raykv.config import USES_MAX
from raykv.directory.kernels.index import (
    DROPPED,
    EXTERNAL,
    INT,
    KEYS,
    LISTS_PER_CLASS,
    NODE_MASK,
    PINS_MAX,
    QUARANTINED,
    READY,
    REPLICA,
    ROWS,
    STAGING,
    TO_ALL,
    TO_OWN,
    TO_READERS,
    WRITING,
    C,
    kept,
    listed,
    node_of,
    pin,
    present,
    probe,
    quarantine,
    set_role,
    size_class_of,
    suspend,
    touch,
    unfinished,
    unpin,
)
from raykv.directory.kernels.placement import oldest, stage, takeable
from raykv.system.jit import kernel

UNSTAGED = -2  # remote, and no staging row yet


@kernel
def warm_neighbours(c, rows):  # type: ignore[no-untyped-def]
    """Bring in what touching will write, so that its cache misses overlap instead of queueing."""
    warm = 0
    for row in rows:
        if row >= 0 and listed(c, row):
            warm += c.rows[max(0, c.rows[row].prev)].state + c.rows[max(0, c.rows[row].next)].state
    return warm


@kernel
def best(c, first, node):  # type: ignore[no-untyped-def]
    """Of a key's rows: (the one to read, the one being staged on `node`), each -1 if there is none."""
    source = np.int64(-1)
    tier = np.int64(-1)
    staging = np.int64(-1)
    row = np.int64(first)
    while row >= 0:
        state = c.rows[row].state
        size_class = size_class_of(c, row)
        here = c.size_classes[size_class].node == node
        if c.size_classes[size_class].offered and c.rows[row].pins < PINS_MAX:
            if present(state):
                if here:
                    return row, np.int64(-1)
                if source < 0 or state == READY:
                    source = row
            elif state == STAGING and here:
                staging = row
            elif state == EXTERNAL:
                tier = row
        row = np.int64(c.rows[row].same)
    return source if source >= 0 else tier, staging


@kernel(C, ROWS, INT, INT)
def staging_need(c, firsts, node, size_class):  # type: ignore[no-untyped-def]
    """Slots that a ready prefix takes to be pulled to its reader, as far as the window goes; 0 if there are enough."""
    left = c.size_classes[size_class].window - c.size_classes[size_class].staging
    free = takeable(c, size_class)
    need = np.int64(0)
    if free >= min(np.int64(len(firsts)), left):
        return need
    for first in firsts:
        row, staging = best(c, first, node)
        if row < 0 or need == left:
            break
        if node_of(c, row) != node and staging < 0:
            need += 1
    return need if free < need else np.int64(0)


@kernel(C, ROWS, ROWS, ROWS, ROWS)
def locate_prefix(c, firsts, hosts, counts, last):  # type: ignore[no-untyped-def]
    """counts[hosts[node & NODE_MASK]]: how many blocks of the longest ready prefix are there, in memory or on a GPU.

    last: zeros, as many. Nothing is touched.
    """
    for i in range(len(firsts)):
        row = np.int64(firsts[i])
        ready = False
        while row >= 0:
            if kept(c.rows[row].state) and c.size_classes[size_class_of(c, row)].offered:
                if c.rows[row].state != EXTERNAL:
                    host = hosts[node_of(c, row) & NODE_MASK]
                    counts[host] += last[host] <= i
                    last[host] = i + 1
                ready = True
            row = np.int64(c.rows[row].same)
        if not ready:
            break


@kernel(C, KEYS, ROWS, INT, INT, ROWS, ROWS)
def match(c, keys, firsts, node, size_class, source, staged):  # type: ignore[no-untyped-def]
    """Pin the longest ready prefix. firsts: what `find` said. node, size class: the reader's, -1 where it has none.

    source[i]: the row to read. staged[i]: the row on the reader's node that it is to be pulled into; -1 where the
    source is there already; UNSTAGED where no staging is left and the block streams through the window (`next_window`).
    Returns (blocks, of them remote).
    """
    n, remote = 0, 0
    while n < len(keys):
        row, staging = best(c, firsts[n], node)
        if row < 0:
            break
        pin(c, row)  # all pins before the first staging, which may evict replicas
        _count_use(c, firsts[n])
        source[n] = row
        staged[n] = -1
        if node_of(c, row) != node:
            remote += 1
            staged[n] = staging if staging >= 0 else UNSTAGED
            if staging >= 0:
                c.rows[staging].pins += 1
        n += 1
    covered, granted = _cover(c, keys, n, size_class, staged)
    if granted == 0 and covered < n:
        moved = _read_elsewhere(c, firsts, covered, n, node, source, staged)
        remote += moved
        if moved > 0:
            covered, granted = _cover(c, keys, n, size_class, staged)
    if granted == 0 and covered < n:  # no staging at all: a shorter hit, never a wait
        for j in range(n - covered):
            i = n - 1 - j
            remote -= staged[i] != -1
            unpin(c, source[i])
            if staged[i] >= 0:
                unpin(c, staged[i])
        n = covered
    return n, remote


@kernel
def _count_use(c, first):  # type: ignore[no-untyped-def]
    """Every copy of a key knows how often it was asked for: whichever is judged by that later."""
    row = np.int64(first)
    while row >= 0:
        c.rows[row].uses = min(USES_MAX, c.rows[row].uses + 1)
        row = np.int64(c.rows[row].same)


@kernel
def _read_elsewhere(c, firsts, covered, n, node, source, staged):  # type: ignore[no-untyped-def]
    """Give up the replicas on the reader's node, which may be all of its window, and stream from their primaries.

    Only blocks from `covered` on, last to first. Returns how many.
    """
    moved = 0
    for j in range(n - covered):
        i = n - 1 - j
        row = np.int64(source[i])
        if c.rows[row].state != REPLICA or node_of(c, row) != node:
            continue
        other = np.int64(firsts[i])
        while other >= 0 and not (_readable(c, other) and node_of(c, other) != node):
            other = np.int64(c.rows[other].same)
        if other >= 0:
            pin(c, other)
            unpin(c, row)
            source[i] = other
            staged[i] = UNSTAGED
            moved += 1
    return moved


@kernel
def _readable(c, row):  # type: ignore[no-untyped-def]
    return c.rows[row].state == READY and c.rows[row].pins < PINS_MAX and c.size_classes[size_class_of(c, row)].offered


@kernel
def _cover(c, keys, n, size_class, staged):  # type: ignore[no-untyped-def]
    """Stage the unstaged, in order, until the window is used up. Returns (blocks covered, those with staging)."""
    granted = 0
    for i in range(n):
        if staged[i] == UNSTAGED:
            row = stage(c, size_class, keys[i, 0], keys[i, 1]) if size_class >= 0 else np.int64(-1)
            if row < 0:
                return i, granted
            staged[i] = row
        granted += staged[i] >= 0
    return n, granted


@kernel(C, KEYS, ROWS, ROWS, INT, INT, ROWS, ROWS)
def next_window(c, keys, source, gens, node, size_class, staged, staged_gens):  # type: ignore[no-untyped-def]
    """Staging for further UNSTAGED blocks of a match, in order, until the window is used up. Returns blocks covered."""
    for i in range(len(source)):
        row = np.int64(source[i])
        if row < 0 or c.rows[row].gen != gens[i] or not kept(c.rows[row].state):
            return i
        if staged[i] >= 0 and c.rows[np.int64(staged[i])].gen != staged_gens[i]:
            return i  # the staging is somebody else's by now,
        if staged[i] == -1 and node_of(c, row) != node:
            return i  # or gone with its node
        if staged[i] != UNSTAGED:
            continue  # on the reader's node, or staged before
        at = probe(c, keys[i, 0], keys[i, 1])
        _, staging = best(c, (c.table[at] & 0xFFFFFFFF) - 1, node)
        if staging >= 0:
            c.rows[staging].pins += 1
        else:
            staging = stage(c, size_class, keys[i, 0], keys[i, 1])
            if staging < 0:
                return i
        staged[i] = staging
    return len(source)


@kernel(C, ROWS, ROWS, ROWS)
def pulled(c, rows, gens, promoted):  # type: ignore[no-untyped-def]
    """Staging rows that were pulled: replicas from now on; primaries, where the pulled one is gone, fleeting or below.

    came[shelf]: how many primaries came out of its staging window is added.
    """
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row >= 0 and c.rows[row].gen == gens[i] and c.rows[row].state == STAGING:
            size_class = size_class_of(c, row)
            c.size_classes[size_class].staging -= 1
            c.rows[row].state = REPLICA if has_primary(c, row) else READY
            if c.rows[row].state == READY:
                _succeed(c, row)
                promoted[size_class] += 1


@kernel
def has_primary(c, row):  # type: ignore[no-untyped-def]
    """Whether a key's primary lasts as long as this row: in memory that stays, or where this one's is fleeting, any."""
    goes = fleeting(c, row)
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0:
        if c.rows[other].state == WRITING or (c.rows[other].state == READY and (goes or not fleeting(c, other))):
            return True
        other = np.int64(c.rows[other].same)
    return False


@kernel
def fleeting(c, row):  # type: ignore[no-untyped-def]
    """Whether a row's node is about to leave, or it is a GPU's: what is there is to be elsewhere, too."""
    offered = c.size_classes[size_class_of(c, row)].offered
    return TO_READERS <= offered <= TO_OWN


@kernel
def stays(c, row):  # type: ignore[no-untyped-def]
    """Whether a row is in the memory of a node that answers, and is not about to leave."""
    return c.size_classes[size_class_of(c, row)].offered == TO_ALL


@kernel
def _succeed(c, row):  # type: ignore[no-untyped-def]
    """Where a key's primary is fleeting, a new one takes its place."""
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0:
        if other != row and c.rows[other].state == READY:
            c.rows[row].uses = max(c.rows[row].uses, c.rows[other].uses)
            set_role(c, other, REPLICA)
        other = np.int64(c.rows[other].same)


@kernel(C, INT, INT, ROWS)
def promote_replicas(c, base, slots, promoted):  # type: ignore[no-untyped-def]
    """Make replicas on nodes that stay the primaries of keys whose primary is in a slab of one that leaves.

    came: see `pulled`.
    """
    for row in range(base, base + slots):
        if c.rows[row].state != READY:
            continue
        other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
        while other >= 0 and (c.rows[other].state != REPLICA or not stays(c, other)):
            other = np.int64(c.rows[other].same)
        if other >= 0:
            set_role(c, other, READY)
            _succeed(c, other)
            promoted[size_class_of(c, other)] += 1


@kernel(C, INT, INT, INT, ROWS, INT)
def held_sole_copies(c, base, slots, tier, out, n):  # type: ignore[no-untyped-def]
    """As `sole_copies`, of a slab's primaries that are in no list since somebody holds them."""
    for row in range(base, base + slots):
        if n < len(out) and c.rows[row].state == READY and not listed(c, row) and _is_sole_copy(c, row, tier):
            out[n] = row
            n += 1
    return n


@kernel(C, INT, INT, INT)
def count_sole_copies(c, base, slots, tier):  # type: ignore[no-untyped-def]
    """As `sole_copies`, how many of a slab there are, with those that are still being written."""
    n = 0
    for row in range(base, base + slots):
        state = c.rows[row].state
        if (state == READY) | (state == WRITING):
            n += _is_sole_copy(c, row, tier)
    return n


@kernel(C, INT, INT, ROWS, INT)
def sole_copies(c, size_class, tier, out, n):  # type: ignore[no-untyped-def]
    """Append the size class's primaries that are on no other node that stays, youngest first, to out[n:]; the new n.

    below: index of a tier that outlives the node, -1 if there is none.
    """
    oldest(c, size_class)  # what is held at the old end is in no list, whether or not an eviction met it
    row = np.int64(c.lists[size_class * LISTS_PER_CLASS + 1].head)
    while row >= 0 and n < len(out):
        if _is_sole_copy(c, row, tier):
            out[n] = row
            n += 1
        row = np.int64(c.rows[row].next)
    return n


@kernel(C, ROWS, ROWS, ROWS)
def pin_lasting(c, firsts, rows, gens):  # type: ignore[no-untyped-def]
    """Pin the copy of each key that is to stay: rows[i], -1 where there is none, and gens[i]."""
    for i in range(len(firsts)):
        row = rows[i] = _lasting(c, firsts[i])
        if row >= 0:
            pin(c, row)
            gens[i] = c.rows[row].gen


@kernel
def _lasting(c, first):  # type: ignore[no-untyped-def]
    """Of a key's rows the one to keep: what lies below, whose copy in memory may go, else its primary, else -1."""
    found = np.int64(-1)
    row = np.int64(first)
    while row >= 0:
        state = c.rows[row].state
        if c.rows[row].pins < PINS_MAX and (state == EXTERNAL or (state == READY and found < 0)):
            found = row
        row = np.int64(c.rows[row].same)
    return found


@kernel(C, ROWS, ROWS)
def copies(c, firsts, out):  # type: ignore[no-untyped-def]
    """Rows of keys, to out as far as it goes. Returns how many there are."""
    n = 0
    for first in firsts:
        row = np.int64(first)
        while row >= 0:
            if n < len(out):
                out[n] = row
            n += 1
            row = np.int64(c.rows[row].same)
    return n


@kernel
def _is_sole_copy(c, row, tier):  # type: ignore[no-untyped-def]
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0:
        state = c.rows[other].state
        if (present(state) and stays(c, other)) or (state == EXTERNAL and node_of(c, other) == tier):
            return False
        other = np.int64(c.rows[other].same)
    return True


@kernel(C, ROWS, ROWS, ROWS, ROWS)
def release(c, source, source_gens, staged, staged_gens):  # type: ignore[no-untyped-def]
    """End a hold, last block first. A row whose generation changed was taken away meanwhile."""
    warm = warm_neighbours(c, source)
    for j in range(len(source)):
        i = len(source) - 1 - j
        row = np.int64(source[i])
        _release_row(c, row, source_gens[i])
        if row >= 0 and c.rows[row].state == REPLICA and c.rows[row].gen == source_gens[i]:
            touch_primary(c, row)  # reading a replica keeps the key, and age is judged by the primary
        if i < len(staged):
            _release_row(c, np.int64(staged[i]), staged_gens[i])
    return warm


@kernel
def touch_primary(c, row):  # type: ignore[no-untyped-def]
    """Touch the primary of a replica's key, unless somebody holds it: then that is done when it is let go."""
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0:
        if c.rows[other].state == READY and c.rows[other].pins == 0:
            touch(c, other)
        other = np.int64(c.rows[other].same)


@kernel
def _release_row(c, row, gen):  # type: ignore[no-untyped-def]
    if row >= 0 and c.rows[row].gen == gen and c.rows[row].state != QUARANTINED:
        unpin(c, row)


@kernel(C, ROWS, ROWS)
def abandon(c, rows, gens):  # type: ignore[no-untyped-def]
    """Their holder is gone and may still write: rows it alone held that are not finished, or were forgotten before
    they were, go to quarantine. Nobody who holds a row of a tier writes there, and nobody would sweep it."""
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row >= 0 and c.rows[row].gen == gens[i] and c.rows[row].pins == 1:
            if unfinished(c.rows[row].state):
                quarantine(c, row)
            elif c.rows[row].state == DROPPED and not node_of(c, row) & 1:
                suspend(c, row)
