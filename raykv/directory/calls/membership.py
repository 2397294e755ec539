"""Who is in a pool: node stores that join, report, leave or die, and clients that call, disconnect or vanish.

Membership is the part of the Directory that follows them. It owns the parts of the state: the slabs (allocator.py), the
external tiers (tier_catalog.py), the clients' leases (holds.py) and the pins (pins.py); and it repairs what refers to
slots of a node that is gone.
"""

import itertools

import numpy as np

from raykv.config import SUSPECT_AFTER_S
from raykv.directory.calls.found_blocks import FoundBlocks
from raykv.directory.kernels import columns, leases, slabs, sole_copies, table
from raykv.directory.kernels.columns import CLOCK, EPOCH, NODE_BITS
from raykv.directory.state.allocator import Allocator, Node, staging_window
from raykv.directory.state.arrays import KeyArray, LocationArray, RowArray, key_array, split_keys
from raykv.directory.state.gpu_demotion import GpuDemotion
from raykv.directory.state.holds import Client, Clients
from raykv.directory.state.intents import Intents
from raykv.directory.state.pins import Pins
from raykv.directory.state.quotas import Quotas
from raykv.directory.state.size_classes import SizeClasses
from raykv.directory.state.tier_catalog import TierCatalog
from raykv.protocol.clients import Call
from raykv.protocol.location import EPOCHS, LOCATION, SLABS_MAX, host_of
from raykv.protocol.stores import (
    FINISHED,
    STILL_WRITTEN,
    ArenaDescription,
    Heartbeat,
    Inventory,
    Joined,
    SlabReport,
    SlabTarget,
    SoleCopies,
    SweepResult,
)

COUNTERS = (
    "lookups",
    "hits",
    "remote_hits",
    "external_hits",
    "gpu_hits",
    "stored",
    "refused",
    "corrupt",
    "num_cumulative_preemption",
    "promoted",
    "gpu_demoted",
)
SOLE_COPIES_PER_CALL = 4096  # of each size
CHECK_EVERY_S = 0.5  # between two looks for nodes and clients that are gone
ARENA_BYTES_MAX = 1 << 50
EPOCHS_AHEAD = 1 << 16  # of a store that comes from another directory: more than a pool has in years
GPUS = 64  # of a node, at most
NO_LOCATIONS = np.zeros(0, LOCATION)


