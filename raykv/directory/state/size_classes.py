"""Slabs, and their rows. A size class is the slots of one size on one node, or in one external tier.

SizeClasses owns the columns that the kernels work on. It grows the columns, gives rows to new slabs, and translates
locations in messages into rows and back. The Allocator and the TierCatalog decide which slab serves which size.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.directory.kernels import columns, eviction, lists, slabs, table
from raykv.directory.kernels import slots as free_slots
from raykv.directory.kernels.columns import (
    CLOCK,
    COUNTER,
    EPOCH,
    LAST_KEPT,
    LISTS_PER_CLASS,
    NODE_MASK,
    PAGE_BITS,
    TENANTS,
)
from raykv.directory.state.arrays import RowArray, zeros
from raykv.protocol.location import COUNTER_BITS, LOCATION, Locations


class Census(NamedTuple):
    """A summary of a slab's rows."""

    counts: NDArray[np.int64]  # by state
    newest: int  # tick of the last use of its newest block, -1 if there is none
    held: bool  # whether somebody holds, or may still write to, one of its slots


RESERVED_ROWS = 1 << 28  # number of rows for which addresses are reserved: 16 GiB of addresses


def _grown(array: NDArray[Any], length: int) -> NDArray[Any]:
    if length <= len(array):
        return array
    grown = np.zeros(max(length, len(array) + len(array) // 8), array.dtype)
    grown[: len(array)] = array
    return grown


def _pages(slots: int) -> int:
    return -(-slots // (1 << PAGE_BITS))


class SizeClasses:
    """All size classes of a pool, by number."""

    def __init__(self, epoch: int) -> None:
        self._reserved = zeros(RESERVED_ROWS, 64, columns.ROW)  # to grow in place, as copying would delay callers
        self._tenants = zeros(RESERVED_ROWS, 64, np.uint8)
        self._kept_until = zeros(RESERVED_ROWS, 64, np.uint32)
        self.c = columns.Columns(
            rows=self._reserved[:64],
            tenants=self._tenants[:64],
            kept_until=self._kept_until[:64],
            table=np.zeros(128, np.int64),
            lists=np.zeros(0, columns.LIST),
            size_classes=np.zeros(0, columns.SIZE_CLASS),
            slabs=np.zeros(0, columns.SLAB),
            pages=np.zeros(1, np.int32),
            grid=np.full((1, 1), -1, np.int32),
            quotas=np.zeros(columns.TENANTS_MAX, columns.TENANT),
            state=np.zeros(8, np.int64),
        )
        self.c.quotas["maximum"] = columns.NO_LIMIT
        self.c.state[CLOCK], self.c.state[EPOCH], self.c.state[TENANTS] = columns.FIRST_TICK, epoch, 1
        self.classes: dict[int, RowArray] = {}  # size classes by slot size
        self.heaps: dict[int, NDArray[np.void]] = {}  # for `eviction.coldest`, by slot size: a heap for each tenant
        self._class_count = 0
        self._slab_count = 0
        self._page_count = 0
        self._free_slabs: list[int] = []  # records of slabs that were closed
        self._free_pages: list[tuple[int, int]] = []  # runs of pages of closed slabs: first page, length

    def next_gen(self) -> int:
        """Return a generation higher than all earlier generations."""
        self.c.state[COUNTER] += 1
        return self.last_gen

    @property
    def last_gen(self) -> int:
        return int(self.c.state[EPOCH]) << COUNTER_BITS | int(self.c.state[COUNTER])

    @property
    def nbytes(self) -> int:
        """Bytes of all columns in use."""
        unused = self.c.tenants.nbytes if self.tenants == 1 else 0
        unused += 0 if self.c.state[LAST_KEPT] else self.c.kept_until.nbytes
        return sum(array.nbytes for array in self.c) - unused

    @property
    def tenants(self) -> int:
        """Number of tenants that are distinguished, including tenant 0."""
        return int(self.c.state[TENANTS])

    # ------------------------------------------------------------------ size classes

    def add(self, node: int, stride: int, window: int, offered: int, charge: int) -> int:
        """Make a size class for slots of `stride` bytes. Returns its number.

        window: maximum number of staging slots. charge: bytes that a primary's tenant pays for.
        """
        size_class = self.add_unlisted(node, window, offered, charge)
        self.classes[stride] = np.append(self.classes.get(stride, np.zeros(0, np.int64)), size_class)
        self._reset_heap(stride)
        return size_class

    def add_unlisted(self, node: int, window: int, offered: int, charge: int) -> int:
        """Like `add`, but writers get no slots there, and so evict nothing there."""
        size_class = self._class_count
        self._class_count += 1
        lists = _grown(self.c.lists, self._class_count * LISTS_PER_CLASS)
        lists[size_class * LISTS_PER_CLASS :][:LISTS_PER_CLASS] = (-1, -1, 0, -1, 0, -1, -1, -1, 0, 0)
        size_classes = _grown(self.c.size_classes, self._class_count)
        size_classes[size_class] = (node, offered, window, 0, 0, 0, charge)
        self.c = self.c._replace(lists=lists, size_classes=size_classes)
        return size_class

    def offer(self, size_class: int, stride: int, offered: int) -> None:
        """Set to whom a size class is offered: NOT_OFFERED, TO_READERS, TO_OWN or TO_ALL."""
        self.c.size_classes[size_class]["offered"] = offered
        self._reset_heap(stride)

    def resize_window(self, size_class: int, window: int) -> None:
        """Set the maximum number of staging slots. Present staging slots stay."""
        record = self.c.size_classes[size_class]
        record["window"] = max(window, record["staging"])

    def remove(self, size_class: int, stride: int) -> None:
        """Remove a size class whose node is gone, after all its slabs were closed."""
        self.classes[stride] = self.classes[stride][self.classes[stride] != size_class]
        self._reset_heap(stride)

    def reset_heaps(self) -> None:
        """Rebuild all heaps. Needed when the oldest primaries of size classes may have become older."""
        for stride in self.classes:
            self._reset_heap(stride)

    def _reset_heap(self, stride: int) -> None:
        heaps = np.zeros((self.tenants, len(self.classes[stride])), columns.HEAP)
        heaps["size_class"] = self.classes[stride]  # their ticks are 0, a lower bound: see `eviction.coldest`
        self.heaps[stride] = heaps

    # ------------------------------------------------------------------ tenants

    def set_tenants(self, count: int) -> None:
        """Distinguish `count` tenants. Tenants beyond the count must have no rows."""
        self.c.state[TENANTS] = count
        self.reset_heaps()

    def give_up(self, tenant: int) -> None:
        """Charge tenant 0 for all blocks of a tenant."""
        for size_classes in self.classes.values():
            for size_class in size_classes:
                lists.give_up_list(self.c, size_class, tenant)
        self.c.tenants[self.c.tenants == tenant] = 0
        for name in ("used", "evicted"):
            self.c.quotas[0][name] += self.c.quotas[tenant][name]
        self.c.quotas[tenant] = (0, 0, columns.NO_LIMIT, 0)

    def room(self, size_class: int) -> int:
        """Return how many slots writers can take without evicting; negative if the staging window lacks slots."""
        return int(free_slots.room(self.c, size_class))

    def takeable(self, size_class: int) -> int:
        """Return how many slots are free, or have a replica that nobody holds."""
        return int(free_slots.takeable(self.c, size_class))

    def end_late(self, after: int, before: int) -> None:
        """Make blocks late if their user left at a tick in (after, before]: see `eviction.end_late`."""
        if eviction.end_late(self.c, self._class_count, after, before):
            self.reset_heaps()

    def oldest_tick_in_use(self, size_class: int) -> int:
        """Return the tick of the last use of the oldest block in use, or -1: see `eviction.oldest_in_use`."""
        return self._tick_of(eviction.oldest_in_use(self.c, size_class))

    def oldest_tick_for(self, size_class: int, tenant: int) -> int:
        """Return the tick of the last use of the oldest block that may be evicted for a tenant; -1 if there is none.

        tenant: -1 if no writer asks. See `quotas.may_go`.
        """
        return self._tick_of(eviction.oldest_candidate(self.c, size_class, tenant))

    def _tick_of(self, row: int) -> int:
        return int(self.c.rows[row]["last"]) if row >= 0 else -1

    # ------------------------------------------------------------------ slabs

    def open(self, node: int, number: int, size_class: int, slots: int, gen: int) -> int:
        """Let slab `number` of a node serve a size class. Returns the slab's record."""
        pages = _pages(slots)
        first = self._take_pages(pages)
        record = self._free_slabs.pop() if self._free_slabs else self._slab_count
        self._slab_count = max(self._slab_count, record + 1)
        records = _grown(self.c.slabs, self._slab_count)
        records[record] = (first << PAGE_BITS, slots, size_class, number, gen)
        self._grow_grid(node & NODE_MASK, number)
        self.c = self.c._replace(slabs=records)
        self.c.pages[first : first + pages] = record
        self.c.grid[node & NODE_MASK, number] = record
        slabs.open_rows(self.c, first << PAGE_BITS, slots)
        return record

    def close(self, node: int, record: int) -> int:
        """Forget a slab and all blocks in it, held or not. Returns its number on the node."""
        base, slots = self.span(record)
        slabs.close_rows(self.c, base, slots)
        number = int(self.c.slabs[record]["number"])
        self.c.grid[node & NODE_MASK, number] = -1
        self._free_pages.append((base >> PAGE_BITS, _pages(slots)))
        self._free_slabs.append(record)
        return number

    def invalidate(self, rows: RowArray, gens: RowArray) -> None:
        """In the arrays of a hold, set rows of closed slabs, and the generations of these rows, to -1."""
        closed = (rows >= 0) & (self.c.rows["state"][rows] == columns.CLOSED)
        rows[closed] = gens[closed] = -1

    def span(self, record: int) -> tuple[int, int]:
        """Return (first row, number of slots) of a slab."""
        return int(self.c.slabs[record]["base"]), int(self.c.slabs[record]["slots"])

    def census(self, record: int) -> Census:
        counts = np.zeros(len(columns.STATES) + 1, np.int64)
        newest, held = slabs.census(self.c, *self.span(record), counts)
        return Census(counts, int(newest), bool(held))

    def size_classes_of(self, rows: RowArray) -> NDArray[np.int32]:
        """Return the size class of each row."""
        found: NDArray[np.int32] = self.c.slabs["size_class"][self.c.pages[rows >> PAGE_BITS]]
        return found

    def used_by_tenant(self, record: int) -> NDArray[np.int64]:
        """Return the bytes of a slab's ready primaries, by the tenant that is charged for them."""
        base, slots = self.span(record)
        ready = self.c.rows["state"][base : base + slots] == columns.READY
        counts = np.bincount(self.c.tenants[base : base + slots][ready], minlength=columns.TENANTS_MAX)
        return counts * int(self.c.size_classes[self.c.slabs[record]["size_class"]]["charge"])

    def _take_pages(self, pages: int) -> int:
        """Take the pages of a closed slab with the same number of pages, else new pages. Returns the first page."""
        for i, (first, length) in enumerate(self._free_pages):
            if length == pages:
                del self._free_pages[i]
                return first
        first = self._page_count
        self._page_count += pages
        rows = self._grown_rows(self._page_count << PAGE_BITS)
        tenants, kept_until = self._tenants[: len(rows)], self._kept_until[: len(rows)]
        old = entries = self.c.table
        length = len(old)
        while self._page_count << PAGE_BITS > length * 3 // 4:
            length *= 2
        if length > len(old):
            entries = zeros(length, length, np.int64)  # in huge pages, as probes are spread over the table
        pages_now = _grown(self.c.pages, self._page_count)
        self.c = self.c._replace(rows=rows, tenants=tenants, kept_until=kept_until, pages=pages_now, table=entries)
        if entries is not old:
            table.rehash(self.c, old)
        return first

    def _grown_rows(self, length: int) -> NDArray[np.void]:
        rows = self.c.rows
        if length <= len(rows):
            return rows
        if length > len(self._reserved):
            self._reserved = zeros(8 * length, length, columns.ROW)
            self._reserved[: len(rows)] = rows
            self._tenants = zeros(8 * length, length, np.uint8)
            self._tenants[: len(rows)] = self.c.tenants
            self._kept_until = zeros(8 * length, length, np.uint32)
            self._kept_until[: len(rows)] = self.c.kept_until
        return self._reserved[: max(length, len(rows) + len(rows) // 8)]

    def _grow_grid(self, node: int, number: int) -> None:
        shape = self.c.grid.shape
        if node >= shape[0] or number >= shape[1]:
            grid = np.full((max(node + 1, shape[0]), max(number + 1, shape[1])), -1, np.int32)
            grid[: shape[0], : shape[1]] = self.c.grid
            self.c = self.c._replace(grid=grid)

    # ------------------------------------------------------------------ locations

    def describe(self, rows: RowArray, block_bytes: int) -> Locations:
        """Return the locations of rows; zeros for a negative row."""
        out = np.empty(len(rows), LOCATION)
        slabs.describe(self.c, rows, block_bytes, out)
        return out

    def rows_of(self, locations: Locations) -> tuple[RowArray, RowArray]:
        """Return (rows, generations) of locations; row -1 if the slab is gone or was formatted anew."""
        rows = np.empty(len(locations), np.int64)
        slabs.rows_of(self.c, locations, rows)
        return rows, locations["gen"].astype(np.int64)

    def keys_of(self, rows: RowArray) -> bytes:
        return np.stack([self.c.rows["k0"][rows], self.c.rows["k1"][rows]], axis=1).tobytes()
