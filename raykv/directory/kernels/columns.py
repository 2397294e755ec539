"""The directory's columns: the formats of rows, lists, size classes and slabs, and the argument types of kernels.

Each *row* describes one slot of one node. While the slot holds a block, the row also describes this copy of the block.
The rows of a slab are consecutive, so that locations of rows need not be stored.
"""

from typing import NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from raykv.protocol.location import LOCATION

# States of a row that becomes a primary: FREE -> WRITING -> READY -> (evicted) WRITING ... States of a replica: FREE ->
# STAGING -> REPLICA -> ... States in an external tier: FREE -> DEMOTING -> EXTERNAL -> (evicted) DEMOTING ...
FREE, WRITING, READY, REPLICA, STAGING, QUARANTINED, DROPPED, DEMOTING, EXTERNAL, CLOSED = range(10)
IN_MEMORY = 1 << READY | 1 << REPLICA  # as bits, for `lists.first_in`
STATES = ("free", "writing", "ready", "replica", "staging", "quarantined", "dropped", "demoting", "external")
# QUARANTINED: somebody may still write into the slot, until a node store has found the slot's write lock free.
# DROPPED: the block was forgotten, but somebody still holds the slot. CLOSED: the row belongs to no slab.

PAGE_BITS = 6  # rows are handed to slabs in pages of 64
HOLDS_MAX = 65535
# To whom the directory offers a size class. NOT_OFFERED: nobody. TO_READERS: readers of a tier or of a leaving node.
# TO_OWN: readers, and writers of the same GPU. TO_ALL: all readers and writers.
NOT_OFFERED, TO_READERS, TO_OWN, TO_ALL = range(4)
NODE_BITS = 20  # low bits of an index, which count nodes and tiers; the high bits are the epoch: no index is reused
NODE_MASK = (1 << NODE_BITS) - 1
NOWHERE = -2  # `prev` of a row that is not in a list
UNSTAGED = -2  # in `Blocks.staged`: the block is on another node, and has no staging row yet

# The comment of a column says which kernels write it; tests/directory/test_columns.py checks this.
ROW = np.dtype(
    [
        ("k0", "<u8"),  # written by lists
        ("k1", "<u8"),  # written by lists
        ("gen", "<i8"),  # written by lists, slabs
        ("last", "<i8"),  # tick of the last touch; written by lists, slabs, eviction, chains
        ("prev", "<i4"),  # next younger row of the list, or NOWHERE; written by lists
        ("next", "<i4"),  # next older row of the list; written by lists
        ("same", "<i4"),  # next row of the same key; written by table
        ("holds", "<u2"),  # number of leases, reservations, pins and demotions that hold the row; written by lists
        ("state", "u1"),  # written by lists
        ("uses", "u1"),  # matches since the block was stored; written by lists, leases, demotion
    ]
)
# All rows from the old end up to `clean_tail` are clean; -1: no row is clean. clean_count: number of clean rows.
# Evicting a clean row loses nothing: its block is in the external tier, is being demoted, or is not wanted there.
# done: youngest row that `eviction.done` put at the old end, or -1. late: like `done`, but only among rows with a late
# user and rows that nobody will ask for again. kept: evictions pass over the rows from the old end up to this row, as
# these rows are kept or held (`eviction.keep`); -1: no rows. kept_count: number of these rows. passes: number of
# evictions that passed over these rows since `eviction` last made the rows younger.
LIST = np.dtype(
    [
        *(("head", "<i4"), ("tail", "<i4"), ("count", "<i8")),  # written by lists
        *(("clean_tail", "<i8"), ("clean_count", "<i8")),  # written by lists, eviction, demotion
        ("done", "<i8"),  # written by lists, eviction
        ("late", "<i8"),  # written by lists, eviction
        *(("kept", "<i4"), ("kept_count", "<i4"), ("passes", "<i8")),  # written by lists, eviction
    ]
)
SIZE_CLASS = np.dtype(  # the slots of one size on one node
    [
        *(("node", "<i4"), ("offered", "<i4"), ("window", "<i8")),  # written by no kernel
        ("staging", "<i8"),  # written by lists
        ("quarantined", "<i8"),  # written by lists, slabs
        ("evicted", "<i8"),  # written by eviction, demotion
        ("charge", "<i8"),  # bytes that a primary's tenant pays for: 0 on a GPU and in a tier; written by no kernel
    ]
)
TENANT = np.dtype(
    [
        ("used", "<i8"),  # bytes; written by lists
        *(("minimum", "<i8"), ("maximum", "<i8")),  # bytes; written by no kernel
        ("evicted", "<i8"),  # blocks; written by eviction
    ]
)
TENANTS_MAX = 16  # including tenant 0, which stands for all tenants without a quota
NO_LIMIT = 1 << 62  # bytes
# Written by no kernel
SLAB = np.dtype([("base", "<i8"), ("slots", "<i8"), ("size_class", "<i4"), ("number", "<i4"), ("gen", "<i8")])
FREE_LIST, REPLICA_LIST, READY_LISTS = range(3)  # READY_LISTS + tenant: the tenant's READY (or EXTERNAL) rows
LISTS_PER_CLASS = READY_LISTS + TENANTS_MAX
HEAP = np.dtype([("tick", "<i8"), ("size_class", "<i8")])

