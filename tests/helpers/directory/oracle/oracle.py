"""The directory's rules, written a second time as plain Python objects: slow, but short enough to check by reading.

Each slot is an object. `Oracle` has the public methods of `raykv.directory.directory.Directory`, and gives the same
answers byte for byte. If the oldest blocks of two other nodes have the same age, which only `adopt` causes, the
directory may evict either. `choices` tells `reserve` which node the directory chose.
"""

import math
import struct
from collections.abc import Iterator
from typing import Any

from helpers.directory.oracle.readers import Readers
from helpers.directory.oracle.slots import HOLDS_MAX, IN_TABLE, PRESENT, Lease, Node, Row, pack, split, unpack
from raykv.directory.calls.clients import PINNED_SHARE
from raykv.protocol.clients import Call, CommitRequest, Counted, Reserved, ReserveRequest

STATES = ("free", "writing", "ready", "replica", "staging", "quarantined", "dropped", "demoting", "external")


class Oracle(Readers):
    # ------------------------------------------------------------------ writers

    def reserve(
        self, call: Call, request: ReserveRequest, now: float, choices: dict[int, int] | None = None
    ) -> Reserved:
        """choices: for each granted key, by its number, the index of the node that the directory chose."""
        reservation, node, keys, start, block_bytes, name = request
        client = self.on_call(call, now)
        self.end(client, reservation)
        tenant = self.name_of(name)
        wanted, stride = split(keys), -(-block_bytes // 4096) * 4096
        writer = self.nodes.get(node)
        size_class = self.size_class(writer, stride) if writer and self.answers(writer) else None
        if not 0 <= start <= len(wanted):
            return Reserved(self.epoch, start, b"", b"", b"")
        if writer is None or size_class is None:
            covered = next((i for i in range(start, len(wanted)) if not self.table.get(wanted[i])), len(wanted))
            self.counters["refused"] += len(wanted) - covered
            return Reserved(self.epoch, covered, b"", b"", b"")
        self.provision(writer, size_class, sum(not self.taken(key) for key in wanted[start:]), tenant)
        hold = Lease(
            call.seq, True, writer.index, size_class, wanted, [], [None] * len(wanted), set(), reservation, now
        )
        for key in wanted:
            copies = [r for r in self.table.get(key, ()) if r.state in PRESENT and r.holds < HOLDS_MAX]
            hold.source.append(self.hold(copies[0]) if copies else None)
            if copies:
                self.claim(key, tenant)
        covered, granted, away = len(wanted), [], False
        for i in range(start, len(wanted)):
            if hold.source[i] or self.taken(wanted[i]):
                continue
            target, gone = self.target(size_class, tenant, away, (choices or {}).get(i, -1))
            if gone and target is not size_class and self.room(size_class) > 0:  # the tenant has its maximum
                self.free(self.evict(gone))
                target, gone = size_class, None
            if target is None or (target is not size_class and not self.can_stage(size_class)):
                covered = i  # no room, or this call has used up the staging window
                break
            if target is not size_class:
                away = True
                hold.staged[i] = self.stage(size_class, wanted[i])
            hold.source[i] = self.grant(self.evict(gone) if gone else self.take(target), wanted[i], "writing")
            self.assign(wanted[i], tenant)
            self.keep_maximum(target, tenant)
            granted.append(i)
            if gone and self.room(target) < 0 and (gone := self.surplus(target)):
                self.free(self.evict(gone))  # other calls had used slots of the staging window
        client.holds[reservation] = hold
        if not granted and covered < len(wanted):
            self.counters["refused"] += len(wanted) - covered
        return Reserved(
            self.epoch,
            covered,
            struct.pack(f"<{len(granted)}i", *granted),
            pack([hold.source[i] for i in granted], block_bytes),
            pack([hold.staged[i] for i in granted], block_bytes),
        )

    def commit(self, call: Call, request: CommitRequest, now: float) -> Counted:
        reservation, locations, keys, written = request
        client = self.on_call(call, now)
        hold = client.holds.get(reservation)
        accepted = 0
        for location, key, done in zip(unpack(locations), split(keys), written, strict=True):
            row = self.row_of(location)
            if row is None or row.gen != location[5] or row.key != key:
                continue
            if done == 1 and row.state in ("writing", *PRESENT):
                row.state = "ready" if row.state == "writing" else row.state
                accepted += 1
            elif done == 0 and row.state == "writing" and hold and (row, row.gen) in hold.source:
                self.quarantined(row)
        if hold:
            self.end(client, reservation)
            self.counters["stored"] += accepted
        return Counted(self.epoch, accepted)

    # ------------------------------------------------------------------ blocks by name

    def pin(self, call: Call, keys: bytes, now: float) -> Counted:
        self.on_call(call, now)
        memory = sum(node.limit * node.slab_bytes for node in self.nodes.values() if not node.on_gpu)
        return Counted(self.epoch, self.pin_keys(split(keys), int(memory * PINNED_SHARE)))

    def unpin(self, call: Call, keys: bytes, now: float) -> Counted:
        self.on_call(call, now)
        return Counted(self.epoch, self.unpin_keys(split(keys)))

    def touch(self, call: Call, keys: bytes, seconds: float, tenant: str, now: float) -> Counted:
        self.on_call(call, now)
        until = math.ceil(now + seconds) if seconds else 0
        count = self.keep(split(keys), self.name_of(tenant), until)
        self.counters["kept"] += count if seconds else 0
        return Counted(self.epoch, count)

    def done(self, call: Call, keys: bytes, now: float, again: bool = False, tenant: str = "") -> Counted:
        self.on_call(call, now)
        count = self.done_with(split(keys), self.name_of(tenant), again)
        self.counters["done"] += count
        return Counted(self.epoch, count)

    def forget(self, call: Call, keys: bytes, now: float) -> Counted:
        client = self.on_call(call, now)
        for key in split(keys):
            client.swapped.pop(key, None)
        return Counted(self.epoch, self.forget_keys(split(keys)))

    def preempted(self, call: Call, keys: bytes, now: float) -> Counted:
        client = self.on_call(call, now)
        self.counters["num_cumulative_preemption"] += 1
        if self.pin_keys(split(keys)) < len(split(keys)):
            self.forget_keys(split(keys))
            return Counted(self.epoch)
        for key in split(keys):
            client.swapped.setdefault(key)
        return Counted(self.epoch, len(split(keys)))

    # ------------------------------------------------------------------ the whole pool

    def rows(self) -> Iterator[Row]:
        for node in self.nodes.values():
            for slab in node.slabs.values():
                yield from slab.rows
        for tier in self.tiers.values():
            yield from tier.rows()

    def clear(self, now: float) -> int:
        self.check(now)
        keys = len(self.table)
        self.floor = self.last_gen()
        for node in self.nodes.values():
            for slab in node.slabs.values():
                for row in reversed(slab.rows):
                    if row.state in IN_TABLE:
                        self.drop(row)
        self.clear_tiers()
        self.repair_pins()
        return keys

    def stats(self, now: float) -> dict[str, Any]:
        self.check(now)
        held = [hold.writes for client in self.clients.values() for hold in client.holds.values()]
        return {
            "epoch": self.epoch,
            "keys": len(self.table),
            "leases": held.count(False),
            "reservations": held.count(True),
            "clients": len(self.clients),
            "evicted": sum(self.evicted.values()),
            **self.counters,
            "nodes": {name: self.node_stats(node, now) for name, node in self.nodes.items()},
            "tiers": {name: self.tier_stats(tier) for name, tier in self.tiers.items()},
            "tenants": self.tenants(),
            "external_cache_usage": self.usage(),
            "pinned": len(self.pins),
            "intents": len(self.intents.all),
        }

    def node_stats(self, node: Node, now: float) -> dict[str, Any]:
        states = [row.state for slab in node.slabs.values() for row in slab.rows]
        return {
            "index": node.index,
            "tier": "gpu" if node.on_gpu else "cpu",
            "state": "leaving" if node.leaving and node.state == "alive" else node.state,
            "idle_s": now - node.last_heartbeat,
            "slabs": len(node.slabs),
            "spare_slabs": len(node.spare),
            "limit": node.limit,
            "slab_bytes": node.slab_bytes,
            "bytes_used": sum(
                sum(row.state != "free" for row in slab.rows) * (node.slab_bytes // len(slab.rows))
                for slab in node.slabs.values()
            ),
            "slots": len(states),
            **{s: states.count(s) for s in STATES},
        }
