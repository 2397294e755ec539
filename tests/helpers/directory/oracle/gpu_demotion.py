"""The oracle's GPUs: which of a GPU's blocks are demoted to the memory of the GPU's node."""

import math

from helpers.directory.oracle.allocator import Allocator
from helpers.directory.oracle.slots import Node, Row, SizeClass, pack, unpack
from helpers.directory.oracle.tiers import KEYS_PER_CALL
from raykv.protocol.location import is_tier
from raykv.protocol.tiers import GpuDemotionReport, GpuDemotions

SHARE = 0.25
BYTES_PER_CALL = 6 * 4096
NOTHING = GpuDemotions(b"", b"", b"")


class GpuDemotion(Allocator):
    def demote_gpu(self, name: str, report: GpuDemotionReport, now: float) -> GpuDemotions:
        self.check(now)
        locations, stored = report
        node = self.nodes.get(name)
        host = self.nodes.get(node.host) if node and node.on_gpu else None
        if node is None or host is None or len(unpack(locations)) != len(stored):
            return NOTHING
        self.gpu_demoted(name, [location for location, done in zip(unpack(locations), stored, strict=True) if done])
        self.repair_pins()
        if not self.answers(node) or not self.stores(host):
            return NOTHING
        source, chosen = b"", []
        for size_class in list(node.size_classes.values()):
            pairs = [] if node.spare else self.choose_on_gpu(size_class, host)
            source += pack([(row, row.gen) for row, _ in pairs], size_class.stride)
            chosen += [(location, location.gen) for _, location in pairs]
        self.under_way[name] = chosen
        return GpuDemotions(source, b"".join(row.key for row, _ in chosen), pack([*chosen], 0))

    def choose_on_gpu(self, size_class: SizeClass, host: Node) -> list[tuple[Row, Row]]:
        """(row on the GPU, row in memory) of a GPU's oldest blocks, until SHARE of its slots is free or clean."""
        want = math.ceil(len(size_class.rows) * SHARE) - max(0, self.room(size_class))
        want = min(want, max(1, BYTES_PER_CALL // size_class.stride), KEYS_PER_CALL)
        there = self.size_class(host, size_class.stride) if want > 0 else None
        if there is None:
            return []
        while host.spare and self.room(there) < want:
            self.open(host, host.spare[-1], there, self.next_gen())
        self.reclaim(host, there, self.room, want, None)
        unheld = sorted((row for row in size_class.of("ready") if not row.holds), key=lambda row: row.last)
        pairs: list[tuple[Row, Row]] = []
        for row in [row for row in unheld if not self.being_demoted_to_memory(row.key)]:
            if len(pairs) == want:
                break
            has_room = self.room(there) > 0 and not self.is_full(row.tenant, there)
            gone = None if has_room else self.near_victim(row.tenant, there)
            if not has_room and not gone:  # there may be a slot for a block of another tenant
                continue
            location = self.evict(gone) if gone else self.take(there)
            self.grant(location, row.key, "demoting")
            location.uses = row.uses
            pairs.append((row, location))
        return pairs

    def being_demoted_to_memory(self, key: bytes) -> bool:
        return any(row.state == "demoting" and not is_tier(row.slab.node) for row in self.table[key])

    def gpu_demoted(self, name: str, stored: list[tuple[int, ...]]) -> None:
        """Of a GPU's last answer, make the stored blocks primaries in memory, and quarantine the other slots."""
        done = {(row, location[5]) for location in stored if (row := self.row_of(location))}
        new = []
        for row, gen in self.under_way.pop(name, []):
            if row.gen != gen:
                continue  # the row's slab was closed
            if row.state == "demoting" and (row, gen) in done:
                row.state, row.holds = "replica" if self.has_primary(row) else "ready", 0
                self.use(row)
                self.counters["gpu_demoted"] += 1
                new.append(row)
            else:
                self.quarantined(row)
        for row in reversed([row for row in new if row.state == "ready"]):
            for other in [r for r in self.table[row.key] if r.state == "ready" and r is not row]:
                self.make_replica(other)

    def make_replica(self, row: Row) -> None:
        """Make a primary a replica whose slot is the next to be taken in its size class."""
        first = min((r.last for r in self.replicas(row.slab.size_class)), default=row.last + 1)
        row.state, row.aged, row.clean = "replica", False, False
        row.last = min(row.last, first - 1)
