"""The holds of clients: leases of readers, the staging slots that readers pull into, pins, and the end of a hold.

`state/holds.py: Clients` ends holds that a call does not list any more. `calls/upkeep.py: check` ends the holds of
clients that made no call for CLIENT_TTL_S, and leases that nobody used for UNUSED_S.

A row may be held by a reader's lease, a writer's reservation (see placement.py), a pin or a demotion.
"""

import numpy as np

from raykv.config import USES_MAX
from raykv.directory.kernels.chains import arrives_elsewhere, copies_elsewhere, in_chains, is_crowded
from raykv.directory.kernels.columns import (
    BLOCKS,
    BOOL,
    DROPPED,
    EXTERNAL,
    HOLDS_MAX,
    INT,
    KEYS,
    PLACES,
    QUARANTINED,
    READER,
    READY,
    REPLICA,
    ROWS,
    STAGING,
    TENANTS,
    TO_OWN,
    TO_READERS,
    UNSTAGED,
    WRITING,
    Blocks,
    C,
    Places,
    Reader,
)
from raykv.directory.kernels.eviction import keep_maximum
from raykv.directory.kernels.lists import (
    claim,
    finish,
    hold,
    is_tier_row,
    node_of,
    quarantine,
    set_role,
    size_class_of,
    stays,
    stored,
    suspend,
    touch,
    unfinished,
    unhold,
    warm_neighbours,
)
from raykv.directory.kernels.lookup import best
from raykv.directory.kernels.quotas import tenant_of
from raykv.directory.kernels.slabs import locate
from raykv.directory.kernels.slots import stage, takeable
from raykv.directory.kernels.table import find, first_of, first_row
from raykv.system.jit import kernel


@kernel
def _staging_need(c, firsts, reader):
    """Count the staging slots that a reader needs for a ready prefix, within the window; 0 if enough slots are free."""
    if reader.size_class < 0:
        return np.int64(0)
    own = c.size_classes[reader.size_class]
    left = min(reader.limit, own.window - own.staging)
    at_hand = takeable(c, reader.size_class)
    need = np.int64(0)
    if at_hand >= min(np.int64(len(firsts)), left):
        return need
    for first in firsts:
        row, staging = best(c, first, reader.node)
        if row < 0 or need == left:
            break
        if node_of(c, row) != reader.node and staging < 0:
            need += 1
    return need if at_hand < need else np.int64(0)


@kernel(C, KEYS, ROWS, READER, BLOCKS, PLACES, BOOL)
def match(c, keys, firsts, reader, blocks, places, found):
    """Hold the longest ready prefix, and write its blocks' locations to `places`.

    blocks, out: see `_hold_prefix`. places, out: the locations of `blocks`. found: whether `find` has filled `firsts`.
    Returns the number of blocks in total, outside the reader's memory, in external tiers, and on the reader's `host`.
    If `found` is False and the prefix needs more staging slots than are free, nothing is held. Then the first number is
    minus the number of needed slots.
    """
    reader, blocks, places = Reader(*reader), Blocks(*blocks), Places(*places)
    if not found:
        find(c, keys, firsts)
        need = _staging_need(c, firsts, reader)
        if need > 0:
            return -need, 0, 0, 0
    source, staged = blocks.source, blocks.staged
    n, remote = _hold_prefix(c, keys, firsts, reader, blocks)
    external, promoted = 0, 0
    for i in range(n):
        blocks.gens[i] = locate(c, source[i], reader.block_bytes, places.locations, i)
        external += is_tier_row(c, source[i])
        promoted += node_of(c, source[i]) == reader.host
        blocks.staged_gens[i] = locate(c, staged[i], reader.block_bytes, places.staged_locations, i)
        if staged[i] == UNSTAGED:
            places.staged_locations[i].node = reader.node
    return n, remote, external, promoted


