"""The oracle's external tiers: which blocks are demoted, which are in a tier, which keys are deleted there."""

import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from helpers.directory.oracle.slots import IN_TABLE, PRESENT, Node, Row, SizeClass, Slab, Tier, pack, split, unpack
from helpers.directory.oracle.tenants import Tenants
from raykv.protocol.tiers import DemotionReport, Demotions, ExistingBlocks, TierReply, TierReport

# Small, so that tests reach the limits: a tier's slab holds 3, 2 or 1 blocks of the three `SIZES`.
TIER_SLAB = 6 * 4096
BATCH_BYTES = 5 * 4096
KEYS_PER_CALL = 4
CHANCES = 8
NOTHING = Demotions(b"", b"", b"", b"", 0)


class Tiers(Tenants):
    def repair_pins(self) -> None:
        raise NotImplementedError

    def renew_pins(self, keys: list[bytes]) -> None:
        raise NotImplementedError

    def new_index(self, tier: bool) -> int:
        self.joins += 1
        return self.epoch % 2048 * 2**20 + 2 * (self.joins - 1) + tier

    def row_of(self, location: tuple[int, ...]) -> Row | None:
        there = self.by_index.get(location[0])
        slab = there.slabs.get(location[1]) if there else None
        return slab.rows[location[2]] if slab and slab.gen == location[4] and location[2] < len(slab.rows) else None

    def close(self, slab: Slab) -> None:
        for row in slab.rows:
            if row.state == "free":
                slab.size_class.free.remove(row)
            elif row.state in IN_TABLE:
                self.take_out(row)
            row.state, row.gen, row.holds = "closed", 0, 0
            slab.size_class.rows.remove(row)

    def tier_of(self, node: str) -> Tier | None:
        return self.tiers.get(node) or self.tiers.get("")

    def owners(self) -> dict[int, str]:
        own = {tier.index: tier.owner for tier in self.tiers.values() if tier.owner is not None}
        return {node.index: name for name, node in self.nodes.items()} | own

    def tier_at(self, row: Row) -> Tier:
        tier = self.by_index[row.slab.node]
        assert isinstance(tier, Tier)
        return tier

    # ------------------------------------------------------------------ nodes and their tiers

    def tier_heartbeat(self, name: str, report: TierReport, now: float) -> TierReply | None:
        self.check(now)
        capacity, shared, reached, lost = report
        if name not in self.nodes:
            return None
        if lost and (tier := self.tier_of(name)) and tier.content != lost:
            tier.content = lost
            self.empty(tier)
        if lost:
            self.repair_pins()
        whose = "" if shared else name
        if whose not in self.tiers:
            spare = list(range(max(1, capacity // TIER_SLAB)))[::-1]
            tier = Tier(self.new_index(tier=True), capacity, TIER_SLAB, None if shared else name, spare)
            self.tiers[whose] = self.by_index[tier.index] = tier
            self.tiered = True
        tier = self.tiers[whose]
        (tier.unreached.discard if reached else tier.unreached.add)(name)
        self.offer_tiers()
        if reached and tier.lister is None:
            tier.lister = name
        return TierReply(tier.index, tier.lister == name and not tier.listed)

    def offer_tiers(self) -> None:
        """Offer a tier to readers while all nodes reach the tier and its owner answers."""
        for tier in self.tiers.values():
            tier.suspect = tier.owner is not None and self.nodes[tier.owner].state == "suspect"
            for size_class in tier.size_classes.values():
                size_class.offered = not tier.down

    def leave_tiers(self, node: str) -> None:
        """A node is gone. Cancel its demotions, and forget the tier that only this node could read."""
        for name, tier in list(self.tiers.items()):
            tier.unreached.discard(node)
            self.cancel(tier, node)
            self.reschedule_delete(tier, node, -1)
            if tier.lister == node:
                tier.lister = None
            if tier.owner == node:
                self.empty(tier)
                del self.tiers[name], self.by_index[tier.index]
        self.offer_tiers()

    def empty(self, tier: Tier) -> None:
        """Forget a tier's blocks: the tier has lost its content."""
        for number, slab in tier.slabs.items():
            self.close(slab)
            tier.spare.append(number)
        tier.slabs.clear()
        tier.to_delete.clear()
        tier.deleting.clear()
        for size_classes in self.sizes.values():
            self.refresh(size_classes)

    def refresh(self, size_classes: Sequence[SizeClass]) -> None:
        for size_class in size_classes:
            for row in size_class.rows:
                row.clean = False

    def clear_tiers(self) -> None:
        for tier in self.tiers.values():
            tier.cleared = not tier.listed  # blocks that are listed later are older than the clear
            for slab in tier.slabs.values():
                self.schedule_delete(tier, slab)
                for row in reversed(slab.rows):
                    if row.state in IN_TABLE:
                        self.drop(row)

    def schedule_delete(self, tier: Tier, slab: Slab) -> None:
        for state in ("external", "demoting"):
            for row in slab.rows:
                if row.state == state:
                    tier.to_delete.setdefault(row.key)

    # ------------------------------------------------------------------ blocks from before

    def report_existing(self, name: str, existing: ExistingBlocks, now: float) -> None:
        self.check(now)
        keys, sizes, last = existing
        tier = self.tier_of(name)
        if tier is None or tier.listed or tier.lister != name:
            return
        tier.listed = last
        blocks = list(zip(split(keys), struct.unpack(f"<{len(sizes) // 8}q", sizes), strict=True))
        for size in sorted({size for _, size in blocks}):
            mine = [key for key, s in blocks if s == size]
            size_class = None if tier.cleared else self.tier_class(tier, -(-size // 4096) * 4096)
            if size_class:
                self.provide_tier_slots(tier, size_class, len(mine))
            for key in mine:
                if size_class and size_class.free and not self.in_tier(tier, key):
                    row, _ = self.grant(size_class.free.pop(), key, "external")
                    row.holds = 0
                    self.use(row)
            for key in mine:
                if self.in_tier(tier, key):
                    tier.to_delete.pop(key, None)
            for key in mine:
                if not self.in_tier(tier, key):
                    tier.to_delete.setdefault(key)

    def in_tier(self, tier: Tier, key: bytes) -> bool:
        return any(
            row.state in ("external", "demoting") and row.slab.node == tier.index for row in self.table.get(key, ())
        )

    # ------------------------------------------------------------------ demotion

    def demote(self, name: str, report: DemotionReport, now: float) -> Demotions:
        self.check(now)
        locations, keys, stored, seen, whole = report
        node, tier = self.nodes.get(name), self.tier_of(name)
        if node is None or node.state == "joining" or not len(locations) // 32 == len(keys) // 16 == len(stored):
            return NOTHING
        if tier and (self.demoted(tier, name, locations, keys, stored) or not all(stored)):
            self.refresh(list(node.size_classes.values()))
        if tier:
            self.reschedule_delete(tier, name, seen)
        self.renew_pins([key for key, done in zip(split(keys), stored, strict=True) if done])
        if tier is None or tier.down or not tier.listed:
            return NOTHING
        share, held = self.share, [row for row, _ in self.pins.values()]
        if whole and share > 0:
            share = 1.0
            rows = [row for slab in node.slabs.values() for row in slab.rows if row.state == "ready" and row.holds]
            held += [row for row in rows if row.uses >= self.min_hits]
        elif node.spare and share < 1:  # there is room
            share = 0.0
        source, left, chosen = b"", BATCH_BYTES, []
        for size_class in node.size_classes.values():
            pairs = self.choose(tier, size_class, self.share_of(node, size_class, share), left, held)
            source += pack([(row, row.gen) for row, _ in pairs], size_class.stride)
            left -= len(pairs) * size_class.stride
            chosen += [(location, location.gen) for _, location in pairs]
        tier.demoting[name] = chosen
        return self.answer(tier, name, source, chosen)

    def demoted(self, tier: Tier, node: str, locations: bytes, keys: bytes, stored: bytes) -> bool:
        """Take a node's report. Returns whether demotions that the report does not name were cancelled."""
        unwanted = []
        for location, key, done in zip(unpack(locations), split(keys), stored, strict=True):
            row = self.row_of(location)
            if location[0] != tier.index:
                continue
            if row is None or row.gen != location[5] or row.state not in ("demoting", "external"):
                unwanted += [key] * bool(done)
            elif row.state == "demoting" and done:
                row.state = "external"
                self.use(row)
                tier.demoted += 1
            elif row.state == "demoting":
                self.drop(row)
                unwanted.append(key)  # the tier may have some of the block's bytes
        given_up = self.cancel(tier, node)
        self.schedule_delete_keys(tier, unwanted)
        return given_up

    def reschedule_delete(self, tier: Tier, node: str, seen: int) -> None:
        """Schedule again the deletions of a node's last answer, if `seen` is not that answer's number."""
        number, keys = tier.deleting.pop(node, (seen, []))
        if number != seen:
            self.schedule_delete_keys(tier, keys)

    def schedule_delete_keys(self, tier: Tier, keys: list[bytes]) -> None:
        """Schedule keys to be deleted, except keys that are in the tier or being demoted to it."""
        for key in keys:
            if not self.in_tier(tier, key):
                tier.to_delete.setdefault(key)

    def cancel(self, tier: Tier, node: str) -> bool:
        unreported = [row for row, gen in tier.demoting.pop(node, []) if row.gen == gen and row.state == "demoting"]
        for row in unreported:
            self.drop(row)
            tier.to_delete.setdefault(row.key)
        return bool(unreported)

    def share_of(self, node: Node, size_class: SizeClass, share: float) -> float:
        """The share of slots to keep free or clean. On a node of several sizes it is at least the share of a slab."""
        if not 0 < share < 1 or not size_class.rows or len(node.size_classes) == 1:
            return share
        return max(share, min(1.0, (node.slab_bytes // size_class.stride) / len(size_class.rows)))

    def choose(
        self, tier: Tier, size_class: SizeClass, share: float, left: int, held: list[Row]
    ) -> list[tuple[Row, Row]]:
        """(row in memory, row in the tier) of the oldest blocks that are not clean, until there is no shortfall."""
        there = self.tier_class(tier, size_class.stride)
        most = min(left // size_class.stride, KEYS_PER_CALL)
        if left == BATCH_BYTES:
            most = max(1, most)  # one block at least, however large
        short = self.shortfall(size_class, share)
        if there is None or most <= 0 or short <= 0:
            return []
        self.provide_tier_slots(tier, there, min(most, short))
        pairs: list[tuple[Row, Row]] = []
        while True:
            if len(pairs) == most or self.shortfall(size_class, share) <= 0:
                return pairs
            line = [row for row in size_class.line() if not row.clean and self.lack(size_class, row, share) > 0]
            if not line:
                break
            row = line[0]
            if share < 1 and row.holds:
                row.aged = False  # in no line until its hold ends
                continue
            wanted = row.uses >= self.min_hits and row.needed
            wanted = wanted and not any(self.in_tier(t, row.key) for t in self.tiers.values())
            if wanted and not self.start_demotion(row, tier, there, pairs):
                return pairs
            row.clean = True
        most = min(most, len(pairs) + max(0, self.shortfall(size_class, share)))
        for row in held:  # after all unheld blocks
            wanted = row.slab.size_class is size_class and row.state == "ready"
            if len(pairs) < most and wanted and not any(self.in_tier(t, row.key) for t in self.tiers.values()):
                self.start_demotion(row, tier, there, pairs)
        return pairs

    def start_demotion(self, row: Row, tier: Tier, there: SizeClass, pairs: list[tuple[Row, Row]]) -> bool:
        """Start to demote a row. Returns whether the tier had a slot for it."""
        location = self.take_tier_slot(tier, there)
        if location is not None:
            self.grant(location, row.key, "demoting")
            location.holds = 0
            pairs.append((row, location))
        return location is not None

    def shortfall(self, size_class: SizeClass, share: float) -> int:
        """How many blocks to demote until enough slots can be taken without loss: each tenant's part, added up."""
        line = size_class.line()
        if not line:
            return max(0, self.wanted(size_class, share))
        heads = {row.tenant if size_class.counts else "": row for row in line}
        return sum(max(0, self.lack(size_class, row, share)) for row in heads.values())

    def wanted(self, size_class: SizeClass, share: float) -> int:
        return math.ceil(len(size_class.rows) * share) - max(0, self.room(size_class))

    def lack(self, size_class: SizeClass, row: Row, share: float) -> int:
        """How many blocks to demote of the tenant that is charged for a row."""
        line = size_class.line()
        theirs = [other for other in line if not size_class.counts or other.tenant == row.tenant]
        part = Fraction(len(theirs), len(line))
        return math.ceil(self.wanted(size_class, share) * part) - sum(other.clean for other in theirs)

    def take_tier_slot(self, tier: Tier, size_class: SizeClass) -> Row | None:
        """A free slot, else the oldest block's. Up to CHANCES blocks that are in memory too are passed over."""
        if size_class.free:
            return size_class.free.pop()
        for _ in range(CHANCES):
            row = self.oldest(size_class, "external")
            if row is None or not row.needed or not any(r.state in PRESENT for r in self.table[row.key]):
                break
            self.use(row)
        row = self.oldest(size_class, "external")
        if row:
            tier.to_delete.setdefault(row.key)
            self.take_out(row)
            self.evicted[size_class] += 1
        return row

    def answer(self, tier: Tier, node: str, source: bytes, target: list[tuple[Row, int]]) -> Demotions:
        for row, _ in target:
            tier.to_delete.pop(row.key, None)
        to_delete = list(tier.to_delete)[:KEYS_PER_CALL]
        for key in to_delete:
            del tier.to_delete[key]
        tier.answers += 1
        tier.deleting[node] = tier.answers, to_delete
        keys = b"".join(row.key for row, _ in target)
        return Demotions(source, keys, pack([*target], 0), b"".join(to_delete), tier.answers)

    # ------------------------------------------------------------------ slabs

    def tier_class(self, tier: Tier, stride: int) -> SizeClass | None:
        """The size class for blocks of `stride` bytes, which take a page more in a tier."""
        if not 0 < stride <= tier.slab_bytes - 4096:
            return None
        if stride not in tier.size_classes:
            size_class = tier.size_classes[stride] = SizeClass(tier.index, stride + 4096, 0, not tier.down)
            self.evicted[size_class] = 0
        return tier.size_classes[stride]

    def provide_tier_slots(self, tier: Tier, size_class: SizeClass, need: int) -> None:
        """Open spare slabs until `need` blocks fit. A size without a slab takes the slab used longest ago."""
        while self.takeable(size_class) < need and tier.spare:
            self.open_tier_slab(tier, tier.spare.pop(), size_class)
        if any(slab.size_class is size_class for slab in tier.slabs.values()):
            return
        idle = [
            (max((row.last for row in slab.rows if row.state == "external"), default=-1), number)
            for number, slab in tier.slabs.items()
            if not any(row.holds or row.state == "demoting" for row in slab.rows)
        ]
        if idle:
            number = min(idle)[1]
            slab = tier.slabs.pop(number)
            self.schedule_delete(tier, slab)
            self.close(slab)
            self.open_tier_slab(tier, number, size_class)

    def open_tier_slab(self, tier: Tier, number: int, size_class: SizeClass) -> None:
        slab = tier.slabs[number] = Slab(tier.index, number, size_class, self.next_gen())
        slab.rows = [Row(slab, slot) for slot in range(tier.slab_bytes // size_class.stride)]
        size_class.rows += slab.rows
        size_class.free += reversed(slab.rows)

    def usage(self) -> float:
        """The share of all tiers' bytes that is used."""
        tiers = [self.tier_stats(tier) for tier in self.tiers.values()]
        return float(sum(t["bytes_used"] for t in tiers) / max(1, sum(t["capacity"] for t in tiers)))

    def tier_stats(self, tier: Tier) -> dict[str, Any]:
        rows = tier.rows()
        return {
            "index": tier.index,
            "state": "down" if tier.down else "up" if tier.listed else "listing",
            "blocks": sum(row.state == "external" for row in rows),
            "bytes_used": sum(row.slab.size_class.stride for row in rows if row.state in ("external", "demoting")),
            "capacity": tier.capacity,
            "demoted": tier.demoted,
            "evicted": sum(self.evicted[size_class] for size_class in tier.size_classes.values()),
            "to_delete": len(tier.to_delete),
        }
