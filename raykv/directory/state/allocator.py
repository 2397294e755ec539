"""The memory of all nodes, in slabs: which slab serves which block size, and which slabs a node gives back.

A node's memory is cut into slabs, and each slab into slots of one size. Some slots of each size are the staging window:
readers of that node pull other nodes' blocks into it. A size that needs room gets spare slabs first. Then it gets a
slab of another size, if the slab's newest block is older than the oldest block of the size that needs room.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from raykv.directory.kernels import columns, eviction, leases, slabs
from raykv.directory.state.arrays import RowArray
from raykv.directory.state.size_classes import SizeClasses
from raykv.protocol.location import LOCATION, Locations, host_of, slot_bytes

QUARANTINED_PER_HEARTBEAT = 4096
CLOSED_PER_CALL = 8  # maximum number of slabs that one call of `withdraw` takes from a node
NOBODY = -1  # instead of a tenant, if no writer asks for the slots
SLOTS_MAX = 1 << 22  # maximum number of slots of a slab: 16 times the number of 4 KiB slots in 1 GiB


@dataclass
class Node:
    """The memory of a node, or of one of its GPUs, as the directory knows it."""

    name: str
    index: int
    nonce: bytes
    slab_bytes: int
    window_bytes: int
    last_heartbeat: float
    limit: int  # number of slabs that the node should have
    state: str = "joining"  # then "alive" or "suspect", and in the end "dead"
    leaving: bool = False
    floor: int = -1  # its inventory's oldest block gets the tick after this tick; -1: no piece has arrived
    offered: int = 0  # number of slabs that the node has allocated
    withdrawn: set[int] = field(default_factory=set)  # offered slabs that the node gave back or must give back
    closing: set[int] = field(default_factory=set)  # slabs to withdraw as soon as nobody holds a slot in them
    spare: list[int] = field(default_factory=list)  # slabs that serve no size; the last is taken first
    size_classes: dict[int, int] = field(default_factory=dict)  # by slot size
    slabs: dict[int, int] = field(default_factory=dict)  # slab record by slab number
    copies: float = 0.0  # share of its slots to reserve for copies of other nodes' blocks
    checked: dict[int, int] = field(default_factory=dict)  # by size class: evictions up to its last search for a slab

    @cached_property
    def host(self) -> str:
        """Name of the node, or of the node whose GPU this is."""
        return host_of(self.name)

    @cached_property
    def on_gpu(self) -> bool:
        return self.name != self.host

    def least_window(self, stride: int) -> int:
        """Return the number of slots of a size in the staging window, without the room for copies."""
        return max(1, self.window_bytes // stride)

    @property
    def offered_to(self) -> int:
        """To whom the directory offers this memory: NOT_OFFERED, TO_READERS, TO_OWN or TO_ALL."""
        if self.state != "alive":
            return columns.NOT_OFFERED
        if self.leaving:
            return columns.TO_READERS
        return columns.TO_OWN if self.on_gpu else columns.TO_ALL


class Allocator:
    """The slabs of all nodes."""

    def __init__(self, size_classes: SizeClasses) -> None:
        self.nodes: dict[str, Node] = {}
        self.may_have_spare: set[str] = set()  # names of all nodes with spare slabs, and possibly of other nodes
        self.lacking: dict[int, int] = {}  # size class -> number of slots that its window lacks until holds end
        self._size_classes = size_classes

    @property
    def _c(self) -> columns.Columns:
        return self._size_classes.c

    def offer(self, node: Node, offered: int) -> None:
        """Add a node's newly allocated slabs to its spare slabs. offered: total number of its allocated slabs."""
        known = {*node.spare, *node.slabs, *node.withdrawn}
        node.spare[:0] = [n for n in reversed(range(node.offered, offered)) if n not in known]
        node.offered = max(node.offered, offered)
        self.may_have_spare.add(node.name)

    def open_slabs_of(self, node: Node, locations: Locations) -> None:
        """Open those slabs of an arena in which blocks were found."""
        numbers, firsts = np.unique(locations["slab"], return_index=True)
        for number, first in zip(numbers.tolist(), locations[firsts], strict=True):
            if number in node.withdrawn or number in node.slabs:
                continue
            stride = slot_bytes(int(first["bytes"]))
            size_class = self.size_class(node, stride)
            if size_class >= 0:
                if number in node.spare:
                    node.spare.remove(number)
                self._open_slab(node, number, size_class, stride, int(first["slab_gen"]))

    def empty_windows(self, node: Node) -> None:
        """Make room for the staging windows of an arena that was found full of blocks."""
        lacking = np.zeros(len(self._c.size_classes), np.int64)
        for stride, slots in self.slots(node).items():
            size_class = node.size_classes[stride]
            window = int(self._c.size_classes[size_class]["window"])
            lacking[size_class] = max(0, min(window, slots - window))  # a size class with few slots evicts nothing
        self.restore_windows(lacking)

    def resize_windows(self, node: Node) -> None:
        """Set a node's windows to include the room for copies. Later writers evict primaries that occupy this room."""
        copies = node.copies if node.offered_to == columns.TO_ALL else 0.0
        slots = self.slots(node) if copies else dict.fromkeys(node.size_classes, 0)
        for stride, size_class in node.size_classes.items():
            window = max(node.least_window(stride), int(copies * slots[stride]))
            self._size_classes.resize_window(size_class, window)

    def restore_windows(self, lacking: RowArray) -> None:
        """Open spare slabs, or evict blocks, to give staging windows back the slots that primaries took.

        lacking: number of taken slots by size class.
        """
        for size_class in np.flatnonzero(lacking).tolist():
            self.lacking[size_class] = self.lacking.get(size_class, 0) + int(lacking[size_class])
        self.restore_lacking()

    def restore_lacking(self) -> None:
        """Restore windows as far as blocks can be evicted now. The other slots must wait until holds end."""
        for size_class, slots in list(self.lacking.items()):
            node = next(node for node in self.nodes.values() if size_class in node.size_classes.values())
            stride = next(stride for stride, known in node.size_classes.items() if known == size_class)
            self._open_spare(node, size_class, stride, 0)
            left = int(eviction.restore_window(self._c, size_class, slots))
            if left and self.slots(node)[stride] > self._c.size_classes[size_class]["window"]:
                self.lacking[size_class] = left
            else:  # a size class with few slots must not evict the block that was just promoted
                del self.lacking[size_class]

    def promote_replicas(self, node: Node) -> None:
        """For each primary on this node, make a replica on a staying node the new primary, if there is one."""
        promoted = np.zeros(len(self._c.size_classes), np.int64)
        for record in node.slabs.values():
            leases.promote_replicas(self._c, *self._size_classes.span(record), promoted)
        self.restore_windows(promoted)

    def withdraw(self, node: Node, pinned: RowArray) -> list[int]:
        """Withdraw a node's surplus slabs. Returns the numbers of the slabs that the node must give back."""
        excess = min(CLOSED_PER_CALL, node.offered - len(node.withdrawn) - node.limit)
        numbers = node.spare[: max(0, excess)]
        closing = self._slabs_to_close(node, excess - len(numbers), pinned)
        for number in node.closing & node.slabs.keys() - closing:
            slabs.reopen(self._c, *self._size_classes.span(node.slabs[number]))
        for number in closing:
            if slabs.retire(self._c, *self._size_classes.span(node.slabs[number])) == 0:
                numbers.append(self._size_classes.close(node.index, node.slabs.pop(number)))
        node.closing = closing & node.slabs.keys()
        node.spare = [number for number in node.spare if number not in numbers]
        node.withdrawn.update(numbers)
        if closing:  # `retire` took free slots, which the staging windows need
            self.resize_windows(node)
            for stride, size_class in node.size_classes.items():
                eviction.restore_window(self._c, size_class, node.least_window(stride))
        return numbers

    def _slabs_to_close(self, node: Node, count: int, pinned: RowArray) -> set[int]:
        """Choose at most `count` slabs to close: slabs without held slots first. Slabs with a pinned block stay.

        Among slabs with held slots, slabs that are already being emptied come first, since otherwise more slabs would
        lose their blocks. Then come slabs whose loss brings no tenant below its minimum. Among slabs of equal rank, the
        slab that was used longest ago comes first.
        """
        if count <= 0:
            return set()
        kept = set(self._c.pages[pinned >> columns.PAGE_BITS].tolist())
        order = []
        for number, record in node.slabs.items():
            if record not in kept:
                slab = self._size_classes.census(record)
                lacking = bool(self._lacking_without(record))
                order.append((slab.held, number not in node.closing, lacking, slab.newest, number))
        return {entry[-1] for entry in sorted(order)[:count]}

    def size_class(self, node: Node, stride: int) -> int:
        """Return a node's size class for slots of `stride` bytes; -1 if such slots are too large or too small."""
        if not 0 < stride <= node.slab_bytes <= stride * SLOTS_MAX:
            return -1
        if stride not in node.size_classes:
            node.size_classes[stride] = self._size_classes.add(
                node.index, stride, node.least_window(stride), node.offered_to, charge=0 if node.on_gpu else stride
            )
        return node.size_classes[stride]

    def provision(self, writer: Node, size_class: int, stride: int, need: int, tenant: int) -> bool:
        """Open slabs for a size class until `need` more blocks fit, or the tenant's maximum is reached.

        Spare slabs of the writer's node come first, then other nodes' spare slabs, then slabs of other sizes. Returns
        whether it took any slab of another size.
        """
        with_spare = self._nodes_with_spare(writer)
        if not with_spare and not writer.spare and len(writer.size_classes) == 1:  # there is no slab to take
            return False
        # the writer's node needs at least one slot, also to stage blocks for other nodes
        took = self.provide_slots(writer, size_class, stride, 1, tenant)
        if charge := int(self._c.size_classes[size_class]["charge"]):
            need = min(need, self._left(tenant, charge))
        for node in (writer, *with_spare):
            its_class = self.size_class(node, stride)
            need -= max(0, self._open_spare(node, its_class, stride, need)) if its_class >= 0 else 0
            if need <= 0:
                return took
        need += max(0, self._size_classes.room(size_class))
        return self._reclaim(writer, size_class, stride, self._size_classes.room, need, tenant) or took

    def _left(self, tenant: int, stride: int) -> int:
        """Return how many more blocks a tenant may have before its own blocks must be evicted."""
        quota = self._c.quotas[tenant]
        return max(0, int(quota["maximum"] - quota["used"]) // stride)

    def _nodes_with_spare(self, writer: Node) -> list[Node]:
        """Return other nodes whose spare slabs any writer may use. For a writer on a GPU, its own node comes first."""
        self.may_have_spare = {name for name in self.may_have_spare if name in self.nodes and self.nodes[name].spare}
        found = [self.nodes[name] for name in self.may_have_spare]
        wanted = [node for node in found if node is not writer and node.offered_to == columns.TO_ALL]
        return sorted(wanted, key=lambda node: (node.name != writer.host, node.index))

    def make_room(self, node: Node, size_class: int, stride: int, need: int) -> None:
        """Like `provision`, but only on this node, and for no tenant."""
        if self._open_spare(node, size_class, stride, need) < need:
            self._reclaim(node, size_class, stride, self._size_classes.room, need, NOBODY)

    def _open_spare(self, node: Node, size_class: int, stride: int, need: int) -> int:
        """Open spare slabs for a size class until `need` more blocks fit. Returns how many more blocks fit."""
        while node.spare and self._size_classes.room(size_class) < need:
            self._open_slab(node, node.spare.pop(), size_class, stride)
        return self._size_classes.room(size_class)

    def provide_slots(self, node: Node, size_class: int, stride: int, need: int, tenant: int = NOBODY) -> bool:
        """Provide a size class with free slots, without evicting its primaries.

        Opens spare slabs until `need` slots are free. If there is still no free slot, takes a slab of another size.
        Returns whether it took any slab of another size.
        """
        while self._size_classes.takeable(size_class) < need and node.spare:
            self._open_slab(node, node.spare.pop(), size_class, stride)
        return self._reclaim(node, size_class, stride, self._size_classes.takeable, 1, tenant)

    def _reclaim(
        self, node: Node, size_class: int, stride: int, measure: Callable[[int], int], need: int, tenant: int
    ) -> bool:
        """Take slabs of other sizes until `measure(size_class)` is `need`. Returns whether it took any slab.

        While this size has no block to evict for the tenant, any slab may be taken. Otherwise the slab's newest block
        must be older than this size's oldest evictable block. Each search for a slab looks at all rows. So while this
        size has evictable blocks, the next search waits until this size has evicted as many blocks as a slab has slots.
        """
        took = False
        while len(node.size_classes) > 1 and measure(size_class) < need:
            tick = self._size_classes.oldest_tick_for(size_class, tenant)
            evicted = int(self._c.size_classes[size_class]["evicted"])
            if tick >= 0 and evicted - node.checked.get(size_class, 0) < node.slab_bytes // stride:
                break
            node.checked[size_class] = evicted
            newest, number = self._oldest_slab(node, size_class, tenant)
            if number < 0 or 0 <= tick <= newest:
                break
            self._size_classes.close(node.index, node.slabs.pop(number))
            self._open_slab(node, number, size_class, stride)
            took = True
        return took

    def _oldest_slab(self, node: Node, size_class: int, tenant: int) -> tuple[int, int]:
        """Find the slab of another size that was used longest ago. Returns (tick of its newest block, number or -1).

        Skips slabs whose loss would bring another tenant below its minimum. Slabs whose loss would bring this tenant
        itself below its minimum come last.
        """
        found = []
        for number, record in node.slabs.items():
            if self._c.slabs[record]["size_class"] != size_class:
                slab, lacking = self._size_classes.census(record), self._lacking_without(record)
                if not slab.held and not lacking - {tenant}:
                    found.append((tenant in lacking, slab.newest, number))
        return min(found, key=lambda entry: entry[:2])[1:] if found else (0, -1)

    def _lacking_without(self, record: int) -> set[int]:
        """Return the tenants that would lose blocks and be below their minimum if a slab were lost."""
        if self._size_classes.tenants == 1:
            return set()
        used = self._size_classes.used_by_tenant(record)
        quotas = self._c.quotas
        return set(np.flatnonzero((used > 0) & (quotas["used"] - used < quotas["minimum"])).tolist())

    def _open_slab(self, node: Node, number: int, size_class: int, stride: int, gen: int | None = None) -> None:
        """Let a slab serve a size class. gen: generation of the slab's format, if the slab was found formatted."""
        gen = self._size_classes.next_gen() if gen is None else gen
        node.slabs[number] = self._size_classes.open(node.index, number, size_class, node.slab_bytes // stride, gen)

    def held_primaries(self, node: Node, min_uses: int) -> RowArray:
        """Return the primaries that somebody holds and that were matched at least `min_uses` times."""
        held = [np.zeros(0, np.int64)]
        for record in node.slabs.values():
            base, slots = self._size_classes.span(record)
            rows = self._c.rows[base : base + slots]
            wanted = (rows["state"] == columns.READY) & (rows["holds"] > 0) & (rows["uses"] >= min_uses)
            held.append(base + np.flatnonzero(wanted))
        return np.concatenate(held)

    def slots(self, node: Node) -> dict[int, int]:
        """Return how many slots of each size a node has."""
        records = self._c.slabs[np.fromiter(node.slabs.values(), np.int64, len(node.slabs))]
        slots = np.zeros(len(self._c.size_classes), np.int64)
        np.add.at(slots, records["size_class"], records["slots"])
        return {stride: int(slots[size_class]) for stride, size_class in node.size_classes.items()}

    def capacity(self) -> int:
        """Return the bytes that all nodes together should have for blocks, without staging windows and GPUs."""
        return sum(node.limit * node.slab_bytes - node.window_bytes for node in self.nodes.values() if not node.on_gpu)

    def quarantined(self, node: Node) -> Locations:
        """Return at most QUARANTINED_PER_HEARTBEAT quarantined slots of each size for the node's store to sweep."""
        locations = [np.zeros(0, LOCATION)]
        for stride, size_class in node.size_classes.items():
            if not self._c.size_classes[size_class]["quarantined"]:
                continue
            rows, n = np.empty(QUARANTINED_PER_HEARTBEAT, np.int64), 0
            for record in node.slabs.values():
                if self._c.slabs[record]["size_class"] == size_class:
                    n = slabs.in_state(self._c, *self._size_classes.span(record), columns.QUARANTINED, rows, n)
            locations.append(self._size_classes.describe(rows[:n], stride))
        return np.concatenate(locations)

    def stats(self, node: Node, now: float) -> dict[str, Any]:
        """Return a node's slots by state, and its bytes."""
        return next(filter(None, self.stats_in_steps(node, now, sys.maxsize)))

    def stats_in_steps(self, node: Node, now: float, slots_a_step: int) -> Iterator[dict[str, Any] | None]:
        """Like `stats`, but yields None after about every `slots_a_step` slots. The state may change at each None."""
        total = np.zeros(len(columns.STATES) + 1, np.int64)
        used = seen = 0
        for number in list(node.slabs):
            if seen >= slots_a_step:
                seen = 0
                yield None
            if (record := node.slabs.get(number)) is None:
                continue
            counts = self._size_classes.census(record).counts
            total += counts
            slots = int(counts.sum())
            seen += slots
            used += (slots - int(counts[columns.FREE] + counts[columns.CLOSED])) * (node.slab_bytes // max(1, slots))
        yield {
            "index": node.index,
            "tier": "gpu" if node.on_gpu else "cpu",
            "state": "leaving" if node.leaving and node.state == "alive" else node.state,
            "idle_s": now - node.last_heartbeat,
            "slabs": len(node.slabs),
            "spare_slabs": len(node.spare),
            "limit": node.limit,
            "slab_bytes": node.slab_bytes,
            "bytes_used": used,
            "slots": int(total[: columns.CLOSED].sum()),
            **{state: int(total[i]) for i, state in enumerate(columns.STATES)},
        }