@kernel
def _hold_prefix(c, keys, firsts, reader, blocks):
    """Hold the longest ready prefix, and charge it to the reader's tenant.

    firsts: the keys' first rows, from `find`. blocks, out: all fields except `gens`. staged[i] is -1 if block i is on
    the reader's node already. staged[i] is UNSTAGED if `limit` earlier blocks have a slot, or if the window is used up.
    Then `next_window` gives block i a slot later. Returns (number of blocks, number outside the reader's memory).
    """
    source, staged = blocks.source, blocks.staged
    n, remote = 0, 0
    while n < len(keys):
        row, staging = best(c, firsts[n], reader.node)
        if row < 0:
            break
        hold(c, row)  # hold all rows before the first staging, which may evict replicas
        _count_use(c, firsts[n])
        if c.state[TENANTS] > 1:
            claim(c, firsts[n], reader.tenant)
        source[n] = row
        staged[n] = -1
        if node_of(c, row) != reader.node:
            remote += 1
            staged[n] = staging if staging >= 0 else UNSTAGED
            if staging >= 0:
                hold(c, staging)
                blocks.staged_gens[n] = c.rows[staging].gen
        n += 1
    limit = reader.limit
    if remote > limit and n >= reader.long and arrives_elsewhere(c, firsts, n, reader, blocks):
        limit = np.int64(0)  # the reader joins a chain: `next_window` gives it slots in its turn
    covered = _cover(c, keys, n, limit, reader.size_class, blocks)
    if covered < n and reader.size_class >= 0:  # replicas of a long prefix must not fill the window
        moved = _read_elsewhere(c, firsts, covered, n, reader.node, blocks)
        remote += moved
        if moved > 0:
            covered = _cover(c, keys, n, limit, reader.size_class, blocks)
    if covered < n and reader.size_class < 0:  # the reader has no memory to pull blocks into
        for j in range(n - covered):
            i = n - 1 - j
            remote -= staged[i] != -1
            unhold(c, source[i])
            if staged[i] >= 0:
                unhold(c, staged[i])
        n = covered
    return n, remote


@kernel
def _count_use(c, first):
    """Count a match in every row of a key, as later decisions may look at the count of any of these rows."""
    row = np.int64(first)
    while row >= 0:
        c.rows[row].uses = min(USES_MAX, c.rows[row].uses + 1)
        row = np.int64(c.rows[row].same)


@kernel
def _read_elsewhere(c, firsts, covered, n, node, blocks):
    """Release replicas on the reader's node, and read their primaries on other nodes instead.

    Otherwise, held replicas could fill the staging window. Replaces replicas of blocks[covered:n], last to first.
    Returns the number of replaced replicas. If a released replica still exists later, `next_window` uses it.
    """
    moved = 0
    for j in range(n - covered):
        i = n - 1 - j
        row = np.int64(blocks.source[i])
        if c.rows[row].state != REPLICA or node_of(c, row) != node:
            continue
        other = _primary_elsewhere(c, np.int64(firsts[i]), node)
        if other >= 0:
            hold(c, other)
            unhold(c, row)
            blocks.source[i] = other
            blocks.staged[i] = UNSTAGED
            moved += 1
    return moved


@kernel
def _primary_elsewhere(c, first, node):
    """Return the row of a key's primary on a node other than `node`, or -1. first: the key's first row."""
    while first >= 0 and not (_readable(c, first) and node_of(c, first) != node):
        first = np.int64(c.rows[first].same)
    return first


@kernel(C, KEYS, BLOCKS, INT)
def pass_by(c, keys, blocks, node):
    """Release the replicas that the reader of a lease has passed, and hold their primaries instead.

    Otherwise, held replicas could fill a staging window that this lease or another lease waits for. Releases the last
    replica first. Returns the number of released replicas.
    """
    blocks, moved = Blocks(*blocks), 0
    source, gens = blocks.source, blocks.gens
    for j in range(len(source)):
        i = len(source) - 1 - j
        row = np.int64(source[i])
        if row < 0 or c.rows[row].gen != gens[i]:
            source[i] = -1  # the block is gone
            continue
        if c.rows[row].state != REPLICA:  # checked first: a look-up in the hash table costs 50 times as much
            continue
        other = _primary_elsewhere(c, first_row(c, keys[i, 0], keys[i, 1]), node)
        if other >= 0:
            hold(c, other)
            unhold(c, row)
            source[i], gens[i], blocks.staged[i] = other, c.rows[other].gen, UNSTAGED
            moved += 1
    return moved


@kernel
def _readable(c, row):
    """Whether a row is a primary that readers may read."""
    offered = c.size_classes[size_class_of(c, row)].offered
    return c.rows[row].state == READY and c.rows[row].holds < HOLDS_MAX and offered


@kernel
def _cover(c, keys, n, limit, size_class, blocks):
    """Give UNSTAGED blocks[:n] staging slots, in order, until `limit` blocks have a slot or the window is used up.

    Returns how many leading blocks can be read now. Later blocks have no staging slot.
    """
    staged, granted = blocks.staged, 0
    for i in range(n):
        full = staged[i] == UNSTAGED and granted >= limit
        if full or (staged[i] == UNSTAGED and not _stage_next(c, keys, i, n, size_class, blocks)):
            _give_back(c, i + 1, n, blocks)
            return i
        granted += staged[i] >= 0
    return n


