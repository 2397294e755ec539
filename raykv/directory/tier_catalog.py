"""The external tiers below the nodes' memory, as the directory knows them: what lies there, and what goes down."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.config import KEYS_PER_CALL, MIB, slab_bytes
from raykv.directory.kernels import demotion, index, slabs
from raykv.directory.size_classes import Locations, Rows, SizeClasses
from raykv.protocol import ALIGN, Demotions, TierReply, TierReport, slot_bytes

Keys = NDArray[np.uint64]
BATCH_BYTES = 32 * MIB  # go down at a time
NOTHING = Demotions(b"", b"", b"", b"", 0)
SUSPECT = "suspect"  # in place of a node, of an owner that is


@dataclass
class Tier:
    """An external tier. owner: the node whose it is; None: all nodes share it."""

    index: int
    capacity: int
    owner: str | None
    spare: list[int]
    slab_bytes: int
    size_classes: dict[int, int] = field(default_factory=dict)  # by the bytes that a block takes
    slabs: dict[int, int] = field(default_factory=dict)  # slab record by slab number
    to_delete: dict[bytes, None] = field(default_factory=dict)  # keys whose bytes are to be deleted, in order
    unreached: set[str] = field(default_factory=set)  # nodes for which it is out of order: nobody is sent there
    demoting: dict[str, tuple[Rows, Rows]] = field(default_factory=dict)  # by node, rows and generations on their way
    lister: str | None = None  # the node that is telling what lies there from before
    listed: bool = False
    cleared: bool = False  # before all was told: that is to be deleted too
    deleting: dict[str, tuple[int, list[bytes]]] = field(default_factory=dict)  # by node: answer, keys it was told
    answers: int = 0
    content: bytes = b""  # what was there when it had been lost
    demoted: int = 0  # blocks that went down


class TierCatalog:
    """The tiers of a pool. share: of a node's slots, which must be free or lie below too; min_uses: of what goes down.

    Slabs of a tier are pieces of its capacity, so that its blocks are rows like those of memory.
    """

    def __init__(self, size_classes: SizeClasses, share: float, min_uses: int) -> None:
        self.share, self.min_uses = share, min_uses
        self.tiers: dict[str, Tier] = {}
        self._size_classes = size_classes

    def tier_of(self, node: str) -> Tier | None:
        """Where a node's blocks go down to."""
        return self.tiers.get(node) or self.tiers.get("")

    def heartbeat(self, node: str, report: TierReport, new_index: Callable[[], int]) -> TierReply:
        """A node has a tier, and reaches it or not."""
        name = "" if report.shared else node
        tier = self.tiers.get(name)
        if tier is None:
            slab = slab_bytes(report.capacity)
            spare = list(reversed(range(max(1, report.capacity // slab))))
            owner = None if report.shared else node
            tier = self.tiers[name] = Tier(new_index(), report.capacity, owner, spare, slab)
        self._reach(tier, node, report.reached)
        if report.reached and tier.lister is None:
            tier.lister = node
        return TierReply(tier.index, not tier.listed and tier.lister == node)

    def suspect(self, node: str, suspect: bool) -> None:
        """A node does not answer, or does again: what only it can read is not offered meanwhile."""
        if node in self.tiers:
            self._reach(self.tiers[node], SUSPECT, not suspect)

    def _reach(self, tier: Tier, who: str, reached: bool) -> None:
        (tier.unreached.discard if reached else tier.unreached.add)(who)
        for size_class in tier.size_classes.values():
            self._size_classes.c.size_classes[size_class]["offered"] = (
                index.NOT_OFFERED if tier.unreached else index.TO_READERS
            )

    def leave(self, node: str) -> None:
        """A node is gone, and with it what only it could read."""
        for name, tier in list(self.tiers.items()):
            self._reach(tier, node, True)
            self._give_up(tier, node)
            self._reschedule_delete(tier, node, -1)
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
            self._size_classes.close(tier.index, record)
            tier.spare.append(number)
        tier.slabs.clear()
        tier.to_delete.clear()
        tier.deleting.clear()
        self.refresh(size_class for size_classes in self._size_classes.sizes.values() for size_class in size_classes)

    def refresh(self, size_classes: Iterable[int]) -> None:
        """Some of what was to go down from these did not, or is no longer there."""
        for size_class in size_classes:
            demotion.forget_clean_tail(self._size_classes.c, size_class)

    def clear(self) -> None:
        """All that lies below is to be deleted."""
        for tier in self.tiers.values():
            tier.cleared = not tier.listed
            for record in tier.slabs.values():
                self._schedule_delete_slab(tier, record)
                slabs.clear_rows(self._size_classes.c, *self._size_classes.span(record))

    def report_existing(self, node: str, keys: Keys, sizes: NDArray[np.int64], last: bool) -> None:
        """What a node lists of its tier, oldest first: keys and bytes of blocks. What finds no room is deleted."""
        tier = self.tier_of(node)
        if tier is None or tier.listed or tier.lister != node:
            return
        tier.listed = last
        for size in np.unique(sizes).tolist():
            k = keys[sizes == size]
            size_class = -1 if tier.cleared else self._size_class(tier, slot_bytes(size) + ALIGN)
            refused = np.ones(len(k), np.bool_)
            if size_class >= 0:
                self._give_slots(tier, size_class, len(k))
                demotion.report_existing(self._size_classes.c, size_class, k, refused)
            self._settle_found(tier, k, refused)

    def _settle_found(self, tier: Tier, keys: Keys, refused: NDArray[np.bool_]) -> None:
        there = np.zeros(len(keys), np.bool_)
        demotion.in_tier(self._size_classes.c, tier.index, keys, there)  # it may have been told with two sizes
        for key in _split(keys[there]) if tier.to_delete else ():
            tier.to_delete.pop(key, None)
        tier.to_delete.update(dict.fromkeys(_split(keys[refused & ~there])))

    def demote(
        self, node: str, size_classes: dict[int, int], slots: dict[int, int], share: float, looks: int, pinned: Rows
    ) -> Demotions:
        """What of a node's blocks goes down next, until `share` of its `slots` (by size) can be had for nothing.

        looks: at so many rows of a size, after which nothing more may be found though there is. pinned: rows that go
        down where nothing else is left to.
        """
        tier = self.tier_of(node)
        if tier is None or tier.unreached or not tier.listed:
            return NOTHING
        source, target, left = [], [np.zeros(0, np.int64)], BATCH_BYTES
        for stride, size_class in size_classes.items():
            tier_class = self._size_class(tier, stride + ALIGN)
            want = min(max(left // stride, int(left == BATCH_BYTES)), KEYS_PER_CALL)
            missing = demotion.short(self._size_classes.c, size_class, slots[stride], share)
            if tier_class < 0 or want <= 0 or missing <= 0:
                continue
            self._give_slots(tier, tier_class, min(want, int(missing)))
            rows, locations, gone = np.empty(want, np.int64), np.empty(want, np.int64), np.empty((want, 2), np.uint64)
            n, evicted = demotion.demote(
                self._size_classes.c,
                size_class,
                slots[stride],
                share,
                self.min_uses,
                tier_class,
                looks,
                pinned,
                rows,
                locations,
                gone,
            )
            tier.to_delete.update(dict.fromkeys(_split(gone[:evicted])))
            source.append(self._size_classes.describe(rows[:n], stride)[1].tobytes())
            target.append(locations[:n])
            left -= n * stride
        rows = np.concatenate(target)
        tier.demoting[node] = rows, self._size_classes.c.rows["gen"][rows]
        return self._answer(tier, node, b"".join(source), rows)

    def demoted(self, node: str, locations: Locations, keys: Keys, stored: NDArray[np.uint8], seen: int) -> bool:
        """What became of a node's blocks that were to go down. Returns whether some did not.

        Those of which it does not speak did not. What did not, or is not wanted any more, may lie there in part or from
        before, and is deleted, unless its key went down again since: then those are its bytes. seen: the answer whose
        deletions it has carried out.
        """
        tier = self.tier_of(node)
        if tier is None:
            return False
        ours = locations["node"] == tier.index  # else another directory's: they are listed, or will be
        (rows, gens), lost = self._size_classes.rows_of(locations[ours]), np.zeros(int(ours.sum()), np.bool_)
        tier.demoted += int(demotion.demoted(self._size_classes.c, rows, gens, stored[ours], lost))
        given_up = self._give_up(tier, node)
        self._schedule_delete(tier, keys[ours][lost == (stored[ours] > 0)])
        self._reschedule_delete(tier, node, seen)
        return given_up or not stored.all()

    def _reschedule_delete(self, tier: Tier, node: str, seen: int) -> None:
        """What a node was told to delete, unless it says that it did."""
        number, keys = tier.deleting.pop(node, (seen, []))
        if number != seen:
            self._schedule_delete(tier, np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2))

    def _schedule_delete(self, tier: Tier, keys: Keys) -> None:
        """Have keys deleted, but for those that lie there, or are about to."""
        there = np.zeros(len(keys), np.bool_)
        demotion.in_tier(self._size_classes.c, tier.index, keys, there)
        tier.to_delete.update(dict.fromkeys(_split(keys[~there])))

    def _give_up(self, tier: Tier, node: str) -> bool:
        rows, gens = tier.demoting.pop(node, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        c = self._size_classes.c
        rows = rows[(c.rows["gen"][rows] == gens) & (c.rows["state"][rows] == index.DEMOTING)]
        tier.to_delete.update(dict.fromkeys(_split(self._keys(rows))))  # the node may have written them before it died
        demotion.give_up(c, rows)
        return len(rows) > 0

    def _keys(self, rows: Rows) -> Keys:
        c = self._size_classes.c
        return np.stack([c.rows["k0"][rows], c.rows["k1"][rows]], axis=1)

    def schedule_delete(self, rows: Rows, gens: Rows) -> None:
        """Those of the rows that lie below are about to be dropped: their bytes are of no use."""
        c = self._size_classes.c
        rows = rows[(rows >= 0) & (c.rows["gen"][rows] == gens) & (c.rows["state"][rows] == index.EXTERNAL)]
        owners = c.size_classes["node"][c.slabs["size_class"][c.pages[rows >> index.PAGE_BITS]]]
        to_delete = {tier.index: tier.to_delete for tier in self.tiers.values()}
        for owner, key in zip(owners.tolist(), _split(self._keys(rows)), strict=True):
            to_delete[owner][key] = None

    def stats(self) -> dict[str, dict[str, Any]]:
        """By the node that owns a tier, or "" for one that all share."""
        return {name: self._tier_stats(tier) for name, tier in self.tiers.items()}

    def _tier_stats(self, tier: Tier) -> dict[str, Any]:
        blocks, used, evicted = 0, 0, 0
        for stride, size_class in tier.size_classes.items():
            counts = np.zeros(len(index.STATES) + 1, np.int64)
            for record in tier.slabs.values():
                if self._size_classes.c.slabs[record]["size_class"] == size_class:
                    self._size_classes.census(record, counts)
            blocks += int(counts[index.EXTERNAL])
            used += int(counts[index.EXTERNAL] + counts[index.DEMOTING]) * stride
            evicted += int(self._size_classes.c.size_classes[size_class]["evicted"])
        return {
            "index": tier.index,
            "state": "down" if tier.unreached else "up" if tier.listed else "listing",
            "blocks": blocks,
            "bytes_used": used,
            "capacity": tier.capacity,
            "demoted": tier.demoted,
            "evicted": evicted,
            "to_delete": len(tier.to_delete),
        }

    def _answer(self, tier: Tier, node: str, source: bytes, target: Rows) -> Demotions:
        keys = self._keys(target)
        for key in _split(keys) if tier.to_delete else ():
            tier.to_delete.pop(key, None)  # it is wanted there again
        to_delete = list(islice(tier.to_delete, KEYS_PER_CALL))  # of millions, after `clear`
        for key in to_delete:
            del tier.to_delete[key]
        tier.answers += 1
        tier.deleting[node] = tier.answers, to_delete
        locations = self._size_classes.describe(target, 0)[1].tobytes()
        return Demotions(source, keys.tobytes(), locations, b"".join(to_delete), tier.answers)

    # ------------------------------------------------------------------ slabs

    def _size_class(self, tier: Tier, stride: int) -> int:
        if not ALIGN < stride <= tier.slab_bytes:
            return -1
        if stride not in tier.size_classes:
            tier.size_classes[stride] = self._size_classes.add_tier(
                tier.index, index.NOT_OFFERED if tier.unreached else index.TO_READERS
            )
        return tier.size_classes[stride]

    def _give_slots(self, tier: Tier, size_class: int, need: int) -> None:
        """Spare slabs until `need` blocks fit. A size that has no slot takes the slab that was used longest ago."""
        stride = next(size for size, there in tier.size_classes.items() if there == size_class)
        while self._size_classes.takeable(size_class) < need and tier.spare:
            self._open_slab(tier, tier.spare.pop(), size_class, stride)
        if any(self._size_classes.c.slabs[record]["size_class"] == size_class for record in tier.slabs.values()):
            return
        ages = [
            (self._size_classes.census(record, np.zeros(len(index.STATES) + 1, np.int64)), number)
            for number, record in tier.slabs.items()
        ]
        idle = [(newest, number) for (newest, held), number in ages if not held]
        if idle:
            number = min(idle)[1]
            record = tier.slabs.pop(number)
            self._schedule_delete_slab(tier, record)
            self._size_classes.close(tier.index, record)
            self._open_slab(tier, number, size_class, stride)

    def _open_slab(self, tier: Tier, number: int, size_class: int, stride: int) -> None:
        gen = self._size_classes.next_gen()
        tier.slabs[number] = self._size_classes.open(tier.index, number, size_class, tier.slab_bytes // stride, gen)

    def _schedule_delete_slab(self, tier: Tier, record: int) -> None:
        base, slots = self._size_classes.span(record)
        rows, n = np.empty(slots, np.int64), 0
        for state in (index.EXTERNAL, index.DEMOTING):
            n = slabs.in_state(self._size_classes.c, base, slots, state, rows, n)
        tier.to_delete.update(dict.fromkeys(_split(self._keys(rows[:n]))))


def _split(keys: Keys) -> list[bytes]:
    data = keys.tobytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]
