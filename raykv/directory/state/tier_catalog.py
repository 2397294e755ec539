"""The external tiers of a pool: their blocks, the blocks to copy there, and the keys to delete there.

A tier is cut into slabs like memory, so its blocks are rows too. The node stores do the I/O: each answer to `demote`
names blocks to copy and keys to delete, and the node's next call of `demote` reports the outcome.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.config import KEYS_PER_CALL, MIB, slab_bytes
from raykv.directory.kernels import columns, demotion, slabs
from raykv.directory.state.arrays import KeyArray, RowArray, key_array, split_keys
from raykv.directory.state.demotion_batch import Batch, blocks_per_call
from raykv.directory.state.size_classes import SizeClasses
from raykv.protocol.location import ALIGN, SLABS_MAX, Locations, slot_bytes
from raykv.protocol.tiers import Demotions, TierReply, TierReport

BATCH_BYTES = 32 * MIB  # maximum bytes that one answer demotes, for all sizes together
NOTHING = Demotions(b"", b"", b"", b"", 0)
SUSPECT = "suspect"  # in `unreached`: the tier's owner is suspect


@dataclass
class ExternalTier:
    """One external tier, as the directory knows it."""

    index: int
    capacity: int
    owner: str | None  # name of the node that owns the tier; None: all nodes share it
    spare: list[int]  # numbers of slabs that serve no size
    slab_bytes: int
    size_classes: dict[int, int] = field(default_factory=dict)  # by the bytes that a block takes there
    slabs: dict[int, int] = field(default_factory=dict)  # slab record by slab number
    to_delete: dict[bytes, None] = field(default_factory=dict)  # keys to delete there, in order
    unreached: set[str] = field(default_factory=set)  # nodes that can't reach the tier; if any can't, it is not offered
    demoting: dict[str, tuple[RowArray, RowArray]] = field(default_factory=dict)  # by node: rows of its last answer
    lister: str | None = None  # the node that lists the blocks which the tier had before this directory knew it
    listed: bool = False  # whether the lister has listed all these blocks
    cleared: bool = False  # whether the tier was cleared while not `listed`: then blocks listed later are deleted
    # By node: number of the last answer to the node, and the keys to delete that this answer named
    deleting: dict[str, tuple[int, list[bytes]]] = field(default_factory=dict)
    answers: int = 0  # number of answers so far; also the number of the last answer
    content: bytes = b""  # name of the present content; b"" if content was never lost
    demoted: int = 0  # number of blocks demoted so far


class TierCatalog:
    """The external tiers of a pool, by the node that owns the tier; under "" the tier that all nodes share."""

    def __init__(self, size_classes: SizeClasses, share: float, min_uses: int) -> None:
        """share: share of a node's slots to keep free or clean. min_uses: minimum matches of a demoted block."""
        self.share, self.min_uses = float(share), min_uses
        self.tiers: dict[str, ExternalTier] = {}
        self._size_classes = size_classes

    @property
    def _c(self) -> columns.Columns:
        return self._size_classes.c

    def tier_of(self, node: str) -> ExternalTier | None:
        """Return the tier to which a node's blocks are demoted."""
        return self.tiers.get(node) or self.tiers.get("")

    def heartbeat(self, node: str, report: TierReport, new_index: Callable[[], int]) -> TierReply:
        """Process a node's report on its tier. new_index: makes the index of a new tier."""
        name = "" if report.shared else node
        tier = self.tiers.get(name)
        if tier is None:
            slab = slab_bytes(report.capacity)
            spare = list(reversed(range(max(1, min(report.capacity // slab, SLABS_MAX)))))
            owner = None if report.shared else node
            tier = self.tiers[name] = ExternalTier(new_index(), report.capacity, owner, spare, slab)
            self._c.state[columns.TIERED] = True
        self._set_reached(tier, node, report.reached)
        if report.reached and tier.lister is None:
            tier.lister = node
        return TierReply(tier.index, not tier.listed and tier.lister == node)

    def set_suspect(self, node: str, suspect: bool) -> None:
        """Note that a node is silent, or answers again. While the node is silent, its own tier is not offered."""
        if node in self.tiers:
            self._set_reached(self.tiers[node], SUSPECT, not suspect)

    def _set_reached(self, tier: ExternalTier, who: str, reached: bool) -> None:
        (tier.unreached.discard if reached else tier.unreached.add)(who)
        for size_class in tier.size_classes.values():
            self._c.size_classes[size_class]["offered"] = columns.NOT_OFFERED if tier.unreached else columns.TO_READERS

    def leave(self, node: str) -> None:
        """Remove a node that is gone. A tier that only this node could read is gone too."""
        for name, tier in list(self.tiers.items()):
            self._set_reached(tier, node, True)
            self._cancel(tier, node)
            self._reschedule_delete(tier, node, -1)
            if tier.lister == node:
                tier.lister = None
            if tier.owner == node:
                self._close(tier)
                del self.tiers[name]

    def lose_content(self, node: str, content: bytes) -> None:
        """Forget the lost content of a node's tier. content: name of the new content. Ignores a repeated report."""
        tier = self.tier_of(node)
        if tier and tier.content != content:
            tier.content = content
            self._close(tier)

    def _close(self, tier: ExternalTier) -> None:
        for number, record in tier.slabs.items():
            self._size_classes.close(tier.index, record)
            tier.spare.append(number)
        tier.slabs.clear()
        tier.to_delete.clear()
        tier.deleting.clear()
        self.refresh(size_class for size_classes in self._size_classes.classes.values() for size_class in size_classes)

    def refresh(self, size_classes: Iterable[int]) -> None:
        """Make demotion begin with the oldest blocks again, as some clean blocks may no longer be clean."""
        for size_class in size_classes:
            demotion.forget_clean_tail(self._c, size_class)

    def clear(self) -> None:
        """Forget all blocks in all tiers, and have the tiers delete these blocks."""
        for tier in self.tiers.values():
            tier.cleared = not tier.listed
            for record in tier.slabs.values():
                self._schedule_delete_slab(tier, record)
                slabs.clear_rows(self._c, *self._size_classes.span(record))

    def report_existing(self, node: str, keys: KeyArray, sizes: NDArray[np.int64], last: bool) -> None:
        """Adopt blocks that a node found in its tier, oldest first. Deletes blocks without room. sizes: block_bytes."""
        tier = self.tier_of(node)
        if tier is None or tier.listed or tier.lister != node:
            return
        tier.listed = last
        for size in np.unique(sizes).tolist():
            k = keys[sizes == size]
            size_class = -1 if tier.cleared else self._size_class(tier, slot_bytes(size) + ALIGN)
            refused = np.ones(len(k), np.bool_)
            if size_class >= 0:
                self._provide_slots(tier, size_class, len(k))
                demotion.report_existing(self._c, size_class, k, refused)
            there = self._in_tier(tier, k)  # possibly in another size, as a node may list a key with two sizes
            for key in split_keys(k[there].tobytes()) if tier.to_delete else ():
                tier.to_delete.pop(key, None)
            self._add_to_delete(tier, k[refused & ~there])

    def demote(
        self,
        node: str,
        size_classes: dict[int, int],
        slots: dict[int, int],
        shares: dict[int, float],
        examined: int,
        pinned: RowArray,
    ) -> Demotions:
        """Choose a node's blocks to demote, oldest first, until the share of each size's slots is free or clean.

        shares, slots: by size. examined: maximum number of rows of a size to examine; further rows must wait.
        pinned: rows that are demoted once no other row is left to demote.
        """
        tier = self.tier_of(node)
        if tier is None or tier.unreached or not tier.listed:
            return NOTHING
        batch, left = Batch(self._size_classes), BATCH_BYTES
        for stride, size_class in size_classes.items():
            tier_class = self._size_class(tier, stride + ALIGN)
            want = blocks_per_call(stride, left, BATCH_BYTES)
            goal = columns.Goal(size_class, slots[stride], shares[stride])
            short = int(demotion.shortfall(self._c, goal))
            if tier_class < 0 or want <= 0 or short <= 0:
                continue
            self._provide_slots(tier, tier_class, min(want, short))
            source, target = np.empty((2, want), np.int64)
            chosen = columns.Chosen(source, target, evicted=np.empty((want, 2), np.uint64))
            n, count = demotion.demote(self._c, goal, self.min_uses, tier_class, examined, pinned, chosen)
            self._add_to_delete(tier, chosen.evicted[:count])
            batch.add(stride, chosen.source[:n], chosen.target[:n])
            left -= n * stride
        tier.demoting[node] = batch.target, self._c.rows["gen"][batch.target]
        return self._answer(tier, node, batch)

    def demoted(self, node: str, locations: Locations, keys: KeyArray, stored: NDArray[np.uint8], seen: int) -> bool:
        """Process a node's report on the blocks of earlier answers. Returns whether any block was not stored.

        Blocks of these answers that the report does not name were not stored either. A block that was not stored, or is
        no longer wanted, may have left bytes in the tier, so its key is deleted. A key that was demoted again stays:
        the bytes belong to the newer copy. seen: number of the answer whose deletions the node has carried out.
        """
        tier = self.tier_of(node)
        if tier is None:
            return False
        ours = locations["node"] == tier.index  # other locations are of an earlier directory; the tier is listed anew
        (rows, gens), lost = self._size_classes.rows_of(locations[ours]), np.zeros(int(ours.sum()), np.bool_)
        tier.demoted += int(demotion.demoted(self._c, rows, gens, stored[ours], lost))
        cancelled = self._cancel(tier, node)
        self._schedule_delete(tier, keys[ours][lost == (stored[ours] > 0)])
        self._reschedule_delete(tier, node, seen)
        return cancelled or not stored.all()

    def _reschedule_delete(self, tier: ExternalTier, node: str, seen: int) -> None:
        """Schedule the deletions of a node's last answer again if the node has not `seen` that answer."""
        number, keys = tier.deleting.pop(node, (seen, []))
        if number != seen:
            self._schedule_delete(tier, key_array(b"".join(keys)))

    def _schedule_delete(self, tier: ExternalTier, keys: KeyArray) -> None:
        """Schedule keys for deletion, except keys that are in the tier or on their way to the tier."""
        self._add_to_delete(tier, keys[~self._in_tier(tier, keys)])

    def _in_tier(self, tier: ExternalTier, keys: KeyArray) -> NDArray[np.bool_]:
        out = np.zeros(len(keys), np.bool_)
        demotion.in_tier(self._c, tier.index, keys, out)
        return out

    def _add_to_delete(self, tier: ExternalTier, keys: KeyArray) -> None:
        tier.to_delete.update(dict.fromkeys(split_keys(keys.tobytes())))

    def _cancel(self, tier: ExternalTier, node: str) -> bool:
        """Free rows of the node's last answer that are still DEMOTING. Returns whether there were any."""
        rows, gens = tier.demoting.pop(node, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        c = self._c
        rows = rows[(c.rows["gen"][rows] == gens) & (c.rows["state"][rows] == columns.DEMOTING)]
        keys = split_keys(self._size_classes.keys_of(rows))
        tier.to_delete.update(dict.fromkeys(keys))  # the node may have written these before it died
        demotion.cancel(c, rows)
        return len(rows) > 0

    def schedule_delete(self, rows: RowArray, gens: RowArray) -> None:
        """Schedule the deletion of keys whose rows are about to be dropped. Ignores rows that are not in a tier."""
        c = self._c
        rows = rows[(rows >= 0) & (c.rows["gen"][rows] == gens) & (c.rows["state"][rows] == columns.EXTERNAL)]
        owners = c.size_classes["node"][self._size_classes.size_classes_of(rows)]
        to_delete = {tier.index: tier.to_delete for tier in self.tiers.values()}
        for owner, key in zip(owners.tolist(), split_keys(self._size_classes.keys_of(rows)), strict=True):
            to_delete[owner][key] = None

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return statistics by the node that owns a tier; "" is the shared tier."""
        return {name: self._tier_stats(tier) for name, tier in self.tiers.items()}

    def fill(self) -> dict[str, dict[str, Any]]:
        """Return `state`, `capacity`, `demoted`, `blocks` and `bytes_used` as in `stats`, but in less time.

        Blocks on their way to the tier count too.
        """
        return {name: self._tier_fill(tier) for name, tier in self.tiers.items()}

    def _tier_fill(self, tier: ExternalTier) -> dict[str, Any]:
        slots = dict.fromkeys(tier.size_classes.values(), 0)
        for record in tier.slabs.values():
            slots[int(self._c.slabs[record]["size_class"])] += self._size_classes.span(record)[1]
        free = {
            number: int(self._c.lists[number * columns.LISTS_PER_CLASS + columns.FREE_LIST]["count"])
            for number in slots
        }
        blocks = {stride: slots[number] - free[number] for stride, number in tier.size_classes.items()}
        return {
            "state": _state(tier),
            "capacity": tier.capacity,
            "demoted": tier.demoted,
            "blocks": sum(blocks.values()),
            "bytes_used": sum(stride * count for stride, count in blocks.items()),
        }

    def _tier_stats(self, tier: ExternalTier) -> dict[str, Any]:
        blocks, used, evicted = 0, 0, 0
        for stride, size_class in tier.size_classes.items():
            records = [r for r in tier.slabs.values() if self._c.slabs[r]["size_class"] == size_class]
            counts = sum((self._size_classes.census(r).counts for r in records), np.zeros(len(columns.STATES) + 1, int))
            blocks += int(counts[columns.EXTERNAL])
            used += int(counts[columns.EXTERNAL] + counts[columns.DEMOTING]) * stride
            evicted += int(self._c.size_classes[size_class]["evicted"])
        return {
            "index": tier.index,
            "state": _state(tier),
            "blocks": blocks,
            "bytes_used": used,
            "capacity": tier.capacity,
            "demoted": tier.demoted,
            "evicted": evicted,
            "to_delete": len(tier.to_delete),
        }

    def _answer(self, tier: ExternalTier, node: str, batch: Batch) -> Demotions:
        source, keys, target = batch.fields()
        for key in split_keys(keys) if tier.to_delete else ():
            tier.to_delete.pop(key, None)  # the key is wanted there again
        to_delete = list(islice(tier.to_delete, KEYS_PER_CALL))  # `clear` may add millions of keys
        for key in to_delete:
            del tier.to_delete[key]
        tier.answers += 1
        tier.deleting[node] = tier.answers, to_delete
        return Demotions(source, keys, target, b"".join(to_delete), tier.answers)

    # ------------------------------------------------------------------ slabs

    def _size_class(self, tier: ExternalTier, stride: int) -> int:
        """Return the tier's size class for slots of `stride` bytes, with a header of ALIGN bytes; -1 for a bad size."""
        if not ALIGN < stride <= tier.slab_bytes:
            return -1
        if stride not in tier.size_classes:
            offered = columns.NOT_OFFERED if tier.unreached else columns.TO_READERS
            tier.size_classes[stride] = self._size_classes.add_unlisted(tier.index, 0, offered, 0)
        return tier.size_classes[stride]

    def _provide_slots(self, tier: ExternalTier, size_class: int, need: int) -> None:
        """Open spare slabs for a size class until it has room for `need` blocks.

        If the size class still has no slab, it gets another size's slab: the slab that was used longest ago.
        """
        stride = next(size for size, known in tier.size_classes.items() if known == size_class)
        while self._size_classes.takeable(size_class) < need and tier.spare:
            self._open_slab(tier, tier.spare.pop(), size_class, stride)
        if any(self._c.slabs[record]["size_class"] == size_class for record in tier.slabs.values()):
            return
        counted = [(self._size_classes.census(record), number) for number, record in tier.slabs.items()]
        unheld = [(slab.newest, number) for slab, number in counted if not slab.held]
        if unheld:
            number = min(unheld)[1]
            record = tier.slabs.pop(number)
            self._schedule_delete_slab(tier, record)
            self._size_classes.close(tier.index, record)
            self._open_slab(tier, number, size_class, stride)

    def _open_slab(self, tier: ExternalTier, number: int, size_class: int, stride: int) -> None:
        gen = self._size_classes.next_gen()
        tier.slabs[number] = self._size_classes.open(tier.index, number, size_class, tier.slab_bytes // stride, gen)

    def _schedule_delete_slab(self, tier: ExternalTier, record: int) -> None:
        base, slots = self._size_classes.span(record)
        rows, n = np.empty(slots, np.int64), 0
        for state in (columns.EXTERNAL, columns.DEMOTING):
            n = slabs.in_state(self._c, base, slots, state, rows, n)
        tier.to_delete.update(dict.fromkeys(split_keys(self._size_classes.keys_of(rows[:n]))))


def _state(tier: ExternalTier) -> str:
    return "down" if tier.unreached else "up" if tier.listed else "listing"