class Membership:
    """The nodes and clients of a pool. `name` is a node's, or that of one of its GPUs (see `protocol.host_of`)."""

    def __init__(self, epoch: int, client_ttl: float, share: float, min_hits: int) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.floor = 0  # generation up to which all blocks were cleared
        self._size_classes = SizeClasses(epoch)
        self._allocator = Allocator(self._size_classes)
        self._tier_catalog = TierCatalog(self._size_classes, share, min_hits)
        self._gpu_demotion = GpuDemotion(self._size_classes, self._allocator)
        self.nodes = self._allocator.nodes
        self.clients = Clients(self._size_classes, client_ttl)
        self.pins = Pins(self._size_classes)
        self.quotas = Quotas(self._size_classes)
        self.intents = Intents()
        self._indices = itertools.count()
        self._leaving: set[str] = set()  # nodes that are about to leave, joined or not
        self._stamped: set[bytes] = set()  # nonces of arenas that carry this epoch
        self._next_check = 0.0

    @property
    def epoch(self) -> int:
        return int(self._c.state[EPOCH])

    @property
    def _c(self) -> columns.Columns:
        return self._size_classes.c

    # ------------------------------------------------------------------ joining

    def join(self, name: str, arena: ArenaDescription, now: float, window: int | None = None) -> Joined:
        """A node store started. Nothing is offered or granted there until `adopt`.

        window: bytes of its staging window; None: see `staging_window`. ValueError for an arena that can't be.
        """
        self._check(now)
        _check_arena(arena, self.epoch)
        self._check_gpus(name)
        if arena.epoch > self.epoch or (arena.epoch == self.epoch and arena.nonce not in self._stamped):
            self._c.state[EPOCH] = arena.epoch + 1
        self._stamped.add(arena.nonce)
        known = self.nodes.get(name)
        if known and known.nonce == arena.nonce and not known.is_half_adopted:
            known.last_heartbeat = now
            return Joined(known.index, self.epoch)
        self._remove(name)
        window = staging_window(arena.slab_bytes * arena.slab_count) if window is None else window
        node = Node(
            name, self._new_index(tier=False), arena.nonce, arena.slab_bytes, window, now, limit=arena.slab_count
        )
        node.leaving = node.host in self._leaving
        self.nodes[name] = node
        self.quotas.resize(self.nodes.values())
        return Joined(node.index, self.epoch)

    def _check_gpus(self, name: str) -> None:
        """ValueError for one more GPU than a node has: each costs memory."""
        host = host_of(name)
        others = sum(node.on_gpu and node.host == host and node.name != name for node in self.nodes.values())
        if name != host and others >= GPUS:
            raise ValueError(f"{name!r} joins beside {others} GPUs of its node: no node has more than {GPUS}")

    def _new_index(self, tier: bool) -> int:
        """An index of a node or tier (see `protocol.is_tier`) that no other has, nor one of another directory's."""
        return self.epoch % (1 << 31 - NODE_BITS) << NODE_BITS | next(self._indices) * 2 + tier

    def adopt(self, name: str, found: Inventory, now: float, offered: int = 0) -> None:
        """Take up what a node store found in its arena. Where the node's rows are known, headers can only veto them.

        It may come in pieces, youngest first, between which others call: nothing is offered there until the last.
        offered: slabs that are allocated there. Without it, blocks would be evicted until the next heartbeat.
        ValueError for what is no Inventory, or no count of slabs. Locations that the arena can't have are left out.
        """
        self._check(now)
        node = self.nodes.get(name)
        if node is None or found.node not in (-1, node.index):
            return
        _check_slabs(offered)
        blocks = FoundBlocks.of(found).in_arena(node.index, max(offered, node.limit))
        node.last_heartbeat = now
        joined = node.state == "joining"
        if joined:
            self._take_up(node, blocks)
        else:
            self._veto(blocks)
        if found.left:
            return
        self._allocator.offer(node, offered)
        self._set_state(node, "alive")
        for other in self.nodes.values():
            if other.leaving or (other.on_gpu and other.host == name):
                self._promote_replicas(other)  # before anybody may evict the copies here
        if joined and not node.leaving:
            self._allocator.empty_windows(node)

    def _take_up(self, node: Node, found: FoundBlocks) -> None:
        """Make rows of blocks in the arena of a node that joins, oldest first, children before parents."""
        self._allocator.open_slabs_of(node, np.concatenate([found.locations, found.writing]))
        slabs.set_aside(self._c, *self._size_classes.rows_of(found.writing))
        order = np.lexsort((-found.positions.astype(np.int64), found.stamps))
        order = order[found.locations["gen"][order] > self.floor]
        rows, gens = self._size_classes.rows_of(found.locations[order])
        known = rows >= 0
        if node.floor < 0:  # the first piece
            total = int(known.sum()) + found.left
            self._c.state[CLOCK] = max(self._c.state[CLOCK], total)
            node.floor = int(self._c.state[CLOCK]) - total
        slabs.adopt(self._c, rows[known], found.keys[order][known], gens[known], node.floor + found.left)

    def _veto(self, found: FoundBlocks) -> None:
        """Drop blocks whose header tells of another block that is as new, or newer."""
        rows, gens = self._size_classes.rows_of(found.locations)
        keys, known = found.keys, self._c.rows[rows]
        other = (known["gen"] != gens) | (known["k0"] != keys[:, 0]) | (known["k1"] != keys[:, 1])
        vetoed = (rows >= 0) & other & (gens >= known["gen"])
        slabs.drop(self._c, rows[vetoed], known["gen"][vetoed])
        self.pins.repair()

    # ------------------------------------------------------------------ heartbeats

    def heartbeat(self, name: str, offered: int, now: float) -> Heartbeat | None:
        """A node store is alive and has allocated `offered` slabs. None: it is unknown here, and must `join` again.

        ValueError for what is no count of slabs.
        """
        self._check(now)
        _check_slabs(offered)
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
        verdicts, keys = np.frombuffer(result.verdicts, np.uint8), key_array(result.keys)
        found_gens = np.frombuffer(result.generations, np.uint64).astype(np.int64)
        if len(rows) == len(verdicts) == len(keys) == len(found_gens):
            verdicts = np.where(verdicts <= FINISHED, verdicts, STILL_WRITTEN).astype(np.uint8)
            slabs.sweep_result(self._c, rows, gens, verdicts, keys, found_gens, self.floor)

    def set_slab_target(self, name: str, report: SlabReport, now: float) -> SlabTarget:
        """A node store is to have `report.limit` slabs. Called before every `adopt` and `heartbeat`.

        Slabs that it says were given back are gone, whatever was agreed before. Of those that it has too many, slabs in
        which nobody holds a slot are to be given back at once, oldest first, the others as holds end.
        ValueError for what is no count of slabs.
        """
        self._check(now)
        _check_slabs(report.limit)
        numbers_back = np.frombuffer(report.given_back, np.int32)
        node = self.nodes.get(name)
        if node is None:
            return SlabTarget(0, b"")
        if report.limit != node.limit:
            node.limit, node.window_bytes = report.limit, staging_window(node.slab_bytes * report.limit)
            self.quotas.resize(self.nodes.values())
        for stride, size_class in node.size_classes.items():
            self._size_classes.resize_window(size_class, max(1, node.window_bytes // stride))
        given_back = set(numbers_back[numbers_back >= 0].tolist())
        if given_back != node.withdrawn:
            self._set_withdrawn(node, given_back)
        numbers = self._allocator.withdraw(node, self.pins.rows()) if node.state != "joining" else []
        return SlabTarget(self._size_classes.next_gen() if numbers else 0, np.array(numbers, np.int32).tobytes())

    def _set_withdrawn(self, node: Node, given_back: set[int]) -> None:
        """Take over what the node says it gave back, where that differs (an answer was lost or late)."""
        kept = sorted(node.withdrawn - given_back, reverse=True)
        lost = [number for number in given_back if number in node.slabs]
        for number in lost:
            self._size_classes.close(node.index, node.slabs.pop(number))
        node.spare[:] = [*kept, *(number for number in node.spare if number not in given_back)]
        node.withdrawn = given_back
        self._allocator.may_have_spare.add(node.name)
        if lost:
            self._invalidate()

    def _check(self, now: float) -> None:
        """Suspect nodes that are silent, and expire clients that are; twice a second."""
        if now < self._next_check:
            return
        self._next_check = now + CHECK_EVERY_S
        for node in self.nodes.values():
            if node.state == "alive" and now - node.last_heartbeat > SUSPECT_AFTER_S:
                self._set_state(node, "suspect")
        for client in self.clients.expired(now):
            self._forget_swapped(self.clients.expire(client))
            self.intents.end_all(client)
        self.clients.end_unused(now)
        self.pins.expire(now)
        self.intents.expire(now)

    def _set_state(self, node: Node, state: str) -> None:
        node.state = state
        for stride, size_class in node.size_classes.items():
            self._size_classes.offer(size_class, stride, node.offered_to)
        self._tier_catalog.set_suspect(node.name, state == "suspect")

    # ------------------------------------------------------------------ leaving

    def leave(self, name: str, now: float) -> None:
        """A node is about to leave: nothing new is stored there, and `sole_copies` are what it takes along.

        A new directory must be told before any node joins.
        """
        self._check(now)
        self._leaving.add(name)
        for node in self._of_host(name):
            if not node.leaving:  # it is said every second
                node.leaving = True
                self._set_state(node, node.state)
                self._promote_replicas(node)

    def stay(self, name: str, now: float) -> None:
        """A node does not leave after all: blocks are stored there again."""
        self._check(now)
        self._leaving.discard(name)
        for node in self._of_host(name):
            if node.leaving:
                node.leaving = False
                self._set_state(node, node.state)

    def sole_copies(self, name: str, now: float) -> SoleCopies | None:
        """Blocks that would be lost with a node. None: what the node has is not known here."""
        self._check(now)
        nodes, shared = self._of_host(name), self._tier_catalog.tiers.get("")
        if name not in self.nodes or any(node.state == "joining" for node in nodes):
            return None
        for node in nodes:
            if node.leaving:
                self._promote_replicas(node)
        tier = shared.index if shared and not shared.unreached else -1
        locations, keys, total, heads = [], [], 0, np.empty(columns.TENANTS_MAX, np.int64)
        for node in nodes:
            for stride, size_class in node.size_classes.items():
                rows = np.empty(SOLE_COPIES_PER_CALL, np.int64)
                n = sole_copies.in_lists(self._c, size_class, tier, heads, rows, 0)
                for record in node.slabs.values():
                    if self._c.slabs[record]["size_class"] == size_class:
                        n = sole_copies.held(self._c, *self._size_classes.span(record), tier, rows, n)
                locations.append(self._size_classes.describe(rows[:n], stride)[1].tobytes())
                keys.append(self._size_classes.keys_of(rows[:n]))
            spans = map(self._size_classes.span, node.slabs.values())
            total += sum(int(sole_copies.count(self._c, base, slots, tier)) for base, slots in spans)
        return SoleCopies(b"".join(locations), b"".join(keys), total)

    def _promote_replicas(self, node: Node) -> None:
        self._allocator.promote_replicas(node)
        self.pins.repair()

    def remove_node(self, name: str, now: float) -> int:
        """Ray says that a node is dead: its rows go. Returns how many slots it had."""
        self._check(now)
        self._leaving.discard(name)
        return sum(self._remove(node.name) for node in self._of_host(name))

    def _of_host(self, name: str) -> list[Node]:
        """A node's memory and that of its GPUs, or that of one GPU."""
        return [node for node in self.nodes.values() if name in (node.name, node.host)]

    def _remove(self, name: str) -> int:
        node = self.nodes.pop(name, None)
        if node is None:
            return 0
        self._set_state(node, "dead")
        self.quotas.resize(self.nodes.values())
        slots = sum(self._size_classes.span(record)[1] for record in node.slabs.values())
        for record in node.slabs.values():
            self._size_classes.close(node.index, record)
        for stride, size_class in node.size_classes.items():
            self._size_classes.remove(size_class, stride)
            self._allocator.lacking.pop(size_class, None)
        self._tier_catalog.leave(name)
        self._gpu_demotion.cancel(name)
        self._invalidate()  # the node may come back with the same generations in the same rows
        return slots

    def _invalidate(self) -> None:
        """Slabs were closed: nobody holds rows there."""
        self.clients.invalidate()
        self._gpu_demotion.invalidate()
        self.pins.repair()

    # ------------------------------------------------------------------ clients

    def _on_call(self, call: Call, now: float) -> Client:
        """What each call tells besides its request: blocks that were pulled, holds that are over, corrupt blocks."""
        self._check(now)
        pulled, corrupt = _locations(call.pulled), _locations(call.corrupt)
        client = self.clients.seen(call.client, now)
        if len(pulled):
            promoted = np.zeros(len(self._c.size_classes), np.int64)
            leases.pulled(self._c, *self._size_classes.rows_of(pulled), promoted)
            self._allocator.restore_windows(promoted)
            if promoted.any():  # the primaries before them are replicas now
                self.pins.repair()
        self.clients.end_unlisted(client, call)
        self.intents.end_unlisted(call)
        if self._allocator.lacking:
            self._allocator.restore_lacking()
        if len(corrupt):
            rows, gens = self._size_classes.rows_of(corrupt)
            self._tier_catalog.schedule_delete(rows, gens)
            self.counters["corrupt"] += int(slabs.drop(self._c, rows, gens))
            self.pins.repair()
        return client

    def disconnect(self, client: int, now: float) -> None:
        """A client leaves in order: it writes nothing any more."""
        self._check(now)
        self.intents.end_all(client)
        if gone := self.clients.disconnect(client):
            self._forget_swapped(gone)

    def _forget_swapped(self, gone: Client) -> None:
        if gone.swapped:
            self._forget(b"".join(gone.swapped))

    def _forget(self, keys: bytes) -> int:
        """Drop blocks and their pins. Returns how many copies there were."""
        self.pins.unpin(split_keys(keys))
        firsts = self._find(keys)[1]
        rows = np.empty(leases.copies(self._c, firsts, np.empty(0, np.int64)), np.int64)
        leases.copies(self._c, firsts, rows)
        self._tier_catalog.schedule_delete(rows, self._c.rows["gen"][rows])
        return int(slabs.forget_rows(self._c, rows))

    def _find(self, keys: bytes) -> tuple[KeyArray, RowArray]:
        """(keys, first row of each, or -1)."""
        found = key_array(keys)
        firsts = np.empty(len(found), np.int64)
        table.find(self._c, found, firsts)
        return found, firsts


def _locations(data: bytes) -> LocationArray:
    return np.frombuffer(data, LOCATION) if data else NO_LOCATIONS


def _check_arena(arena: ArenaDescription, epoch: int) -> None:
    """ValueError for what is no arena: its blocks would be rows without end, or generations that no header keeps.

    epoch: the directory's, which one such arena could bring to the last there is.
    """
    _check_slabs(arena.slab_count)
    if not 0 < arena.slab_bytes <= ARENA_BYTES_MAX:
        raise ValueError(f"slabs of {arena.slab_bytes} bytes: there are none")
    if not 0 <= arena.epoch < min(EPOCHS - 1, epoch + EPOCHS_AHEAD):
        raise ValueError(f"an arena of epoch {arena.epoch}: no pool is at that, for the directory's epoch is {epoch}")


def _check_slabs(count: int) -> None:
    """ValueError for what is no count of slabs."""
    if not 0 <= count <= SLABS_MAX:
        raise ValueError(f"{count} slabs: an arena has at most {SLABS_MAX}")
