"""Opens, closes, empties and counts the rows of whole slabs. Processes node stores' reports on single slots.

`describe` converts rows to locations, for messages. `rows_of` converts locations to rows.
"""

import numpy as np

from raykv.directory.kernels.columns import (
    BOOL,
    CLOSED,
    DEMOTING,
    FLAGS,
    FREE,
    INT,
    KEYS,
    LOCATIONS,
    LOCATIONS_OUT,
    NODE_MASK,
    PAGE_BITS,
    QUARANTINED,
    READY,
    REPLICA,
    ROWS,
    C,
)
from raykv.directory.kernels.lists import (
    close,
    drop_or_free,
    fill,
    forget,
    free,
    link_old,
    list_of,
    size_class_of,
    stored,
    suspend,
    taken,
    touch,
    unfinished,
    unlink,
    withdraw,
)
from raykv.directory.kernels.table import delete, first_row, prefetch, prefetch_entry
from raykv.protocol.stores import FINISHED, STILL_WRITTEN
from raykv.system.jit import kernel

AHEAD = 16  # number of rows that are prefetched: about the number of cache misses that a core keeps in flight


@kernel(C, INT, INT)
def open_rows(c, base, slots):
    """Free the rows of a new slab, so that slot 0 is taken first."""
    for j in range(slots):
        row = base + slots - 1 - j
        c.rows[row].gen = 0
        free(c, row)


@kernel(C, INT, INT)
def close_rows(c, base, slots):
    """Remove a slab's rows, even held rows, from table and lists. A row's holders will see its changed generation."""
    for row in range(base, base + slots):
        ahead = row + AHEAD
        if ahead < base + slots and stored(c.rows[ahead].state):
            prefetch_entry(c, ahead)
            prefetch(c.rows, max(0, np.int64(c.rows[ahead].prev)))
            prefetch(c.rows, max(0, np.int64(c.rows[ahead].next)))
        if c.rows[row].state == FREE:
            unlink(c, list_of(c, row, FREE), row)
        elif c.rows[row].state == QUARANTINED:
            c.size_classes[size_class_of(c, row)].quarantined -= 1
        else:
            _take_out(c, row)
        close(c, row)


@kernel
def _take_out(c, row):
    """Take a row out of the table and its list if the row has a key. Returns whether the row had a key."""
    state = c.rows[row].state
    if stored(state):
        forget(c, row)
    elif unfinished(state):
        withdraw(c, row)
    elif state == DEMOTING:
        delete(c, row)
    else:
        return False
    return True


@kernel(C, INT, INT)
def clear_rows(c, base, slots):
    """Forget a slab's blocks. A held slot becomes free when it is released. Slot 0 is taken first again."""
    for j in range(slots):
        row = base + slots - 1 - j
        if _take_out(c, row):
            drop_or_free(c, row)


@kernel(C, INT, INT)
def retire(c, base, slots):
    """Close the unheld rows of a slab. Returns how many rows are left.

    Repeated calls empty a slab even if there is always a held row in it, as long as each hold ends eventually.
    """
    left = 0
    for row in range(base, base + slots):
        state = c.rows[row].state
        if c.rows[row].holds > 0 or state == QUARANTINED:
            left += 1
        elif state != CLOSED:
            if state == FREE:
                unlink(c, list_of(c, row, FREE), row)
            else:
                forget(c, row)
            close(c, row)
    return left


@kernel(C, INT, INT)
def reopen(c, base, slots):
    """Undo `retire`: free the closed rows."""
    for row in range(base, base + slots):
        if c.rows[row].state == CLOSED:
            free(c, row)


@kernel(C, INT, INT, ROWS)
def census(c, base, slots, counts):
    """Add the number of a slab's rows in each state to `counts`.

    Returns the tick of the slab's newest block (-1: no block), and whether any row is held, QUARANTINED or DEMOTING.
    """
    newest, held = np.int64(-1), False
    for row in range(base, base + slots):
        state = c.rows[row].state
        counts[state] += 1
        held |= c.rows[row].holds > 0 or state == QUARANTINED
        held |= state == DEMOTING
        if stored(state):
            newest = max(newest, c.rows[row].last)
    return newest, held


@kernel(C, ROWS, KEYS, ROWS, INT)
def adopt(c, rows, keys, gens, floor):
    """Adopt blocks found in free slots of a joining node, oldest first. The first copy of a key becomes the primary.

    A node reports its younger blocks first, so these blocks become older than all rows in the node's lists.
    floor: the tick of the oldest of these blocks, minus 1. rows, in and out: set to -1 where a block was not adopted.
    """
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if c.rows[row].state != FREE:
            rows[i] = -1
            continue
        unlink(c, list_of(c, row, FREE), row)
        role = REPLICA if taken(c, first_row(c, keys[i, 0], keys[i, 1])) else READY
        fill(c, row, keys[i, 0], keys[i, 1], gens[i], role)
        c.rows[row].last = floor + i + 1  # ticks of different nodes overlap, so the nodes' blocks are mixed by age
    for j in range(len(rows)):
        row = np.int64(rows[len(rows) - 1 - j])
        if row >= 0:
            link_old(c, list_of(c, row, c.rows[row].state), row)


