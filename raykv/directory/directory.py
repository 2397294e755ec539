"""The directory: where every block is, and what stays. A state machine without Ray, clock or I/O."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.config import CLIENT_TTL_S, SUSPECT_AFTER_S
from raykv.directory.allocator import Allocator, Node, staging_window
from raykv.directory.demotion import GpuDemotion
from raykv.directory.kernels import demotion, index, leases, placement, slabs
from raykv.directory.kernels.index import ENTRIES, EPOCH, NODE_BITS, NODE_MASK
from raykv.directory.pins import Pins
from raykv.directory.size_classes import Locations, Rows, SizeClasses
from raykv.directory.tier_catalog import NOTHING, TierCatalog
from raykv.protocol import (
    KEY_BYTES,
    LOCATION,
    ArenaDescription,
    Call,
    CommitRequest,
    Counted,
    DemotionReport,
    Demotions,
    ExistingBlocks,
    GpuDemotionReport,
    GpuDemotions,
    Heartbeat,
    Inventory,
    Joined,
    Matched,
    MatchRequest,
    NextWindowRequest,
    Reserved,
    ReserveRequest,
    SlabReport,
    SlabTarget,
    SoleCopies,
    SweepResult,
    TierReply,
    TierReport,
    host_of,
    is_tier,
    slot_bytes,
)

Keys = NDArray[np.uint64]  # (n, 2): the 16 bytes of each key
SOLE_COPIES_PER_CALL = 4096  # of each size
COUNTERS = (
    *("lookups", "hits", "remote_hits", "external_hits", "stored", "refused", "corrupt"),
    "num_cumulative_preemption",
    *("gpu_hits", "promoted", "gpu_demoted"),
)


@dataclass
class Hold:
    """Rows pinned for a client, in key order: a lease, or a reservation."""

    seq: int
    node: int
    size_class: int
    keys: Keys
    source: Rows
    gens: Rows
    staged: Rows
    staged_gens: Rows
    writes: bool


@dataclass
class Client:
    last_seen: float
    holds: dict[int, Hold] = field(default_factory=dict)
    swapped: dict[bytes, None] = field(default_factory=dict)  # keys that are pinned while it is there


class Directory:
    """All rows, holds and nodes of one pool.

    Every public method takes the time as `now` (seconds, any monotonic clock) and does not raise on what a late,
    repeated or confused caller sends. `keys` are (n, 16) uint8 as bytes.
    """

    def __init__(
        self,
        epoch: int = 1,
        locality: float = 1.5,
        client_ttl: float = CLIENT_TTL_S,
        share: float = 0.25,
        min_hits: int = 0,
    ) -> None:
        """share: of a node's slots, to be free or copied to its external tier; min_hits: of what goes there."""
        self.locality = float(locality)
        self.client_ttl = client_ttl
        self.clients: dict[int, Client] = {}
        self.floor = 0  # generations up to this one were cleared
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._size_classes = SizeClasses(epoch)
        self._allocator = Allocator(self._size_classes)
        self.nodes = self._allocator.nodes
        self.pins = Pins(self._size_classes)
        self._gpu_demotion = GpuDemotion(self._size_classes, self._allocator)
        self._tier_catalog = TierCatalog(self._size_classes, share, min_hits)
        self._indices = itertools.count()
        self._leaving: set[str] = set()  # nodes of which that was said, known or not
        self._stamped: set[bytes] = set()  # nonces of arenas that carry this epoch
        self._next_check = 0.0

    @property
    def epoch(self) -> int:
        return int(self._size_classes.c.state[EPOCH])

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self._size_classes.nbytes

    # ------------------------------------------------------------------ readers

    def match(self, call: Call, request: MatchRequest, now: float) -> Matched:
        """Lease the longest prefix of the keys that is ready."""
        client = self._on_call(call, now)
        self._end(client, request.lease)
        reader, stride = self.nodes.get(request.node), slot_bytes(request.block_bytes)
        size_class = self._allocator.size_class(reader, stride) if reader else -1
        k, firsts = self._find(request.keys)
        if reader and size_class >= 0 and self._allocator.provide_staging(reader, size_class, stride, firsts):
            k, firsts = self._find(request.keys)  # the slab that was taken away may have held some
        index_here = reader.index if reader else -1
        source, staged = np.empty(len(k), np.int64), np.empty(len(k), np.int64)
        n, remote = leases.match(self._size_classes.c, k, firsts, index_here, size_class, source, staged)
        source, staged = source[:n], staged[:n]
        gens, locations = self._size_classes.describe(source, request.block_bytes)
        external = int(np.count_nonzero(is_tier(locations["node"])))
        self.counters["lookups"] += len(k)
        self.counters["hits"] += n
        promoted = self._promoted(reader, locations)
        self.counters["remote_hits"] += remote - external - promoted
        self.counters["external_hits"] += external
        self.counters["promoted"] += promoted
        self.counters["gpu_hits"] += n - remote if reader and reader.on_gpu else 0
        if n == 0:
            return Matched(self.epoch, b"", b"")
        staged_gens, staged_locations = (
            self._size_classes.describe(staged, request.block_bytes) if remote else (staged.copy(), None)
        )
        client.holds[request.lease] = Hold(
            call.seq, index_here, size_class, k[:n], source, gens, staged, staged_gens, writes=False
        )
        return Matched(self.epoch, locations.tobytes(), b"" if staged_locations is None else staged_locations.tobytes())

    def _promoted(self, reader: Node | None, locations: Locations) -> int:
        """How many of the places are in the memory of the node whose GPU reads."""
        host = self.nodes.get(reader.host) if reader and reader.on_gpu else None
        return int(np.count_nonzero(locations["node"] == host.index)) if host else 0

    def next_window(self, call: Call, request: NextWindowRequest, now: float) -> Matched:
        """Staging slots for further blocks of a lease; those of blocks that were read are given back."""
        client, start = self._on_call(call, now), request.start
        hold = client.holds.get(request.lease)
        if hold is None or hold.writes or not 0 <= start <= len(hold.source):
            return Matched(self.epoch, b"", b"")
        c = self._size_classes.c
        leases.release(c, hold.staged[:start], hold.staged_gens[:start], hold.staged[:0], hold.staged_gens[:0])
        hold.staged[:start] = -1
        rest = slice(start, None)
        n = leases.next_window(
            c,
            hold.keys[rest],
            hold.source[rest],
            hold.gens[rest],
            hold.node,
            hold.size_class,
            hold.staged[rest],
            hold.staged_gens[rest],
        )
        rows = slice(start, start + n)
        _, source = self._size_classes.describe(hold.source[rows], request.block_bytes)
        hold.staged_gens[rows], staged = self._size_classes.describe(hold.staged[rows], request.block_bytes)
        return Matched(self.epoch, source.tobytes(), staged.tobytes())

    def locate_prefix(self, keys: bytes) -> dict[str, int]:
        """How many blocks of the longest prefix of `keys` that is ready each node has, by name, where it has any.

        For whoever chooses a reader: nothing is touched, leased or counted.
        """
        hosts = np.zeros(len(self._size_classes.c.grid), np.int64)
        numbers: dict[str, int] = {}
        for node in self.nodes.values():
            if node.slabs:
                hosts[node.index & NODE_MASK] = numbers.setdefault(node.host, len(numbers))
        counts, last = np.zeros((2, len(numbers)), np.int64)
        leases.locate_prefix(self._size_classes.c, self._find(keys)[1], hosts, counts, last)
        return {name: int(counts[number]) for name, number in numbers.items() if counts[number]}

    # ------------------------------------------------------------------ writers

    def reserve(self, call: Call, request: ReserveRequest, now: float) -> Reserved:
        """Grant slots to what is missing of keys[start:]."""
        client, start = self._on_call(call, now), request.start
        self._end(client, request.reservation)
        k, firsts = self._find(request.keys)
        stride = slot_bytes(request.block_bytes)
        writer = self.nodes.get(request.node)
        size_class = self._allocator.size_class(writer, stride) if writer and writer.offered_to >= index.TO_OWN else -1
        if writer is None or size_class < 0 or not 0 <= start <= len(k):
            return Reserved(self.epoch, start, b"", b"", b"")
        if self._allocator.provision(
            writer, size_class, stride, int(placement.missing(self._size_classes.c, firsts[start:]))
        ):
            k, firsts = self._find(request.keys)  # the slab that was taken away may have held some
        source, staged, granted = (np.empty(len(k), np.int64) for _ in range(3))
        others = self._others(writer, stride)
        heap = self._size_classes.heaps[stride]
        covered, grants = placement.reserve(
            self._size_classes.c, k, firsts, start, size_class, others, heap, self.locality, source, staged, granted
        )
        if not grants:  # else the rest is asked for in another call
            self.counters["refused"] += len(k) - covered
        granted = granted[:grants]
        gens, locations = self._size_classes.describe(source, request.block_bytes)
        staged_gens, staged_locations = self._size_classes.describe(staged, request.block_bytes)
        client.holds[request.reservation] = Hold(
            call.seq, writer.index, size_class, k, source, gens, staged, staged_gens, writes=True
        )
        return Reserved(
            self.epoch,
            covered,
            granted.astype(np.int32).tobytes(),
            locations.take(granted).tobytes(),
            staged_locations.take(granted).tobytes(),
        )

    def _others(self, writer: Node, stride: int) -> Rows:
        """Where else a writer's blocks may go; of a GPU's, into its own node's memory first."""
        size_class, host = writer.size_classes[stride], self.nodes.get(writer.host, writer).size_classes.get(stride, -1)
        others = [other for other in self._size_classes.sizes[stride] if other != size_class]
        return np.array(sorted(others, key=lambda other: other != host), np.int64)

    def commit(self, call: Call, request: CommitRequest, now: float) -> Counted:
        """Offer the blocks that were written, and end the reservation.

        Idempotent: each block is judged by its location, key and generation, whatever became of the reservation.
        """
        client = self._on_call(call, now)
        rows, gens = self._size_classes.rows_of(np.frombuffer(request.locations, LOCATION))
        k = np.frombuffer(request.keys, np.uint64).reshape(-1, 2)
        done = np.frombuffer(request.written, np.uint8)
        if not len(rows) == len(k) == len(done):
            return Counted(self.epoch)
        accepted = np.zeros(len(rows), np.uint8)
        hold = client.holds.get(request.reservation)
        if not done.all():  # a slot that another hold writes is not this one's to give up
            rows[(done == 0) & ~np.isin(rows, hold.source if hold else [])] = -1
        placement.commit(self._size_classes.c, rows, k, gens, done, accepted)
        if hold:
            self._end(client, request.reservation)
            self.counters["stored"] += int(accepted.sum())
        return Counted(self.epoch, int(accepted.sum()))

    # ------------------------------------------------------------------ blocks by name

    def pin(self, call: Call, keys: bytes, now: float) -> Counted:
        """Have blocks stay until `unpin`. Counts the keys that are pinned now."""
        self._on_call(call, now)
        return Counted(self.epoch, self.pins.pin(_split(keys)))

    def unpin(self, call: Call, keys: bytes, now: float) -> Counted:
        """End pins. Counts the keys that were pinned."""
        self._on_call(call, now)
        return Counted(self.epoch, self.pins.unpin(_split(keys)))

    def forget(self, call: Call, keys: bytes, now: float) -> Counted:
        """Drop blocks that nobody will ask for again; who holds one keeps it until it is released. Counts copies."""
        client = self._on_call(call, now)
        for key in _split(keys):
            client.swapped.pop(key, None)
        return Counted(self.epoch, self._forget(keys))

    def preempted(self, call: Call, keys: bytes, now: float) -> Counted:
        """An engine swapped a request out: its blocks stay while the client does, or until they are forgotten.

        Counts the keys: all of them, or none, where some are not stored and the others are forgotten.
        """
        client, names = self._on_call(call, now), _split(keys)
        self.counters["num_cumulative_preemption"] += 1
        if self.pins.pin(names) < len(names):
            self._forget(keys)
            return Counted(self.epoch)
        client.swapped.update(dict.fromkeys(names))
        return Counted(self.epoch, len(names))

    def _forget_swapped(self, gone: Client) -> None:
        if gone.swapped:
            self._forget(b"".join(gone.swapped))

    def _forget(self, keys: bytes) -> int:
        """Returns how many copies there were."""
        self.pins.unpin(_split(keys))
        c, firsts = self._size_classes.c, self._find(keys)[1]
        rows = np.empty(leases.copies(c, firsts, np.empty(0, np.int64)), np.int64)
        leases.copies(c, firsts, rows)
        self._tier_catalog.schedule_delete(rows, c.rows["gen"][rows])
        return int(slabs.forget_rows(c, rows))

    # ------------------------------------------------------------------ clients

    def client_heartbeat(self, call: Call, now: float) -> Counted:
        """A client that has nothing to ask is still there."""
        self._on_call(call, now)
        return Counted(self.epoch)

    def disconnect(self, client: int, now: float) -> None:
        """A client leaves in order: nothing of it is still being written."""
        self._check(now)
        if gone := self.clients.pop(client, None):
            for hold in gone.holds.values():
                self._release(hold)
            self._forget_swapped(gone)

    def _on_call(self, call: Call, now: float) -> Client:
        self._check(now)
        client = self.clients.setdefault(call.client, Client(now))
        client.last_seen = now
        if call.pulled:
            at = np.frombuffer(call.pulled, LOCATION)
            taken_over = np.zeros(len(self._size_classes.c.size_classes), np.int64)
            leases.pulled(self._size_classes.c, *self._size_classes.rows_of(at), taken_over)
            self._allocator.restore_windows(taken_over)
            if taken_over.any():  # those that they took over from are primaries no more
                self.pins.settle()
        if client.holds:
            held = set(np.frombuffer(call.held, np.uint64).tolist())
            for i in [i for i, hold in client.holds.items() if i not in held and hold.seq < call.seq]:
                self._end(client, i)
        if self._allocator.lacking:
            self._allocator.settle_windows()
        if call.corrupt:
            rows, gens = self._size_classes.rows_of(np.frombuffer(call.corrupt, LOCATION))
            self._tier_catalog.schedule_delete(rows, gens)
            self.counters["corrupt"] += int(slabs.drop(self._size_classes.c, rows, gens))
            self.pins.settle()
        return client

    def _end(self, client: Client, hold: int) -> None:
        if hold in client.holds:
            self._release(client.holds.pop(hold))

    def _release(self, hold: Hold) -> None:
        leases.release(self._size_classes.c, hold.source, hold.gens, hold.staged, hold.staged_gens)

    def _check(self, now: float) -> None:
        """Suspect nodes and expire clients; twice a second."""
        if now < self._next_check:
            return
        self._next_check = now + 0.5
        for node in self.nodes.values():
            if node.state == "alive" and now - node.last_heartbeat > SUSPECT_AFTER_S:
                self._set_state(node, "suspect")
        for i in [i for i, client in self.clients.items() if now - client.last_seen > self.client_ttl]:
            gone = self.clients.pop(i)
            for hold in gone.holds.values():
                leases.abandon(self._size_classes.c, hold.source, hold.gens)
                leases.abandon(self._size_classes.c, hold.staged, hold.staged_gens)
                self._release(hold)
            self._forget_swapped(gone)

    # ------------------------------------------------------------------ nodes

    def join(self, name: str, arena: ArenaDescription, now: float, window: int | None = None) -> Joined:
        """A node store started. Nothing is offered or granted there until `adopt`.

        name: the node's, or that of one of its GPUs: see `host_of`. window: bytes of staging; None: `staging_window`.
        """
        self._check(now)
        nonce, slab_bytes, slab_count, epoch = arena
        if epoch > self.epoch or (epoch == self.epoch and nonce not in self._stamped):
            self._size_classes.c.state[EPOCH] = epoch + 1
        self._stamped.add(nonce)
        known = self.nodes.get(name)
        if known and known.nonce == nonce:
            known.last_heartbeat = now
            return Joined(known.index, self.epoch)
        self._remove_node(name)
        window = staging_window(slab_bytes * slab_count) if window is None else window
        self.nodes[name] = node = Node(name, self._new_index(tier=False), nonce, slab_bytes, window, now, slab_count)
        node.leaving = node.host in self._leaving
        return Joined(node.index, self.epoch)

    def adopt(self, name: str, found: Inventory, now: float, offered: int = 0) -> None:
        """Take up what a node store found in its arena. Where the node's rows are known, headers can only veto them.

        offered: slabs that are allocated there; else blocks would be evicted until the next heartbeat tells.
        """
        self._check(now)
        node = self.nodes.get(name)
        if node is None:
            return
        node.last_heartbeat = now
        at, k = np.frombuffer(found.locations, LOCATION), np.frombuffer(found.keys, np.uint64).reshape(-1, 2)
        if node.state == "joining":
            writing = np.frombuffer(found.writing, LOCATION)
            self._allocator.open_found(node, np.concatenate([at, writing]))
            slabs.set_aside(self._size_classes.c, *self._size_classes.rows_of(writing))
            depth = np.frombuffer(found.positions, np.uint32).astype(np.int64)
            stamps = np.frombuffer(found.stamps, np.uint32)
            order = np.lexsort((-depth, stamps))  # oldest first, and children before parents
            order = order[at["gen"][order] > self.floor]
            rows, gens = self._size_classes.rows_of(at[order])
            slabs.adopt(self._size_classes.c, rows[rows >= 0], k[order][rows >= 0], gens[rows >= 0])
        else:
            rows, gens = self._size_classes.rows_of(at)
            mine = self._size_classes.c.rows[rows]
            other = (mine["gen"] != gens) | (mine["k0"] != k[:, 0]) | (mine["k1"] != k[:, 1])
            vetoed = (rows >= 0) & other & (gens >= mine["gen"])
            slabs.drop(self._size_classes.c, rows[vetoed], mine["gen"][vetoed])
            self.pins.settle()
        joined = node.state == "joining"
        self._allocator.offer(node, offered)
        self._set_state(node, "alive")
        for other in self.nodes.values():
            if other.leaving or (other.on_gpu and other.host == name):
                self._promote_replicas(other)  # before anybody may evict what looks like a replica here
        if joined and not node.leaving:
            self._allocator.make_windows(node)

    def _new_index(self, tier: bool) -> int:
        """An index: never that of another node, nor one that another directory has given (int32); tiers' are odd."""
        return self.epoch % (1 << 31 - NODE_BITS) << NODE_BITS | next(self._indices) * 2 + tier

    def set_slab_target(self, name: str, report: SlabReport, now: float) -> SlabTarget:
        """A node store is to have `limit` slabs; before every `adopt` and `heartbeat`, if that may change.

        Slabs that the report gives back are gone, whatever was agreed before. What nobody holds is to be given back at
        once, coldest first, the rest as it is released.
        """
        self._check(now)
        node = self.nodes.get(name)
        if node is None:
            return SlabTarget(0, b"")
        limit = report.limit
        if limit != node.limit:
            node.limit, node.window_bytes = limit, staging_window(node.slab_bytes * limit)
        for stride, size_class in node.size_classes.items():
            self._size_classes.resize_window(size_class, max(1, node.window_bytes // stride))
        if (gone := set(np.frombuffer(report.given_back, np.int32).tolist())) != node.withdrawn:
            self._settle_withdrawn(node, gone)
        numbers = self._allocator.withdraw(node, self.pins.rows()) if node.state != "joining" else []
        return SlabTarget(self._size_classes.next_gen() if numbers else 0, np.array(numbers, np.int32).tobytes())

    def _settle_withdrawn(self, node: Node, gone: set[int]) -> None:
        kept = sorted(node.withdrawn - gone, reverse=True)  # or taken up again
        lost = [number for number in gone if number in node.slabs]  # another answer than the last came through
        for number in lost:
            self._size_classes.close(node.index, node.slabs.pop(number))
        node.spare[:] = [*kept, *(number for number in node.spare if number not in gone)]
        node.withdrawn = gone
        if lost:
            self._invalidate()

    def heartbeat(self, name: str, offered: int, now: float) -> Heartbeat | None:
        """A node store is alive and has allocated `offered` slabs. None: it is unknown here, and must `join` again."""
        self._check(now)
        node = self.nodes.get(name)
        if node is None or node.state == "joining":
            return None
        node.last_heartbeat = now
        self._allocator.offer(node, offered)
        if node.state == "suspect":
            self._set_state(node, "alive")
        return Heartbeat(self.epoch, self.floor, self._allocator.quarantined(node).tobytes())

    def sweep_result(self, result: SweepResult, now: float) -> None:
        """What a node store found in quarantined slots."""
        self._check(now)
        rows, gens = self._size_classes.rows_of(np.frombuffer(result.locations, LOCATION))
        verdicts, k = np.frombuffer(result.verdicts, np.uint8), np.frombuffer(result.keys, np.uint64).reshape(-1, 2)
        found_gens = np.frombuffer(result.generations, np.uint64).astype(np.int64)
        if len(rows) == len(verdicts) == len(k) == len(found_gens):
            slabs.settle(self._size_classes.c, rows, gens, verdicts, k, found_gens, self.floor)

    def remove_node(self, name: str, now: float) -> int:
        """Ray says that a node is dead: its rows go. Returns how many slots it had."""
        self._check(now)
        self._leaving.discard(name)
        return sum(self._remove_node(node.name) for node in self._of_host(name))

    def _of_host(self, name: str) -> list[Node]:
        """A node's memory, and that of its GPUs; or that of one GPU."""
        return [node for node in self.nodes.values() if name in (node.name, node.host)]

    def _remove_node(self, name: str) -> int:
        node = self.nodes.pop(name, None)
        if node is None:
            return 0
        self._set_state(node, "dead")
        slots = sum(self._size_classes.span(record)[1] for record in node.slabs.values())
        for record in node.slabs.values():
            self._size_classes.close(node.index, record)
        for stride, size_class in node.size_classes.items():
            self._size_classes.remove(size_class, stride)
            self._allocator.lacking.pop(size_class, None)
        self._tier_catalog.leave(name)
        self._gpu_demotion.settle(name, np.zeros(0, LOCATION), np.zeros(0, np.uint8))
        self._invalidate()  # the node may come back with the same generations in the same rows
        return slots

    def _invalidate(self) -> None:
        """Whoever holds rows of slabs that were closed holds nothing there."""
        for client in self.clients.values():
            for hold in client.holds.values():
                self._size_classes.invalidate(hold.source, hold.gens)
                self._size_classes.invalidate(hold.staged, hold.staged_gens)
        self._gpu_demotion.invalidate()
        self.pins.settle()

    def leave(self, name: str, now: float) -> None:
        """A node is about to leave: nothing new is stored there, and what only it has is `sole_copies`.

        To be said to a new directory before any node joins.
        """
        self._check(now)
        self._leaving.add(name)
        for node in self._of_host(name):
            if not node.leaving:  # it is said every second
                node.leaving = True
                self._set_state(node, node.state)
                self._promote_replicas(node)

    def sole_copies(self, name: str, now: float) -> SoleCopies | None:
        """Blocks that would be lost with a node. None: what the node has is not known here."""
        self._check(now)
        found, k, going = [], [], 0
        nodes, shared = self._of_host(name), self._tier_catalog.tiers.get("")
        if name not in self.nodes or any(node.state == "joining" for node in nodes):
            return None
        below = shared.index if shared and not shared.unreached else -1
        for node in nodes:
            if node.leaving:
                self._promote_replicas(node)
        c = self._size_classes.c  # not before: a slab that is opened may replace the columns
        for node in nodes:
            for stride, size_class in node.size_classes.items():
                rows = np.empty(SOLE_COPIES_PER_CALL, np.int64)
                n = leases.sole_copies(c, size_class, below, rows, 0)
                for record in node.slabs.values():
                    if c.slabs[record]["size_class"] == size_class:
                        n = leases.held_sole_copies(c, *self._size_classes.span(record), below, rows, n)
                found.append(self._size_classes.describe(rows[:n], stride)[1].tobytes())
                k.append(np.stack([c.rows["k0"][rows[:n]], c.rows["k1"][rows[:n]]], axis=1).tobytes())
            going += sum(
                int(leases.count_sole_copies(c, *self._size_classes.span(record), below))
                for record in node.slabs.values()
            )
        return SoleCopies(b"".join(found), b"".join(k), going)

    def _promote_replicas(self, node: Node) -> None:
        self._allocator.promote_replicas(node)
        self.pins.settle()

    def _set_state(self, node: Node, state: str) -> None:
        node.state = state
        for stride, size_class in node.size_classes.items():
            self._size_classes.offer(size_class, stride, node.offered_to)
        self._tier_catalog.suspect(node.name, state == "suspect")

    # ------------------------------------------------------------------ external tiers

    def tier_heartbeat(self, name: str, report: TierReport, now: float) -> TierReply | None:
        """A node store has an external tier, which it reaches or not. None: it must `join` first."""
        self._check(now)
        node = self.nodes.get(name)
        if node is None:
            return None
        if report.lost:
            self._tier_catalog.forget(name, report.lost)
            self._invalidate()
        reply = self._tier_catalog.heartbeat(name, report, lambda: self._new_index(tier=True))
        self._tier_catalog.suspect(name, node.state == "suspect")
        return reply

    def report_existing(self, name: str, existing: ExistingBlocks, now: float) -> None:
        """What lies in a node's tier from before."""
        self._check(now)
        k, sizes = np.frombuffer(existing.keys, np.uint64).reshape(-1, 2), np.frombuffer(existing.sizes, np.int64)
        if len(k) == len(sizes):
            self._tier_catalog.report_existing(name, k, sizes, existing.last)

    def demote(self, name: str, report: DemotionReport, now: float) -> Demotions:
        """Which of a node's blocks to copy to its tier next. A report may come late, or twice."""
        self._check(now)
        at, k = np.frombuffer(report.locations, LOCATION), np.frombuffer(report.keys, np.uint64).reshape(-1, 2)
        stored = np.frombuffer(report.stored, np.uint8)
        node = self.nodes.get(name)
        if node is None or node.state == "joining" or not len(at) == len(k) == len(stored):
            return NOTHING
        if self._tier_catalog.demoted(name, at, k, stored, report.seen):
            self._tier_catalog.refresh(node.size_classes.values())
        self.pins.renew([key for key, done in zip(_split(report.keys), stored, strict=True) if done])
        share, slots = self._tier_catalog.share, self._allocator.slots(node)
        if report.whole and share > 0.0:
            held = np.concatenate([self.pins.rows(), self._allocator.held(node, self._tier_catalog.min_uses)])
            return self._tier_catalog.demote(name, node.size_classes, slots, 1.0, sum(slots.values()), held)
        if node.spare and share < 1.0:  # there is room
            share = 0.0
        return self._tier_catalog.demote(name, node.size_classes, slots, share, demotion.LOOKS, self.pins.rows())

    def demote_gpu(self, name: str, report: GpuDemotionReport, now: float) -> GpuDemotions:
        """Which of a GPU's blocks to copy to its node's memory next."""
        self._check(now)
        at, stored = np.frombuffer(report.locations, LOCATION), np.frombuffer(report.stored, np.uint8)
        node, host = self.nodes.get(name), self.nodes.get(host_of(name))
        if node is None or host is None or node is host or len(at) != len(stored):
            return GpuDemotions(b"", b"", b"")
        self.counters["gpu_demoted"] += self._gpu_demotion.settle(name, at, stored)
        self.pins.settle()
        if node.offered_to != index.TO_OWN or host.offered_to != index.TO_ALL:
            return GpuDemotions(b"", b"", b"")
        return self._gpu_demotion.next(node, host)

    def indices(self) -> dict[int, str]:
        """Nodes by the index that places carry: their memory's, and their own tier's."""
        own = {tier.index: name for name, tier in self._tier_catalog.tiers.items() if tier.owner}
        return {node.index: name for name, node in self.nodes.items()} | own

    # ------------------------------------------------------------------ all

    def clear(self, now: float) -> int:
        """Forget every block; what is held stays until it is let go. Returns how many keys there were."""
        self._check(now)
        keys = int(self._size_classes.c.state[ENTRIES])
        self.floor = self._size_classes.last_gen
        for node in self.nodes.values():
            for record in node.slabs.values():
                slabs.clear_rows(self._size_classes.c, *self._size_classes.span(record))
        self._tier_catalog.clear()
        self.pins.settle()
        return keys

    def stats(self, now: float) -> dict[str, Any]:
        """Slots by node and state, holds, and totals since start."""
        self._check(now)
        held = [hold.writes for client in self.clients.values() for hold in client.holds.values()]
        tiers = self._tier_catalog.stats()
        used = sum(tier["bytes_used"] for tier in tiers.values())
        return {
            "epoch": self.epoch,
            "keys": int(self._size_classes.c.state[ENTRIES]),
            "leases": held.count(False),
            "reservations": held.count(True),
            "clients": len(self.clients),
            "pinned": len(self.pins),
            "evicted": int(self._size_classes.c.size_classes["evicted"].sum()),
            **self.counters,
            "nodes": {name: self._allocator.stats(node, now) for name, node in self.nodes.items()},
            "tiers": tiers,
            "external_cache_usage": used / max(1, sum(tier["capacity"] for tier in tiers.values())),
        }

    def _find(self, keys: bytes) -> tuple[Keys, Rows]:
        k = np.frombuffer(keys, np.uint64).reshape(-1, 2)
        firsts = np.empty(len(k), np.int64)
        index.find(self._size_classes.c, k, firsts)
        return k, firsts


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