CLOCK, COUNTER, EPOCH, ENTRIES, TENANTS, TIERED, SECOND, LAST_KEPT = range(8)  # indices in Columns.state
FIRST_TICK = 1 << 52  # small enough that floats distinguish all idle times
# `eviction.done` and `end_late` set a row's tick near FIRST_TICK minus AGAIN (the user will ask for the block again),
# OVERDUE (the user is late) or FOR_GOOD (nobody will ask). Each number is more than twice the previous number, since a
# writer may evict a block of its own node although a block of another node is twice as old.
AGAIN, OVERDUE, FOR_GOOD = 1 << 47, 1 << 49, 1 << 51
WAITING = FIRST_TICK - AGAIN
IN_USE = FIRST_TICK - AGAIN // 2  # rows in use have ticks above this
IN_TIME = FIRST_TICK - (AGAIN + OVERDUE) // 2  # rows whose user is late or will not ask have ticks below this
NEEDED = FIRST_TICK - (OVERDUE + FOR_GOOD) // 2  # rows that nobody will ask for again have ticks below this


class Columns(NamedTuple):
    """All state that kernels access."""

    rows: NDArray[np.void]  # ROW
    # Tenant that pays for the key of each row. Not used while there is only one tenant; written by lists, table
    tenants: NDArray[np.uint8]
    # Second until which each row is kept. Not used once LAST_KEPT is over; written by lists
    kept_until: NDArray[np.uint32]
    table: NDArray[np.int64]  # tag << 32 | row + 1, or 0; written by table
    lists: NDArray[np.void]  # LIST, LISTS_PER_CLASS entries for each size class
    size_classes: NDArray[np.void]  # SIZE_CLASS
    slabs: NDArray[np.void]  # SLAB
    pages: NDArray[np.int32]  # slab of each page of rows; written by no kernel
    grid: NDArray[np.int32]  # slab of (node, number of the slab there), or -1; written by no kernel
    quotas: NDArray[np.void]  # TENANT, an entry for each tenant
    # CLOCK, COUNTER, EPOCH, ENTRIES, TENANTS (number of tenants), TIERED (whether there was ever an external tier),
    # SECOND (of the caller's clock), LAST_KEPT (the highest second in `kept_until`)
    state: NDArray[np.int64]  # written by lists, table, eviction


class Blocks(NamedTuple):
    """The rows that a lease or reservation holds: each field is (n,) int64, with an entry for each key."""

    source: NDArray[np.int64]  # the row to read, or to write; negative: none
    gens: NDArray[np.int64]  # generation of the `source` row
    staged: NDArray[np.int64]  # the row on the holder's node to pull the block into, or push it from; negative: none
    staged_gens: NDArray[np.int64]  # generation of the `staged` row

    def part(self, of: slice) -> "Blocks":
        """Return views of a slice of the entries."""
        return Blocks(*[rows[of] for rows in self])

    def first(self, n: int) -> "Blocks":
        """Return copies of the first n entries. Views would keep all entries in memory."""
        return Blocks(*[rows[:n].copy() for rows in self])


