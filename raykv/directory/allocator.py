"""The nodes' memory, as the directory gives it out: slabs of slots of one size, and a staging window of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raykv.config import MIB
from raykv.directory.kernels import index, leases, placement, slabs
from raykv.directory.size_classes import Places, Rows, Shelves
from raykv.protocol import PLACE, host_of, slot_bytes

LIMBO_PER_BEAT = 4096
CLOSED_PER_CALL = 8  # slabs


@dataclass
class Node:
    """A node store as the directory knows it."""

    name: str
    index: int
    nonce: bytes
    slab_bytes: int
    window_bytes: int
    last_beat: float
    limit: int  # slabs that it is to have
    state: str = "joining"  # then alive <-> suspect
    leaving: bool = False
    offered: int = 0  # slabs that were allocated
    withdrawn: set[int] = field(default_factory=set)  # of them, those that were, or are to be, given back
    closing: set[int] = field(default_factory=set)  # slabs that are to be withdrawn, in which something is held
    spare: list[int] = field(default_factory=list)  # slabs that serve no size; the last is taken first
    shelves: dict[int, int] = field(default_factory=dict)  # by slot size
    slabs: dict[int, int] = field(default_factory=dict)  # slab record by slab number
    checked: dict[int, int] = field(default_factory=dict)  # evictions at the last look for a colder slab, by shelf

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


class Memory:
    """The slabs of all nodes."""

    def __init__(self, shelves: Shelves) -> None:
        self.nodes: dict[str, Node] = {}
        self.lacking: dict[int, int] = {}  # by shelf, slots of its window in which are blocks that somebody holds yet
        self._shelves = shelves

    def offer(self, node: Node, offered: int) -> None:
        """A node has allocated so many slabs."""
        taken = {*node.spare, *node.slabs, *node.withdrawn}
        node.spare[:0] = [n for n in reversed(range(node.offered, offered)) if n not in taken]
        node.offered = max(node.offered, offered)

    def open_found(self, node: Node, at: Places) -> None:
        """Slabs of an arena in which something was found."""
        for number in sorted(set(at["slab"].tolist()) - node.withdrawn):
            first = at[at["slab"] == number][0]
            stride = slot_bytes(int(first["bytes"]))
            shelf = self.shelf(node, stride)
            if shelf >= 0:
                self._open_slab(node, number, shelf, stride, int(first["slab_gen"]))

    def make_windows(self, node: Node) -> None:
        """An arena may be found full of blocks, some of which were in its staging windows."""
        came = np.zeros(len(self._shelves.c.shelves), np.int64)
        for stride, slots in self.slots(node).items():
            window = int(self._shelves.c.shelves[node.shelves[stride]]["window"])
            came[node.shelves[stride]] = max(0, min(window, slots - window))  # a size of few slots has no window
        self.restore_windows(came)

    def restore_windows(self, came: Rows) -> None:
        """Primaries came out of staging windows, by shelf: spare slabs make up for it, or as many of the oldest go."""
        for shelf in np.flatnonzero(came).tolist():
            self.lacking[shelf] = self.lacking.get(shelf, 0) + int(came[shelf])
        self.settle_windows()

    def settle_windows(self) -> None:
        """As far as what is held allows: the rest when it is let go."""
        for shelf, slots in list(self.lacking.items()):
            node = next(node for node in self.nodes.values() if shelf in node.shelves.values())
            stride = next(stride for stride, there in node.shelves.items() if there == shelf)
            while node.spare and self._shelves.room(shelf) < 0:
                self._open_slab(node, node.spare[-1], shelf, stride, self._shelves.next_gen())
            left = int(placement.restore_window(self._shelves.c, shelf, slots))
            if left and self.slots(node)[stride] > self._shelves.c.shelves[shelf]["window"]:
                self.lacking[shelf] = left
            else:  # a size of few slots would lose what has just come
                del self.lacking[shelf]

    def hand_over(self, node: Node) -> None:
        """What stays as a replica elsewhere is to stay for good."""
        came = np.zeros(len(self._shelves.c.shelves), np.int64)
        for record in node.slabs.values():
            leases.hand_over(self._shelves.c, *self._shelves.span(record), came)
        self.restore_windows(came)

    def withdraw(self, node: Node, pinned: Rows) -> list[int]:
        """Numbers of slabs that a node has too many: no longer in use."""
        excess = min(CLOSED_PER_CALL, node.offered - len(node.withdrawn) - node.limit)
        numbers = node.spare[: max(0, excess)]
        closing = self._to_close(node, excess - len(numbers), pinned)
        for number in node.closing & node.slabs.keys() - closing:
            slabs.reopen(self._shelves.c, *self._shelves.span(node.slabs[number]))
        for number in closing:
            if slabs.retire(self._shelves.c, *self._shelves.span(node.slabs[number])) == 0:
                numbers.append(self._shelves.close(node.index, node.slabs.pop(number)))
        node.closing = closing & node.slabs.keys()
        node.spare = [number for number in node.spare if number not in numbers]
        node.withdrawn.update(numbers)
        for shelf in node.shelves.values() if closing else ():  # the free slots were the first to go
            placement.restore_window(self._shelves.c, shelf, self._shelves.c.shelves[shelf]["window"])
        return numbers

    def _to_close(self, node: Node, count: int, pinned: Rows) -> set[int]:
        """The slabs that were used longest ago, those first in which nothing is held; none with a pinned block.

        Of those in which something is, those that were emptied before: others would lose their blocks, too.
        """
        if count <= 0:
            return set()
        kept = set(self._shelves.c.pages[pinned >> index.PAGE_BITS].tolist())
        ages = []
        for number, record in node.slabs.items():
            if record not in kept:
                newest, held = self._shelves.census(record, np.zeros(len(index.STATES) + 1, np.int64))
                ages.append((held, number not in node.closing, newest, number))
        return {entry[-1] for entry in sorted(ages)[:count]}

    def shelf(self, node: Node, stride: int) -> int:
        """The node's shelf for slots of `stride` bytes; -1 where a slab holds not one, or they would be empty."""
        if not 0 < stride <= node.slab_bytes:
            return -1
        if stride not in node.shelves:
            window = max(1, node.window_bytes // stride)
            node.shelves[stride] = self._shelves.add(node.index, stride, window, node.offered_to)
        return node.shelves[stride]

    def provision(self, writer: Node, shelf: int, stride: int, need: int) -> bool:
        """Give a size spare slabs until `need` more blocks fit, the writer's own first; then slabs of other sizes.

        Returns whether it took any of those.
        """
        if need == 0 or self._shelves.room(shelf) >= need:
            return False
        took = self._give_slots(writer, shelf, stride, 1)  # without one it could not write to other nodes either
        others = [n for n in self.nodes.values() if n is not writer and n.spare and n.offered_to == index.TO_ALL]
        for node in (writer, *sorted(others, key=lambda other: other.name != writer.host)):
            s = self.shelf(node, stride)
            need -= max(0, self._open_spare(node, s, stride, need)) if s >= 0 else 0
            if need <= 0:
                return took
        need += max(0, self._shelves.room(shelf))
        return self._reclaim(writer, shelf, stride, self._shelves.room, need) or took

    def make_room(self, node: Node, shelf: int, stride: int, need: int) -> None:
        """As `provision`, on this node only."""
        if self._open_spare(node, shelf, stride, need) < need:
            self._reclaim(node, shelf, stride, self._shelves.room, need)

    def _open_spare(self, node: Node, shelf: int, stride: int, need: int) -> int:
        """Give a size spare slabs until `need` more blocks fit. Returns how many do."""
        while node.spare and self._shelves.room(shelf) < need:
            self._open_slab(node, node.spare[-1], shelf, stride, self._shelves.next_gen())
        return self._shelves.room(shelf)

    def provide_staging(self, reader: Node, shelf: int, stride: int, firsts: Rows) -> bool:
        """See that a prefix can be pulled to its reader, as far as the window goes. Returns as `_give_slots`."""
        need = int(leases.staging_need(self._shelves.c, firsts, reader.index, shelf))
        return need > 0 and self._give_slots(reader, shelf, stride, need)

    def _give_slots(self, node: Node, shelf: int, stride: int, need: int) -> bool:
        """See that a size has slots on a node that cost no block of that size: one at least, more of spare slabs.

        Returns whether it took a slab of another size.
        """
        while self._shelves.takeable(shelf) < need and node.spare:
            self._open_slab(node, node.spare[-1], shelf, stride, self._shelves.next_gen())
        return self._reclaim(node, shelf, stride, self._shelves.takeable, 1)

    def _reclaim(self, node: Node, shelf: int, stride: int, measure: Callable[[int], int], need: int) -> bool:
        """Take slabs of other sizes until `measure` says `need`: any while this size can evict nothing, else one whose
        newest block is colder.

        That costs a look at all their rows, so it is done once a slab's worth of evictions.
        Returns whether it took any.
        """
        took = False
        while len(node.shelves) > 1 and measure(shelf) < need:
            tick = self._shelves.coldest(shelf)
            evicted = int(self._shelves.c.shelves[shelf]["evicted"])
            if tick >= 0 and evicted - node.checked.get(shelf, 0) < node.slab_bytes // stride:
                break
            node.checked[shelf] = evicted
            newest, number = self._coldest_slab(node, shelf)
            if number < 0 or 0 <= tick <= newest:
                break
            node.spare.append(self._shelves.close(node.index, node.slabs.pop(number)))
            self._open_slab(node, number, shelf, stride, self._shelves.next_gen())
            took = True
        return took

    def _coldest_slab(self, node: Node, shelf: int) -> tuple[int, int]:
        """(tick of its newest block, number) of the other sizes' slab that was used longest ago; number -1: none."""
        found = (0, -1)
        for number, record in node.slabs.items():
            if self._shelves.c.slabs[record]["shelf"] != shelf:
                newest, held = self._shelves.census(record, np.zeros(len(index.STATES) + 1, np.int64))
                if not held and (found[1] < 0 or newest < found[0]):
                    found = (newest, number)
        return found

    def _open_slab(self, node: Node, number: int, shelf: int, stride: int, gen: int) -> None:
        if number in node.spare:
            node.spare.remove(number)
        node.slabs[number] = self._shelves.open(node.index, number, shelf, node.slab_bytes // stride, gen)

    def held(self, node: Node, min_uses: int) -> Rows:
        """Primaries that somebody holds, and that were asked for so often."""
        found = [np.zeros(0, np.int64)]
        for record in node.slabs.values():
            base, slots = self._shelves.span(record)
            rows = self._shelves.c.rows[base : base + slots]
            wanted = (rows["state"] == index.READY) & (rows["pins"] > 0) & (rows["uses"] >= min_uses)
            found.append(base + np.flatnonzero(wanted))
        return np.concatenate(found)

    def slots(self, node: Node) -> dict[int, int]:
        """A node's slots by size."""
        slots = dict.fromkeys(node.shelves, 0)
        strides = {shelf: stride for stride, shelf in node.shelves.items()}
        for record in node.slabs.values():
            slots[strides[int(self._shelves.c.slabs[record]["shelf"])]] += self._shelves.span(record)[1]
        return slots

    def limbo(self, node: Node) -> Places:
        """Slots of the node to be swept, at most LIMBO_PER_BEAT of each size."""
        found = [np.zeros(0, PLACE)]
        for stride, shelf in node.shelves.items():
            if not self._shelves.c.shelves[shelf]["limbo"]:
                continue
            rows, n = np.empty(LIMBO_PER_BEAT, np.int64), 0
            for record in node.slabs.values():
                if self._shelves.c.slabs[record]["shelf"] == shelf:
                    n = slabs.in_state(self._shelves.c, *self._shelves.span(record), index.LIMBO, rows, n)
            found.append(self._shelves.describe(rows[:n], stride)[1])
        return np.concatenate(found)

    def stats(self, node: Node, now: float) -> dict[str, Any]:
        total = np.zeros(len(index.STATES) + 1, np.int64)
        used = 0
        for record in node.slabs.values():
            counts = np.zeros_like(total)
            self._shelves.census(record, counts)
            total += counts
            slots = int(counts.sum())
            used += (slots - int(counts[index.FREE] + counts[index.CLOSED])) * (node.slab_bytes // slots)
        return {
            "index": node.index,
            "tier": "gpu" if node.on_gpu else "cpu",
            "state": "leaving" if node.leaving and node.state == "alive" else node.state,
            "idle_s": now - node.last_beat,
            "slabs": len(node.slabs),
            "spare_slabs": len(node.spare),
            "limit": node.limit,
            "slab_bytes": node.slab_bytes,
            "bytes_used": used,
            "slots": int(total[: index.CLOSED].sum()),
            **{state: int(total[i]) for i, state in enumerate(index.STATES)},
        }
