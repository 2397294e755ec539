"""The directory: where every block of a pool is, and which blocks stay. No Ray, no clock, no I/O.

Directory answers the calls of `raykv.protocol.calls`: those of clients here, most of those of node stores in
membership.py. Which slot a block gets is in kernels/placement.py, which block is evicted in kernels/eviction.py. What serves a Directory is
raykv.actors.directory.server.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from raykv.config import CLIENT_TTL_S, Quota
from raykv.directory.calls.membership import COUNTERS
from raykv.directory.calls.readers import Readers
from raykv.directory.kernels import columns, demotion, placement, quotas, slabs, table
from raykv.directory.kernels.columns import ENTRIES
from raykv.directory.state.allocator import Node
from raykv.directory.state.arrays import KeyArray, RowArray, key_array, split_keys
from raykv.directory.state.holds import Hold
from raykv.directory.state.tier_catalog import NOTHING
from raykv.protocol.clients import NOT_WRITTEN, UNTOUCHED, Call, CommitRequest, Counted, Reserved, ReserveRequest
from raykv.protocol.location import LOCATION, host_of, is_block_size, slot_bytes
from raykv.protocol.tiers import (
    DemotionReport,
    Demotions,
    ExistingBlocks,
    GpuDemotionReport,
    GpuDemotions,
    TierReply,
    TierReport,
)
from raykv.system.jit import compile_all

PINNED_SHARE = 0.5  # of all memory, at most, in pins that are never given up: the rest is for others
NO_GPU_DEMOTIONS = GpuDemotions(b"", b"", b"")


class Directory(Readers):
    """All blocks, leases, reservations and nodes of one pool.

    A state machine for a single thread: it has no locks, and its caller must not call it from two threads at a time.
    Every call takes the time as `now` (seconds of any monotonic clock), and first does what time has made due. No call
    raises because of what a late, repeated or confused caller sends, but ValueError or TypeError for what is no
    message: a part of a key, arrays of different lengths, counts that nothing has. No block is held or dropped for it.
    Keys are 16 bytes each, joined.
    """

    def __init__(
        self,
        epoch: int = 1,
        locality: float = 1.5,
        client_ttl: float = CLIENT_TTL_S,
        share: float = 0.25,
        min_hits: int = 0,
    ) -> None:
        """epoch: above that of every directory before. locality: how many times as long as a writer's own oldest block
        another node's must have been idle to be evicted instead. client_ttl: seconds without a call after which a
        client is gone. share: part of a node's slots that is kept free or copied to its external tier. min_hits: a
        block is copied there once it was matched so often.
        """
        compile_all("raykv.directory")  # before the first caller waits for a kernel
        super().__init__(epoch, client_ttl, share, min_hits)
        self.locality = float(locality)
        self._evicted_before = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self._size_classes.nbytes

    # ------------------------------------------------------------------ totals

    def totals(self) -> dict[str, int]:
        """What has happened since the pool started, counted by this directory and by those before it."""
        return {**self.counters, "evicted": self._evicted_before + int(self._c.size_classes["evicted"].sum())}

    def resume(self, totals: dict[str, int]) -> None:
        """Go on counting from the totals of the directory before. Unknown names are left out."""
        self._evicted_before = totals.get("evicted", 0)
        self.counters.update({name: totals[name] for name in COUNTERS if name in totals})

    def gauges(self) -> dict[str, int]:
        """What is so now, without a look at every slot."""
        held = [hold.writes for client in self.clients.values() for hold in client.holds.values()]
        return {
            "keys": int(self._c.state[ENTRIES]),
            "leases": held.count(False),
            "reservations": held.count(True),
            "clients": len(self.clients),
            "pinned": len(self.pins),
            "intents": len(self.intents),
        }

    def oldest_lease(self) -> float:
        """Since when, by the callers' clock, the oldest lease is held; inf where there is none."""
        held = (hold for client in self.clients.values() for hold in client.holds.values())
        return min((hold.since for hold in held if not hold.writes), default=float("inf"))

    @property
    def tick(self) -> int:
        """Counts uses of blocks."""
        return int(self._c.state[columns.CLOCK])

    def coldest(self, name: str) -> int:
        """Tick of the last use of the block that a node evicts next; -1 where it has none."""
        node = self.nodes.get(name)
        ticks = [self._size_classes.oldest_tick(number) for number in node.size_classes.values()] if node else []
        return min((tick for tick in ticks if tick >= 0), default=-1)

    def memory_stats(self, name: str, now: float, slots_a_step: int) -> Iterator[dict[str, Any] | None]:
        """Slots by state, and bytes, of the memory of that name, which must be there. It looks at every slot.

        So it is done in steps: None after every so many slots, then the answer. Others may call between two steps.
        """
        return self._allocator.stats_in_steps(self.nodes[name], now, slots_a_step)

    def tier_fill(self) -> dict[str, dict[str, Any]]:
        """By the node that owns a tier, or "" for one that all share; see TierCatalog.fill."""
        return self._tier_catalog.fill()

    # ------------------------------------------------------------------ writers

    def reserve(self, call: Call, request: ReserveRequest, now: float) -> Reserved:
        """Grant slots to what is missing of keys[start:]. keys[:start] are their parents, touched along with them."""
        client, start = self._on_call(call, now), request.start
        self.clients.end(client, request.reservation)
        writer, keys = self.nodes.get(request.node), key_array(request.keys)
        stride = slot_bytes(request.block_bytes) if is_block_size(request.block_bytes) else 0
        size_class = (
            self._allocator.size_class(writer, stride) if writer and writer.offered_to >= columns.TO_OWN else -1
        )
        if not 0 <= start <= len(keys):
            return Reserved(self.epoch, start, b"", b"", b"")
        if writer is None or size_class < 0:
            return self._refused(keys, start)
        firsts, source, gens, staged, staged_gens = np.empty((5, len(keys)), np.int64)
        granted, (locations, staged_locations) = np.empty(len(keys), np.int32), np.empty((2, len(keys)), LOCATION)
        missing = placement.find_missing(self._c, keys, firsts, start, size_class)
        tenant = self.quotas.number(request.tenant)
        if missing and self._allocator.provision(writer, size_class, stride, missing, tenant):
            table.find(self._c, keys, firsts)  # a slab that another size gave up may have held some
        others, heaps = self._classes_in_turn(writer, stride), self._size_classes.heaps[stride]
        covered, grants = placement.reserve(
            *(self._c, keys, firsts, start, size_class, others, heaps, self.locality),
            *(stride, request.block_bytes, tenant),
            *(source, gens, staged, staged_gens, granted, locations, staged_locations),
        )
        client.holds[request.reservation] = Hold(
            call.seq,
            writer.index,
            size_class,
            keys,
            source,
            gens,
            staged,
            staged_gens,
            writes=True,
            group=request.reservation,
            since=now,
            used=now,
        )
        if not grants and covered < len(keys):  # else the client asks for the rest in another call
            charge = int(self._c.size_classes[size_class]["charge"])
            may_go = partial(quotas.may_give_up, self._c, tenant, charge)
            if self.pins.give_up(size_class, len(keys) - covered, may_go):
                return self.reserve(call, request, now)
            self.counters["refused"] += len(keys) - covered
        return Reserved(
            self.epoch,
            covered,
            granted[:grants].tobytes(),
            locations[:grants].tobytes(),
            staged_locations[:grants].tobytes(),
        )

    def _classes_in_turn(self, writer: Node, stride: int) -> RowArray:
        """Size classes of all nodes, in the order they are tried; for a GPU's writer its own node's memory first."""
        classes = self._size_classes.classes[stride]
        if not writer.on_gpu:
            return classes
        host = self.nodes.get(writer.host, writer).size_classes.get(stride, -1)
        return classes[np.argsort(classes != host, kind="stable")]

    def _refused(self, keys: KeyArray, start: int) -> Reserved:
        """To a writer whose node takes no blocks: it is drained, joining, or unknown."""
        firsts = np.empty(len(keys), np.int64)
        table.find(self._c, keys, firsts)
        missing = start + np.flatnonzero(firsts[start:] < 0)
        covered = int(missing[0]) if len(missing) else len(keys)
        self.counters["refused"] += len(keys) - covered
        return Reserved(self.epoch, covered, b"", b"", b"")

    def commit(self, call: Call, request: CommitRequest, now: float) -> Counted:
        """Offer the blocks that were written, and end the reservation.

        Idempotent: each block is judged by its location, key and generation, whatever became of the reservation.
        """
        client = self._on_call(call, now)
        locations, keys = np.frombuffer(request.locations, LOCATION), key_array(request.keys)
        written = np.frombuffer(request.written, np.uint8)
        if not len(locations) == len(keys) == len(written):
            return Counted(self.epoch)
        hold = client.holds.get(request.reservation)
        if NOT_WRITTEN in request.written:  # only the reservation that has a slot may give it up
            rows, _ = self._size_classes.rows_of(locations)
            theirs = (written == NOT_WRITTEN) & ~np.isin(rows, hold.source if hold else [])
            written = np.where(theirs, np.uint8(UNTOUCHED), written)
        accepted = placement.commit(self._c, locations, keys, written)
        if hold:
            self.clients.end(client, request.reservation)
            self.counters["stored"] += accepted
        return Counted(self.epoch, accepted)

    # ------------------------------------------------------------------ blocks by their keys

    def pin(
        self, call: Call, keys: bytes, now: float, ttl: float | None = None, priority: int | None = None
    ) -> Counted:
        """Have blocks stay until `unpin`, or for `ttl` seconds from now. Counts the keys that are pinned now.

        priority: those with the lowest are given up first where a writer on their node would be refused; None: never.
        Of the latter, in memory, no more are pinned than PINNED_SHARE of it holds.
        """
        self._on_call(call, now)
        if not isinstance(priority, int | None):
            raise ValueError(f"a priority {priority!r}: give an int, or None")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"a pin of {ttl!r} seconds: give more than 0, or None for one without an end")
        limit = int(self._allocator.memory_bytes() * PINNED_SHARE) if priority is None else None
        end = math.inf if ttl is None else now + ttl
        return Counted(self.epoch, self.pins.pin(split_keys(keys), end, priority, limit))

    def unpin(self, call: Call, keys: bytes, now: float) -> Counted:
        """End pins. Counts the keys that were pinned."""
        self._on_call(call, now)
        return Counted(self.epoch, self.pins.unpin(split_keys(keys)))

    def forget(self, call: Call, keys: bytes, now: float) -> Counted:
        """Drop blocks that nobody will ask for again. Who holds one keeps its slot until then. Counts copies."""
        client = self._on_call(call, now)
        for key in split_keys(keys):
            client.swapped.pop(key, None)
        return Counted(self.epoch, self._forget(keys))

    def preempted(self, call: Call, keys: bytes, now: float) -> Counted:
        """An engine swapped a request out: its blocks stay while the client is there, or until they are forgotten.

        Counts the keys: all of them, or none, where some are not stored, so that the others were forgotten.
        """
        client, names = self._on_call(call, now), split_keys(keys)
        self.counters["num_cumulative_preemption"] += 1
        if self.pins.pin(names) < len(names):
            self._forget(keys)
            return Counted(self.epoch)
        client.swapped.update(dict.fromkeys(names))
        return Counted(self.epoch, len(names))

    # ------------------------------------------------------------------ every call of a client

    def client_heartbeat(self, call: Call, now: float) -> Counted:
        """A client that has nothing to ask is still there."""
        self._on_call(call, now)
        return Counted(self.epoch)

    # ------------------------------------------------------------------ demotion

    def tier_heartbeat(self, name: str, report: TierReport, now: float) -> TierReply | None:
        """A node store has an external tier, which it reaches or not. None: it must `join` first."""
        self._check(now)
        node = self.nodes.get(name)
        if node is None:
            return None
        if report.lost:
            self._tier_catalog.lose_content(name, report.lost)
            self._invalidate()
        reply = self._tier_catalog.heartbeat(name, report, lambda: self._new_index(tier=True))
        self._tier_catalog.set_suspect(name, node.state == "suspect")
        return reply

    def report_existing(self, name: str, existing: ExistingBlocks, now: float) -> None:
        """What lies in a node's tier from before."""
        self._check(now)
        keys, sizes = key_array(existing.keys), np.frombuffer(existing.sizes, np.int64)
        if len(keys) == len(sizes):
            self._tier_catalog.report_existing(name, keys, sizes, existing.last)

    def demote(self, name: str, report: DemotionReport, now: float) -> Demotions:
        """Which of a node's blocks to copy to its external tier next. A report may come late, or twice."""
        self._check(now)
        locations, keys = np.frombuffer(report.locations, LOCATION), key_array(report.keys)
        stored = np.frombuffer(report.stored, np.uint8)
        node = self.nodes.get(name)
        if node is None or node.state == "joining" or not len(locations) == len(keys) == len(stored):
            return NOTHING
        if self._tier_catalog.demoted(name, locations, keys, stored, report.seen):
            self._tier_catalog.refresh(node.size_classes.values())
        self.pins.renew([key for key, done in zip(split_keys(report.keys), stored, strict=True) if done])
        share, slots = self._tier_catalog.share, self._allocator.slots(node)
        examined, pinned = demotion.ROWS_EXAMINED, self.pins.rows()
        if report.whole and share > 0.0:
            held = self._allocator.held_primaries(node, self._tier_catalog.min_uses)
            share, examined, pinned = 1.0, sum(slots.values()), np.concatenate([pinned, held])
        elif node.spare and share < 1.0:  # there is room
            share = 0.0
        shares = {stride: self._share(node, stride, count, share) for stride, count in slots.items()}
        return self._tier_catalog.demote(name, node.size_classes, slots, shares, examined, pinned)

    def _share(self, node: Node, stride: int, slots: int, share: float) -> float:
        """Of a size's slots, to be free or clean: a slab of them, too, where another size may take one whole."""
        if not 0.0 < share < 1.0 or not slots or len(node.size_classes) == 1:
            return share
        return max(share, min(1.0, (node.slab_bytes // stride) / slots))

    def demote_gpu(self, name: str, report: GpuDemotionReport, now: float) -> GpuDemotions:
        """Which of a GPU's blocks to copy to its node's memory next."""
        self._check(now)
        locations, stored = np.frombuffer(report.locations, LOCATION), np.frombuffer(report.stored, np.uint8)
        node, host = self.nodes.get(name), self.nodes.get(host_of(name))
        if node is None or host is None or node is host or len(locations) != len(stored):
            return NO_GPU_DEMOTIONS
        self.counters["gpu_demoted"] += self._gpu_demotion.demoted(name, locations, stored)
        self.pins.repair()
        if node.offered_to != columns.TO_OWN or host.offered_to != columns.TO_ALL:
            return NO_GPU_DEMOTIONS
        return self._gpu_demotion.next(node, host)

    # ------------------------------------------------------------------ tenants

    def set_quota(self, tenant: str, quota: Quota, now: float) -> None:
        """Set what a tenant has at least and at most. ValueError where the minima of all would be above 1."""
        self._check(now)
        self.quotas.set(tenant, quota)

    def remove_quota(self, tenant: str, now: float) -> bool:
        """Have a tenant compete with all that have no quota. Returns whether it had one."""
        self._check(now)
        return self.quotas.remove(tenant)

    # ------------------------------------------------------------------ the whole pool

    def indices(self) -> dict[int, str]:
        """Names of nodes by the index that locations carry: their memory's, and their own tier's."""
        own = {tier.index: name for name, tier in self._tier_catalog.tiers.items() if tier.owner}
        return {node.index: name for name, node in self.nodes.items()} | own

    def clear(self, now: float) -> int:
        """Forget every block. Who holds one keeps its slot until then. Returns how many keys there were."""
        self._check(now)
        keys = int(self._c.state[ENTRIES])
        self.floor = self._size_classes.last_gen
        for node in self.nodes.values():
            for record in node.slabs.values():
                slabs.clear_rows(self._c, *self._size_classes.span(record))
        self._tier_catalog.clear()
        self.pins.repair()
        return keys

    def stats(self, now: float) -> dict[str, Any]:
        """Slots by node and state, leases and reservations, and totals since start."""
        self._check(now)
        tiers = self._tier_catalog.stats()
        used = sum(tier["bytes_used"] for tier in tiers.values())
        return {
            "epoch": self.epoch,
            **self.gauges(),
            **self.totals(),
            "nodes": {name: self._allocator.stats(node, now) for name, node in self.nodes.items()},
            "tiers": tiers,
            "tenants": self.quotas.stats(),
            "external_cache_usage": used / max(1, sum(tier["capacity"] for tier in tiers.values())),
        }