@kernel
def _stage_next(c, keys, i, n, size_class, blocks):
    """Give block i of n a staging slot. If the window is used up, release the slots of later blocks first.

    Blocks are read in order. So a block that waited for the slots of later blocks would wait for ever. Returns whether
    block i has a slot.
    """
    row = stage(c, size_class, keys[i, 0], keys[i, 1])
    if row < 0 and _give_back(c, i + 1, n, blocks):
        row = stage(c, size_class, keys[i, 0], keys[i, 1])
    if row < 0:
        return False
    blocks.staged[i], blocks.staged_gens[i] = row, c.rows[row].gen
    return True


@kernel
def _give_back(c, first, n, blocks):
    """Release the staging slots of blocks[first:n], last to first. Returns whether any block had a slot."""
    staged, any_staged = blocks.staged, False
    for j in range(n - first):
        i = n - 1 - j
        if staged[i] >= 0:
            _release_row(c, np.int64(staged[i]), blocks.staged_gens[i])
            staged[i] = UNSTAGED
            any_staged = True
    return any_staged


@kernel(C, KEYS, BLOCKS, INT, INT, INT)
def next_window(c, keys, blocks, node, size_class, turn):
    """Give UNSTAGED blocks of a lease staging slots, in order, until the window is used up.

    A block that has a copy on the reader's node by now gets the slot of that copy. After the first block that gets no
    slot, no block has a staging slot. Returns (number of leading blocks that still exist, whether the reader waits for
    a copy). turn: maximum number of blocks that get slots if the reader is in a chain (see chains.py); 0: no chain.
    """
    blocks, full, waits, granted = Blocks(*blocks), False, False, np.int64(0)
    chained = turn > 0 and in_chains(c, size_class)
    source, staged, staged_gens = blocks.source, blocks.staged, blocks.staged_gens
    for i in range(len(source)):
        row = np.int64(source[i])
        if row < 0 or c.rows[row].gen != blocks.gens[i]:
            row = _hold_elsewhere(c, keys, i, node, blocks) if staged[i] != -1 else np.int64(-1)
        if row < 0 or not stored(c.rows[row].state):
            return i, waits
        if staged[i] >= 0 and c.rows[np.int64(staged[i])].gen != staged_gens[i]:
            return i, waits  # the staging slot has been given to another block
        if staged[i] == -1 and node_of(c, row) != node:
            return i, waits  # the reader's node is gone, and the source with it
        if full or staged[i] != UNSTAGED:
            continue  # the block is on the reader's node, or has a slot already
        first = first_row(c, keys[i, 0], keys[i, 1])
        there, staging = best(c, first, node)
        if there >= 0 and node_of(c, there) == node:
            hold(c, there)
            staged[i], staged_gens[i] = there, c.rows[there].gen
        elif staging >= 0:
            hold(c, staging)
            staged[i], staged_gens[i] = staging, c.rows[staging].gen
        elif chained and is_crowded(c, row):
            newest, waits = copies_elsewhere(c, first, node)
            if waits or granted == turn:
                full = True
                _give_back(c, i + 1, len(source), blocks)
                continue
            full = not _stage_next(c, keys, i, len(source), size_class, blocks)
            if not full and newest >= 0 and newest != row:
                hold(c, newest)
                unhold(c, row)
                source[i], blocks.gens[i] = newest, c.rows[newest].gen
            granted += 1
        else:
            full = not _stage_next(c, keys, i, len(source), size_class, blocks)
    return len(source), waits


@kernel
def _hold_elsewhere(c, keys, i, node, blocks):
    """Hold a copy of block i on another node, as the source is gone. Returns the copy's row; -1 if there is none."""
    row = copies_elsewhere(c, first_row(c, keys[i, 0], keys[i, 1]), node)[0]
    if row >= 0:
        hold(c, row)
        blocks.source[i], blocks.gens[i] = row, c.rows[row].gen
    return row


@kernel(C, INT, ROWS)
def staging_lack(c, size_class, staged):
    """Return how many staging slots a lease's UNSTAGED blocks need, within the window; 0 if enough are free."""
    need = np.int64(0)
    for row in staged:
        need += row == UNSTAGED
    need = min(need, c.size_classes[size_class].window - c.size_classes[size_class].staging)
    return need if takeable(c, size_class) < need else np.int64(0)


@kernel(C, ROWS, ROWS, ROWS)
def pulled(c, rows, gens, promoted):
    """Turn pulled STAGING rows into replicas, or into primaries where the key has no lasting primary (`has_primary`).

    promoted[size_class], in and out: counts new primaries. Each new primary keeps its slot of the staging window.
    """
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row >= 0 and c.rows[row].gen == gens[i] and c.rows[row].state == STAGING:
            size_class = size_class_of(c, row)
            finish(c, row, REPLICA if has_primary(c, row) else READY)
            if c.rows[row].state == READY:
                _succeed(c, row)
                promoted[size_class] += 1
                keep_maximum(c, tenant_of(c, row), size_class)