@kernel(C, ROWS, ROWS)
def set_aside(c, rows, gens):
    """Quarantine free slots in which somebody was found writing."""
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row >= 0 and c.rows[row].state == FREE:
            unlink(c, list_of(c, row, FREE), row)
            c.rows[row].gen = gens[i]
            suspend(c, row)


@kernel(C, ROWS, ROWS, FLAGS, KEYS, ROWS, INT)
def sweep_result(c, rows, gens, verdicts, keys, found_gens, floor):
    """Free QUARANTINED rows whose verdict is FREED. Adopt blocks (keys[i], found_gens[i]) that are FINISHED.

    floor: generation up to which all blocks were cleared.
    """
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row < 0 or c.rows[row].state != QUARANTINED or c.rows[row].gen != gens[i]:
            continue
        if verdicts[i] == STILL_WRITTEN:
            continue
        c.size_classes[size_class_of(c, row)].quarantined -= 1
        if verdicts[i] == FINISHED and found_gens[i] > floor and not taken(c, first_row(c, keys[i, 0], keys[i, 1])):
            fill(c, row, keys[i, 0], keys[i, 1], found_gens[i], READY)
            touch(c, row)
        else:
            free(c, row)


@kernel(C, ROWS, ROWS, BOOL)
def drop(c, rows, gens, demoting):
    """Forget blocks that are stored and, if `demoting`, blocks that are being demoted. Returns how many were forgotten.

    A held slot becomes free when it is released.
    """
    dropped = 0
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row < 0 or c.rows[row].gen != gens[i]:
            continue
        if stored(c.rows[row].state):
            forget(c, row)
        elif demoting and c.rows[row].state == DEMOTING:
            delete(c, row)
        else:
            continue
        drop_or_free(c, row)
        dropped += 1
    return dropped


@kernel(C, INT, INT, INT, ROWS, INT)
def in_state(c, base, slots, state, out, count):
    """Append the slab's rows that are in `state` to out[count:]. Returns the new count."""
    for row in range(base, base + slots):
        if c.rows[row].state == state and count < len(out):
            out[count] = row
            count += 1
    return count


@kernel(C, ROWS, INT, LOCATIONS_OUT)
def describe(c, rows, block_bytes, out):
    """Set out[i] to the LOCATION of rows[i], or to zeros if rows[i] is negative."""
    for i in range(len(rows)):
        locate(c, np.int64(rows[i]), block_bytes, out, i)


@kernel
def locate(c, row, block_bytes, out, i):
    """Set out[i] to the LOCATION of a row, or to zeros if `row` is negative. Returns the row's generation, or 0."""
    if row < 0:
        out[i].node = out[i].slab = out[i].slot = out[i].bytes = 0
        out[i].slab_gen = out[i].gen = 0
        return np.int64(0)
    slab = c.pages[row >> PAGE_BITS]
    out[i].node = c.size_classes[c.slabs[slab].size_class].node
    out[i].slab = c.slabs[slab].number
    out[i].slot = row - c.slabs[slab].base
    out[i].bytes = block_bytes
    out[i].slab_gen = c.slabs[slab].gen
    out[i].gen = c.rows[row].gen
    return c.rows[row].gen


@kernel(C, LOCATIONS, ROWS)
def rows_of(c, locations, rows):
    """Set rows[i] to the row of locations[i], or to -1 if the slab is gone or was formatted anew."""
    for i in range(len(locations)):
        rows[i] = row_of(c, locations, i)


@kernel
def row_of(c, locations, i):
    """Return the row of locations[i], or -1 if the slab is gone or was formatted anew."""
    node, number = np.int64(locations[i].node) & NODE_MASK, np.int64(locations[i].slab)
    if node >= c.grid.shape[0] or number >= c.grid.shape[1]:
        return np.int64(-1)
    slab = c.grid[node, number]
    if slab < 0 or c.size_classes[c.slabs[slab].size_class].node != np.int64(locations[i].node):
        return np.int64(-1)
    if c.slabs[slab].gen != np.int64(locations[i].slab_gen) or locations[i].slot >= c.slabs[slab].slots:
        return np.int64(-1)
    return c.slabs[slab].base + np.int64(locations[i].slot)
