"""The nodes' memory, as the directory gives it out: slabs of slots of one size, and a staging window of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raykv.config import MIB
from raykv.directory.kernels import index, leases, placement, slabs
from raykv.directory.size_classes import Locations, Rows, SizeClasses
from raykv.protocol import LOCATION, host_of, slot_bytes

QUARANTINED_PER_HEARTBEAT = 4096
CLOSED_PER_CALL = 8  # slabs


@dataclass
class Node:
    """A node store as the directory knows it."""

    name: str
    index: int
    nonce: bytes
    slab_bytes: int
    window_bytes: int
    last_heartbeat: float
    limit: int  # slabs that it is to have
    state: str = "joining"  # then alive <-> suspect
    leaving: bool = False
    offered: int = 0  # slabs that were allocated
    withdrawn: set[int] = field(default_factory=set)  # of them, those that were, or are to be, given back
    closing: set[int] = field(default_factory=set)  # slabs that are to be withdrawn, in which something is held
    spare: list[int] = field(default_factory=list)  # slabs that serve no size; the last is taken first
    size_classes: dict[int, int] = field(default_factory=dict)  # by slot size
    slabs: dict[int, int] = field(default_factory=dict)  # slab record by slab number
    checked: dict[int, int] = field(default_factory=dict)  # evictions at the last look for a colder slab, by size class

    @property
    def host(self) -> str:
        """The node that this is, or whose GPU."""
        return host_of(self.name)

    @property
    def on_gpu(self) -> bool:
        return self.name != self.host

    @property
    def offered_to(self) -> int:
        if self.state != "alive":
            return index.NOT_OFFERED
        if self.leaving:
            return index.TO_READERS
        return index.TO_OWN if self.on_gpu else index.TO_ALL


def staging_window(capacity: int) -> int:
    """Bytes of a node's staging window: 2% of its arena, at least 256 MiB, at most an eighth of it."""
    return min(max(capacity // 50, 256 * MIB), capacity // 8)


class Allocator:
    """The slabs of all nodes."""

    def __init__(self, size_classes: SizeClasses) -> None:
        self.nodes: dict[str, Node] = {}
        self.lacking: dict[int, int] = {}  # by size class, slots of its window in which blocks are still held
        self._size_classes = size_classes

    def offer(self, node: Node, offered: int) -> None:
        """A node has allocated so many slabs."""
        taken = {*node.spare, *node.slabs, *node.withdrawn}
        node.spare[:0] = [n for n in reversed(range(node.offered, offered)) if n not in taken]
        node.offered = max(node.offered, offered)

    def open_found(self, node: Node, at: Locations) -> None:
        """Slabs of an arena in which something was found."""
        for number in sorted(set(at["slab"].tolist()) - node.withdrawn):
            first = at[at["slab"] == number][0]
            stride = slot_bytes(int(first["bytes"]))
            size_class = self.size_class(node, stride)
            if size_class >= 0:
                self._open_slab(node, number, size_class, stride, int(first["slab_gen"]))

    def make_windows(self, node: Node) -> None:
        """An arena may be found full of blocks, some of which were in its staging windows."""
        promoted = np.zeros(len(self._size_classes.c.size_classes), np.int64)
        for stride, slots in self.slots(node).items():
            window = int(self._size_classes.c.size_classes[node.size_classes[stride]]["window"])
            promoted[node.size_classes[stride]] = max(
                0, min(window, slots - window)
            )  # a size of few slots has no window
        self.restore_windows(promoted)

    def restore_windows(self, promoted: Rows) -> None:
        """Primaries came out of staging windows, by size class: spare slabs, or the oldest blocks, make up for them."""
        for size_class in np.flatnonzero(promoted).tolist():
            self.lacking[size_class] = self.lacking.get(size_class, 0) + int(promoted[size_class])
        self.settle_windows()

    def settle_windows(self) -> None:
        """As far as what is held allows: the rest when it is let go."""
        for size_class, slots in list(self.lacking.items()):
            node = next(node for node in self.nodes.values() if size_class in node.size_classes.values())
            stride = next(stride for stride, there in node.size_classes.items() if there == size_class)
            while node.spare and self._size_classes.room(size_class) < 0:
                self._open_slab(node, node.spare[-1], size_class, stride, self._size_classes.next_gen())
            left = int(placement.restore_window(self._size_classes.c, size_class, slots))
            if left and self.slots(node)[stride] > self._size_classes.c.size_classes[size_class]["window"]:
                self.lacking[size_class] = left
            else:  # a size of few slots would lose what has just come
                del self.lacking[size_class]

    def promote_replicas(self, node: Node) -> None:
        """What stays as a replica elsewhere is to stay for good."""
        promoted = np.zeros(len(self._size_classes.c.size_classes), np.int64)
        for record in node.slabs.values():
            leases.promote_replicas(self._size_classes.c, *self._size_classes.span(record), promoted)
        self.restore_windows(promoted)

    def withdraw(self, node: Node, pinned: Rows) -> list[int]:
        """Numbers of slabs that a node has too many: no longer in use."""
        excess = min(CLOSED_PER_CALL, node.offered - len(node.withdrawn) - node.limit)
        numbers = node.spare[: max(0, excess)]
        closing = self._to_close(node, excess - len(numbers), pinned)
        for number in node.closing & node.slabs.keys() - closing:
            slabs.reopen(self._size_classes.c, *self._size_classes.span(node.slabs[number]))
        for number in closing:
            if slabs.retire(self._size_classes.c, *self._size_classes.span(node.slabs[number])) == 0:
                numbers.append(self._size_classes.close(node.index, node.slabs.pop(number)))
        node.closing = closing & node.slabs.keys()
        node.spare = [number for number in node.spare if number not in numbers]
        node.withdrawn.update(numbers)
        for size_class in node.size_classes.values() if closing else ():  # the free slots were the first to go
            placement.restore_window(
                self._size_classes.c, size_class, self._size_classes.c.size_classes[size_class]["window"]
            )
        return numbers

    def _to_close(self, node: Node, count: int, pinned: Rows) -> set[int]:
        """The slabs that were used longest ago, those first in which nothing is held; none with a pinned block.

        Of those in which something is, those that were emptied before: others would lose their blocks, too.
        """
        if count <= 0:
            return set()
        kept = set(self._size_classes.c.pages[pinned >> index.PAGE_BITS].tolist())
        ages = []
        for number, record in node.slabs.items():
            if record not in kept:
                newest, held = self._size_classes.census(record, np.zeros(len(index.STATES) + 1, np.int64))
                ages.append((held, number not in node.closing, newest, number))
        return {entry[-1] for entry in sorted(ages)[:count]}

    def size_class(self, node: Node, stride: int) -> int:
        """The node's size class for slots of `stride` bytes; -1 where a slab holds not one, or they would be empty."""
        if not 0 < stride <= node.slab_bytes:
            return -1
        if stride not in node.size_classes:
            window = max(1, node.window_bytes // stride)
            node.size_classes[stride] = self._size_classes.add(node.index, stride, window, node.offered_to)
        return node.size_classes[stride]

    def provision(self, writer: Node, size_class: int, stride: int, need: int) -> bool:
        """Give a size spare slabs until `need` more blocks fit, the writer's own first; then slabs of other sizes.

        Returns whether it took any of those.
        """
        if need == 0 or self._size_classes.room(size_class) >= need:
            return False
        took = self._give_slots(writer, size_class, stride, 1)  # without one it could not write to other nodes either
        others = [n for n in self.nodes.values() if n is not writer and n.spare and n.offered_to == index.TO_ALL]
        for node in (writer, *sorted(others, key=lambda other: other.name != writer.host)):
            s = self.size_class(node, stride)
            need -= max(0, self._open_spare(node, s, stride, need)) if s >= 0 else 0
            if need <= 0:
                return took
        need += max(0, self._size_classes.room(size_class))
        return self._reclaim(writer, size_class, stride, self._size_classes.room, need) or took

    def make_room(self, node: Node, size_class: int, stride: int, need: int) -> None:
        """As `provision`, on this node only."""
        if self._open_spare(node, size_class, stride, need) < need:
            self._reclaim(node, size_class, stride, self._size_classes.room, need)

    def _open_spare(self, node: Node, size_class: int, stride: int, need: int) -> int:
        """Give a size spare slabs until `need` more blocks fit. Returns how many do."""
        while node.spare and self._size_classes.room(size_class) < need:
            self._open_slab(node, node.spare[-1], size_class, stride, self._size_classes.next_gen())
        return self._size_classes.room(size_class)

    def provide_staging(self, reader: Node, size_class: int, stride: int, firsts: Rows) -> bool:
        """See that a prefix can be pulled to its reader, as far as the window goes. Returns as `_give_slots`."""
        need = int(leases.staging_need(self._size_classes.c, firsts, reader.index, size_class))
        return need > 0 and self._give_slots(reader, size_class, stride, need)

    def _give_slots(self, node: Node, size_class: int, stride: int, need: int) -> bool:
        """See that a size has slots on a node that cost no block of that size: one at least, more of spare slabs.

        Returns whether it took a slab of another size.
        """
        while self._size_classes.takeable(size_class) < need and node.spare:
            self._open_slab(node, node.spare[-1], size_class, stride, self._size_classes.next_gen())
        return self._reclaim(node, size_class, stride, self._size_classes.takeable, 1)

    def _reclaim(self, node: Node, size_class: int, stride: int, measure: Callable[[int], int], need: int) -> bool:
        """Take slabs of other sizes until `measure` says `need`: any while this size can evict nothing, else one whose
        newest block is colder.

        That costs a look at all their rows, so it is done once a slab's worth of evictions.
        Returns whether it took any.
        """
        took = False
        while len(node.size_classes) > 1 and measure(size_class) < need:
            tick = self._size_classes.coldest(size_class)
            evicted = int(self._size_classes.c.size_classes[size_class]["evicted"])
            if tick >= 0 and evicted - node.checked.get(size_class, 0) < node.slab_bytes // stride:
                break
            node.checked[size_class] = evicted
            newest, number = self._coldest_slab(node, size_class)
            if number < 0 or 0 <= tick <= newest:
                break
            node.spare.append(self._size_classes.close(node.index, node.slabs.pop(number)))
            self._open_slab(node, number, size_class, stride, self._size_classes.next_gen())
            took = True
        return took

    def _coldest_slab(self, node: Node, size_class: int) -> tuple[int, int]:
        """(tick of its newest block, number) of the other sizes' slab that was used longest ago; number -1: none."""
        found = (0, -1)
        for number, record in node.slabs.items():
            if self._size_classes.c.slabs[record]["size_class"] != size_class:
                newest, held = self._size_classes.census(record, np.zeros(len(index.STATES) + 1, np.int64))
                if not held and (found[1] < 0 or newest < found[0]):
                    found = (newest, number)
        return found

    def _open_slab(self, node: Node, number: int, size_class: int, stride: int, gen: int) -> None:
        if number in node.spare:
            node.spare.remove(number)
        node.slabs[number] = self._size_classes.open(node.index, number, size_class, node.slab_bytes // stride, gen)

    def held(self, node: Node, min_uses: int) -> Rows:
        """Primaries that somebody holds, and that were asked for so often."""
        found = [np.zeros(0, np.int64)]
        for record in node.slabs.values():
            base, slots = self._size_classes.span(record)
            rows = self._size_classes.c.rows[base : base + slots]
            wanted = (rows["state"] == index.READY) & (rows["pins"] > 0) & (rows["uses"] >= min_uses)
            found.append(base + np.flatnonzero(wanted))
        return np.concatenate(found)

    def slots(self, node: Node) -> dict[int, int]:
        """A node's slots by size."""
        slots = dict.fromkeys(node.size_classes, 0)
        strides = {size_class: stride for stride, size_class in node.size_classes.items()}
        for record in node.slabs.values():
            slots[strides[int(self._size_classes.c.slabs[record]["size_class"])]] += self._size_classes.span(record)[1]
        return slots

    def quarantined(self, node: Node) -> Locations:
        """Slots of the node to be swept, at most LIMBO_PER_BEAT of each size."""
        found = [np.zeros(0, LOCATION)]
        for stride, size_class in node.size_classes.items():
            if not self._size_classes.c.size_classes[size_class]["quarantined"]:
                continue
            rows, n = np.empty(QUARANTINED_PER_HEARTBEAT, np.int64), 0
            for record in node.slabs.values():
                if self._size_classes.c.slabs[record]["size_class"] == size_class:
                    n = slabs.in_state(
                        self._size_classes.c, *self._size_classes.span(record), index.QUARANTINED, rows, n
                    )
            found.append(self._size_classes.describe(rows[:n], stride)[1])
        return np.concatenate(found)

    def stats(self, node: Node, now: float) -> dict[str, Any]:
        total = np.zeros(len(index.STATES) + 1, np.int64)
        used = 0
        for record in node.slabs.values():
            counts = np.zeros_like(total)
            self._size_classes.census(record, counts)
            total += counts
            slots = int(counts.sum())
            used += (slots - int(counts[index.FREE] + counts[index.CLOSED])) * (node.slab_bytes // slots)
        return {
            "index": node.index,
            "tier": "gpu" if node.on_gpu else "cpu",
            "state": "leaving" if node.leaving and node.state == "alive" else node.state,
            "idle_s": now - node.last_heartbeat,
            "slabs": len(node.slabs),
            "spare_slabs": len(node.spare),
            "limit": node.limit,
            "slab_bytes": node.slab_bytes,
            "bytes_used": used,
            "slots": int(total[: index.CLOSED].sum()),
            **{state: int(total[i]) for i, state in enumerate(index.STATES)},
        }