class Places(NamedTuple):
    """Output: the locations of blocks. Both arrays are (n,) LOCATION."""

    locations: NDArray[np.void]  # locations of `source` in Blocks
    staged_locations: NDArray[np.void]  # locations of `staged` in Blocks


class Reader(NamedTuple):
    """The reader of a match. `node`, `size_class` and `host` are -1 if the reader has none."""

    node: int  # index of its node
    size_class: int  # size class on that node for blocks of this size; -1 if no store there can pull such blocks
    limit: int  # maximum number of blocks that get a staging slot
    host: int  # index of the node that the reader's GPU belongs to
    block_bytes: int
    tenant: int
    long: int  # minimum number of blocks of a long read: see chains.py


class Writer(NamedTuple):
    """The writer to which slots are granted."""

    start: int  # index of the first key to write; the keys before this key are its parents
    size_class: int  # size class of its node
    others: NDArray[np.int64]  # (m,) size classes of this slot size, in the order in which they are tried
    heaps: NDArray[np.void]  # (tenants, size classes of this slot size) HEAP: see `eviction.coldest`
    locality: float  # see `eviction.victim`
    size: int  # bytes of a slot
    block_bytes: int
    tenant: int


class Goal(NamedTuple):
    """The share of a size class's slots that must be free, or hold a clean block or a replica."""

    size_class: int
    slots: int  # number of the size class's slots
    share: float


class Chosen(NamedTuple):
    """Output: the blocks that are demoted to an external tier."""

    source: NDArray[np.int64]  # (n,) the row in memory. Nobody holds this row: the copier checks its generation instead
    target: NDArray[np.int64]  # (n,) the DEMOTING row
    evicted: NDArray[np.uint64]  # (n, 2) keys evicted from the tier


# Argument types of kernels that Python calls. A read-only type accepts any array. Values in a tuple are not converted:
# numbers must be Python numbers, and arrays must be writable. Calls for clients pass plain tuples, and the kernel makes
# the NamedTuple. If a call passed the NamedTuple, numba would read all field names, which takes 1.5 us.
INT, FLOAT, BOOL = types.int64, types.float64, types.boolean
ROWS = types.Array(types.int64, 1, "C")  # numbers of rows, generations, counts
KEYS = types.Array(types.uint64, 2, "C", readonly=True)
KEYS_OUT = types.Array(types.uint64, 2, "C")
INDICES_OUT = types.Array(types.int32, 1, "C")
FLAGS = types.Array(types.uint8, 1, "C", readonly=True)
MASK = types.Array(types.bool_, 1, "C")
LOCATIONS_OUT = numba.typeof(np.zeros(0, LOCATION))
LOCATIONS = LOCATIONS_OUT.copy(readonly=True)
BLOCKS, PLACES, READER = types.UniTuple(ROWS, 4), types.UniTuple(LOCATIONS_OUT, 2), types.UniTuple(INT, 7)
HEAPS = numba.typeof(np.zeros((0, 0), HEAP))
WRITER = types.Tuple((INT, INT, ROWS, HEAPS, FLOAT, INT, INT, INT))
GOAL = types.NamedTuple((INT, INT, FLOAT), Goal)
CHOSEN = types.NamedTuple((ROWS, ROWS, KEYS_OUT), Chosen)
C = numba.typeof(
    Columns(
        rows=np.zeros(0, ROW),
        tenants=np.zeros(0, np.uint8),
        kept_until=np.zeros(0, np.uint32),
        table=np.zeros(0, np.int64),
        lists=np.zeros(0, LIST),
        size_classes=np.zeros(0, SIZE_CLASS),
        slabs=np.zeros(0, SLAB),
        pages=np.zeros(0, np.int32),
        grid=np.zeros((0, 0), np.int32),
        quotas=np.zeros(0, TENANT),
        state=np.zeros(0, np.int64),
    )
)
