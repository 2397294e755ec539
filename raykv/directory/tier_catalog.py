"""The external tiers below the nodes' memory, as the directory knows them: what lies there, and what goes down."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.config import KEYS_PER_CALL, MIB, slab_bytes
from raykv.directory.kernels import demotion, index, slabs
from raykv.directory.size_classes import Places, Rows, Shelves
from raykv.protocol import ALIGN, Sunk, slot_bytes

Keys = NDArray[np.uint64]
BATCH_BYTES = 32 * MIB  # go down at a time
NOTHING = Sunk(b"", b"", b"", b"", 0)
SUSPECT = "suspect"  # in place of a node, of an owner that is


@dataclass
class Tier:
    """An external tier. owner: the node whose it is; None: all nodes share it."""

    index: int
    capacity: int
    owner: str | None
    spare: list[int]
    slab_bytes: int
    shelves: dict[int, int] = field(default_factory=dict)  # by the bytes that a block takes
    slabs: dict[int, int] = field(default_factory=dict)  # slab record by slab number
    doomed: dict[bytes, None] = field(default_factory=dict)  # keys whose bytes are to be deleted, in order
    unreached: set[str] = field(default_factory=set)  # nodes for which it is out of order: nobody is sent there
    sinking: dict[str, tuple[Rows, Rows]] = field(default_factory=dict)  # by node, rows and generations on their way
    lister: str | None = None  # the node that is telling what lies there from before
    listed: bool = False
    cleared: bool = False  # before all was told: that is to be deleted too
    deleting: dict[str, tuple[int, list[bytes]]] = field(default_factory=dict)  # by node: answer, keys it was told
    answers: int = 0
    content: bytes = b""  # what was there when it had been lost
    sunk: int = 0  # blocks that went down


class Below:
    """The tiers of a pool. share: of a node's slots, which must be free or lie below too; min_uses: of what goes down.

    Slabs of a tier are pieces of its capacity, so that its blocks are rows like those of memory.
    """

    def __init__(self, shelves: Shelves, share: float, min_uses: int) -> None:
        self.share, self.min_uses = share, min_uses
        self.tiers: dict[str, Tier] = {}
        self._shelves = shelves

    def tier_of(self, node: str) -> Tier | None:
        """Where a node's blocks go down to."""
        return self.tiers.get(node) or self.tiers.get("")

    def beat(
        self, node: str, capacity: int, shared: bool, reached: bool, new_index: Callable[[], int]
    ) -> tuple[int, bool]:
        """A node has a tier, and reaches it or not. Returns (its index, whether the node is to tell what is there)."""
        name = "" if shared else node
        tier = self.tiers.get(name)
        if tier is None:
            slab = slab_bytes(capacity)
            spare = list(reversed(range(max(1, capacity // slab))))
            tier = self.tiers[name] = Tier(new_index(), capacity, None if shared else node, spare, slab)
        self._reach(tier, node, reached)
        if reached and tier.lister is None:
            tier.lister = node
        return tier.index, not tier.listed and tier.lister == node

    def suspect(self, node: str, suspect: bool) -> None:
        """A node does not answer, or does again: what only it can read is not offered meanwhile."""
        if node in self.tiers:
            self._reach(self.tiers[node], SUSPECT, not suspect)

    def _reach(self, tier: Tier, who: str, reached: bool) -> None:
        (tier.unreached.discard if reached else tier.unreached.add)(who)
        for shelf in tier.shelves.values():
            self._shelves.c.shelves[shelf]["offered"] = index.NOT_OFFERED if tier.unreached else index.TO_READERS

    def leave(self, node: str) -> None:
        """A node is gone, and with it what only it could read."""
        for name, tier in list(self.tiers.items()):
            self._reach(tier, node, True)
            self._give_up(tier, node)
            self._still_doomed(tier, node, -1)
            if tier.lister == node:
                tier.lister = None
            if tier.owner == node:
                self._close(tier)
                del self.tiers[name]

    def forget(self, node: str, content: bytes) -> None:
        """What a tier held is gone from there, and something of another name is there."""
        tier = self.tier_of(node)
        if tier and tier.content != content:
            tier.content = content
            self._close(tier)

    def _close(self, tier: Tier) -> None:
        for number, record in tier.slabs.items():
            self._shelves.close(tier.index, record)
            tier.spare.append(number)
        tier.slabs.clear()
        tier.doomed.clear()
        tier.deleting.clear()
        self.look_again(shelf for shelves in self._shelves.sizes.values() for shelf in shelves)

    def look_again(self, shelves: Iterable[int]) -> None:
        """Some of what was to go down from these did not, or is no longer there."""
        for shelf in shelves:
            demotion.forget_marks(self._shelves.c, shelf)

    def clear(self) -> None:
        """All that lies below is to be deleted."""
        for tier in self.tiers.values():
            tier.cleared = not tier.listed
            for record in tier.slabs.values():
                self._doom_slab(tier, record)
                slabs.clear_rows(self._shelves.c, *self._shelves.span(record))

    def found(self, node: str, keys: Keys, sizes: NDArray[np.int64], last: bool) -> None:
        """What a node lists of its tier, oldest first: keys and bytes of blocks. What finds no room is deleted."""
        tier = self.tier_of(node)
        if tier is None or tier.listed or tier.lister != node:
            return
        tier.listed = last
        for size in np.unique(sizes).tolist():
            k = keys[sizes == size]
            shelf = -1 if tier.cleared else self._shelf(tier, slot_bytes(size) + ALIGN)
            refused = np.ones(len(k), np.bool_)
            if shelf >= 0:
                self._give_slots(tier, shelf, len(k))
                demotion.found(self._shelves.c, shelf, k, refused)
            self._settle_found(tier, k, refused)

    def _settle_found(self, tier: Tier, keys: Keys, refused: NDArray[np.bool_]) -> None:
        there = np.zeros(len(keys), np.bool_)
        demotion.in_tier(self._shelves.c, tier.index, keys, there)  # it may have been told with two sizes
        for key in _split(keys[there]) if tier.doomed else ():
            tier.doomed.pop(key, None)
        tier.doomed.update(dict.fromkeys(_split(keys[refused & ~there])))

    def sink(
        self, node: str, shelves: dict[int, int], slots: dict[int, int], share: float, looks: int, pinned: Rows
    ) -> Sunk:
        """What of a node's blocks goes down next, until `share` of its `slots` (by size) can be had for nothing.

        looks: at so many rows of a size, after which nothing more may be found though there is. pinned: rows that go
        down where nothing else is left to.
        """
        tier = self.tier_of(node)
        if tier is None or tier.unreached or not tier.listed:
            return NOTHING
        source, target, left = [], [np.zeros(0, np.int64)], BATCH_BYTES
        for stride, shelf in shelves.items():
            below = self._shelf(tier, stride + ALIGN)
            want = min(max(left // stride, int(left == BATCH_BYTES)), KEYS_PER_CALL)
            missing = demotion.short(self._shelves.c, shelf, slots[stride], share)
            if below < 0 or want <= 0 or missing <= 0:
                continue
            self._give_slots(tier, below, min(want, int(missing)))
            rows, places, gone = np.empty(want, np.int64), np.empty(want, np.int64), np.empty((want, 2), np.uint64)
            n, evicted = demotion.sink(
                self._shelves.c, shelf, slots[stride], share, self.min_uses, below, looks, pinned, rows, places, gone
            )
            tier.doomed.update(dict.fromkeys(_split(gone[:evicted])))
            source.append(self._shelves.describe(rows[:n], stride)[1].tobytes())
            target.append(places[:n])
            left -= n * stride
        rows = np.concatenate(target)
        tier.sinking[node] = rows, self._shelves.c.rows["gen"][rows]
        return self._answer(tier, node, b"".join(source), rows)

    def sunk(self, node: str, places: Places, keys: Keys, stored: NDArray[np.uint8], seen: int) -> bool:
        """What became of a node's blocks that were to go down. Returns whether some did not.

        Those of which it does not speak did not. What did not, or is not wanted any more, may lie there in part or from
        before, and is deleted, unless its key went down again since: then those are its bytes. seen: the answer whose
        deletions it has carried out.
        """
        tier = self.tier_of(node)
        if tier is None:
            return False
        ours = places["node"] == tier.index  # else another directory's: they are listed, or will be
        (rows, gens), lost = self._shelves.rows_of(places[ours]), np.zeros(int(ours.sum()), np.bool_)
        tier.sunk += int(demotion.sunk(self._shelves.c, rows, gens, stored[ours], lost))
        given_up = self._give_up(tier, node)
        self._doom(tier, keys[ours][lost == (stored[ours] > 0)])
        self._still_doomed(tier, node, seen)
        return given_up or not stored.all()

    def _still_doomed(self, tier: Tier, node: str, seen: int) -> None:
        """What a node was told to delete, unless it says that it did."""
        number, keys = tier.deleting.pop(node, (seen, []))
        if number != seen:
            self._doom(tier, np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2))

    def _doom(self, tier: Tier, keys: Keys) -> None:
        """Have keys deleted, but for those that lie there, or are about to."""
        there = np.zeros(len(keys), np.bool_)
        demotion.in_tier(self._shelves.c, tier.index, keys, there)
        tier.doomed.update(dict.fromkeys(_split(keys[~there])))

    def _give_up(self, tier: Tier, node: str) -> bool:
        rows, gens = tier.sinking.pop(node, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        c = self._shelves.c
        rows = rows[(c.rows["gen"][rows] == gens) & (c.rows["state"][rows] == index.SINKING)]
        tier.doomed.update(dict.fromkeys(_split(self._keys(rows))))  # the node may have written them before it died
        demotion.give_up(c, rows)
        return len(rows) > 0

    def _keys(self, rows: Rows) -> Keys:
        c = self._shelves.c
        return np.stack([c.rows["k0"][rows], c.rows["k1"][rows]], axis=1)

    def doom(self, rows: Rows, gens: Rows) -> None:
        """Those of the rows that lie below are about to be dropped: their bytes are of no use."""
        c = self._shelves.c
        rows = rows[(rows >= 0) & (c.rows["gen"][rows] == gens) & (c.rows["state"][rows] == index.EXTERNAL)]
        owners = c.shelves["node"][c.slabs["shelf"][c.pages[rows >> index.PAGE_BITS]]]
        doomed = {tier.index: tier.doomed for tier in self.tiers.values()}
        for owner, key in zip(owners.tolist(), _split(self._keys(rows)), strict=True):
            doomed[owner][key] = None

    def stats(self) -> dict[str, dict[str, Any]]:
        """By the node that owns a tier, or "" for one that all share."""
        return {name: self._tier_stats(tier) for name, tier in self.tiers.items()}

    def _tier_stats(self, tier: Tier) -> dict[str, Any]:
        blocks, used, evicted = 0, 0, 0
        for stride, shelf in tier.shelves.items():
            counts = np.zeros(len(index.STATES) + 1, np.int64)
            for record in tier.slabs.values():
                if self._shelves.c.slabs[record]["shelf"] == shelf:
                    self._shelves.census(record, counts)
            blocks += int(counts[index.EXTERNAL])
            used += int(counts[index.EXTERNAL] + counts[index.SINKING]) * stride
            evicted += int(self._shelves.c.shelves[shelf]["evicted"])
        return {
            "index": tier.index,
            "state": "down" if tier.unreached else "up" if tier.listed else "listing",
            "blocks": blocks,
            "bytes_used": used,
            "capacity": tier.capacity,
            "sunk": tier.sunk,
            "evicted": evicted,
            "doomed": len(tier.doomed),
        }

    def _answer(self, tier: Tier, node: str, source: bytes, target: Rows) -> Sunk:
        keys = self._keys(target)
        for key in _split(keys) if tier.doomed else ():
            tier.doomed.pop(key, None)  # it is wanted there again
        doomed = list(islice(tier.doomed, KEYS_PER_CALL))  # of millions, after `clear`
        for key in doomed:
            del tier.doomed[key]
        tier.answers += 1
        tier.deleting[node] = tier.answers, doomed
        places = self._shelves.describe(target, 0)[1].tobytes()
        return Sunk(source, keys.tobytes(), places, b"".join(doomed), tier.answers)

    # ------------------------------------------------------------------ slabs

    def _shelf(self, tier: Tier, stride: int) -> int:
        if not ALIGN < stride <= tier.slab_bytes:
            return -1
        if stride not in tier.shelves:
            tier.shelves[stride] = self._shelves.add_below(
                tier.index, index.NOT_OFFERED if tier.unreached else index.TO_READERS
            )
        return tier.shelves[stride]

    def _give_slots(self, tier: Tier, shelf: int, need: int) -> None:
        """Spare slabs until `need` blocks fit. A size that has no slot takes the slab that was used longest ago."""
        stride = next(size for size, there in tier.shelves.items() if there == shelf)
        while self._shelves.takeable(shelf) < need and tier.spare:
            self._open_slab(tier, tier.spare.pop(), shelf, stride)
        if any(self._shelves.c.slabs[record]["shelf"] == shelf for record in tier.slabs.values()):
            return
        ages = [
            (self._shelves.census(record, np.zeros(len(index.STATES) + 1, np.int64)), number)
            for number, record in tier.slabs.items()
        ]
        idle = [(newest, number) for (newest, held), number in ages if not held]
        if idle:
            number = min(idle)[1]
            record = tier.slabs.pop(number)
            self._doom_slab(tier, record)
            self._shelves.close(tier.index, record)
            self._open_slab(tier, number, shelf, stride)

    def _open_slab(self, tier: Tier, number: int, shelf: int, stride: int) -> None:
        gen = self._shelves.next_gen()
        tier.slabs[number] = self._shelves.open(tier.index, number, shelf, tier.slab_bytes // stride, gen)

    def _doom_slab(self, tier: Tier, record: int) -> None:
        base, slots = self._shelves.span(record)
        rows, n = np.empty(slots, np.int64), 0
        for state in (index.EXTERNAL, index.SINKING):
            n = slabs.in_state(self._shelves.c, base, slots, state, rows, n)
        tier.doomed.update(dict.fromkeys(_split(self._keys(rows[:n]))))


def _split(keys: Keys) -> list[bytes]:
    data = keys.tobytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]