@kernel
def has_primary(c, row):
    """Whether a row's key has a lasting primary or a WRITING row. If the row is `fleeting`, any primary counts."""
    row_is_fleeting = fleeting(c, row)
    other = first_of(c, row)
    while other >= 0:
        state = c.rows[other].state
        if state == WRITING or (state == READY and (row_is_fleeting or not fleeting(c, other))):
            return True
        other = np.int64(c.rows[other].same)
    return False


@kernel
def fleeting(c, row):
    """Whether a row is on a GPU, or on a node that is about to leave. Its block needs a copy elsewhere to last."""
    offered = c.size_classes[size_class_of(c, row)].offered
    return TO_READERS <= offered <= TO_OWN


@kernel
def _succeed(c, row):
    """Make `row` its key's only primary: turn the key's other primaries, which are fleeting, into replicas."""
    other = first_of(c, row)
    while other >= 0:
        if other != row and c.rows[other].state == READY:
            c.rows[row].uses = max(c.rows[row].uses, c.rows[other].uses)
            set_role(c, other, REPLICA)
        other = np.int64(c.rows[other].same)


@kernel(C, INT, INT, ROWS)
def promote_replicas(c, base, slots, promoted):
    """For each primary in a slab of a leaving node or GPU, make a replica on a staying node the new primary, if any.

    promoted: see `pulled`.
    """
    for row in range(base, base + slots):
        if c.rows[row].state != READY:
            continue
        other = first_of(c, row)
        while other >= 0 and (c.rows[other].state != REPLICA or not stays(c, other)):
            other = np.int64(c.rows[other].same)
        if other >= 0:
            set_role(c, other, READY)
            _succeed(c, other)
            promoted[size_class_of(c, other)] += 1


@kernel(C, ROWS, ROWS, ROWS)
def hold_lasting(c, firsts, rows, gens):
    """Hold the lasting copy of each key (`_lasting`). rows[i], gens[i], out: the copy's row (or -1) and generation."""
    for i in range(len(firsts)):
        row = rows[i] = _lasting(c, firsts[i])
        if row >= 0:
            hold(c, row)
            gens[i] = c.rows[row].gen


@kernel
def _lasting(c, first):
    """Return the row of a key's lasting copy: the copy in an external tier, else the primary, else -1."""
    lasting = np.int64(-1)
    row = np.int64(first)
    while row >= 0:
        state = c.rows[row].state
        if c.rows[row].holds < HOLDS_MAX and (state == EXTERNAL or (state == READY and lasting < 0)):
            lasting = row
        row = np.int64(c.rows[row].same)
    return lasting


@kernel(C, ROWS, ROWS)
def copies(c, firsts, out):
    """Write all rows of the keys to `out`, until `out` is full. Returns the number of all these rows."""
    n = 0
    for first in firsts:
        row = np.int64(first)
        while row >= 0:
            if n < len(out):
                out[n] = row
            n += 1
            row = np.int64(c.rows[row].same)
    return n


@kernel(C, ROWS, ROWS, ROWS, ROWS)
def release(c, source, gens, staged, staged_gens):
    """End a lease or reservation, last block first. Skips rows whose generation changed: they hold other blocks."""
    warm = warm_neighbours(c, source)
    for j in range(len(source)):
        i = len(source) - 1 - j
        row = np.int64(source[i])
        _release_row(c, row, gens[i])
        if row >= 0 and c.rows[row].state == REPLICA and c.rows[row].gen == gens[i]:
            touch_primary(c, row)  # a read of a replica is a use of the key, and the primary has the key's age
        if i < len(staged):
            _release_row(c, np.int64(staged[i]), staged_gens[i])
    return warm


@kernel
def touch_primary(c, row):
    """Mark the primary of a replica's key as used now. A held primary is marked when its last hold ends."""
    other = first_of(c, row)
    while other >= 0:
        if c.rows[other].state == READY and c.rows[other].holds == 0:
            touch(c, other)
        other = np.int64(c.rows[other].same)


@kernel
def _release_row(c, row, gen):
    if row >= 0 and c.rows[row].gen == gen and c.rows[row].state != QUARANTINED:
        unhold(c, row)


@kernel(C, ROWS, ROWS)
def abandon(c, rows, gens):
    """Quarantine the rows into which a lost client may still write.

    These are rows that only this client held, and that are unfinished or were forgotten. Skips rows of external tiers,
    as no client writes there and no node store would sweep such rows.
    """
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row >= 0 and c.rows[row].gen == gens[i] and c.rows[row].holds == 1:
            if unfinished(c.rows[row].state):
                quarantine(c, row)
            elif c.rows[row].state == DROPPED and not is_tier_row(c, row):
                suspend(c, row)
