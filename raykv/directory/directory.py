"""The directory: where every block is, and what stays. A state machine without Ray, clock or I/O."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.config import CLIENT_TTL_S, SUSPECT_AFTER_S
from raykv.directory.allocator import Memory, Node, staging_window
from raykv.directory.demotion import Cooling
from raykv.directory.kernels import demotion, index, leases, placement, slabs
from raykv.directory.kernels.index import ENTRIES, EPOCH, NODE_BITS, NODE_MASK
from raykv.directory.pins import Pins
from raykv.directory.size_classes import Places, Rows, Shelves
from raykv.directory.tier_catalog import NOTHING, Below
from raykv.protocol import KEY_BYTES, PLACE, Call, Cooled, Matched, Reserved, Sunk, host_of, slot_bytes

Keys = NDArray[np.uint64]  # (n, 2): the 16 bytes of each key
DEPARTING_PER_CALL = 4096  # of each size
COUNTERS = (
    *("lookups", "hits", "remote_hits", "external_hits", "stored", "refused", "corrupt"),
    "num_cumulative_preemption",
    *("gpu_hits", "promoted", "cooled"),
)


@dataclass
class Hold:
    """Rows pinned for a client, in key order: a lease, or a reservation."""

    seq: int
    node: int
    shelf: int
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
        self._shelves = Shelves(epoch)
        self._memory = Memory(self._shelves)
        self.nodes = self._memory.nodes
        self.pins = Pins(self._shelves)
        self._cooling = Cooling(self._shelves, self._memory)
        self._below = Below(self._shelves, share, min_hits)
        self._indices = itertools.count()
        self._leaving: set[str] = set()  # nodes of which that was said, known or not
        self._stamped: set[bytes] = set()  # nonces of arenas that carry this epoch
        self._next_check = 0.0

    @property
    def epoch(self) -> int:
        return int(self._shelves.c.state[EPOCH])

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self._shelves.nbytes

    # ------------------------------------------------------------------ readers

    def match(self, call: Call, lease: int, node: str, keys: bytes, block_bytes: int, now: float) -> Matched:
        """Lease the longest prefix of `keys` that is ready, for a reader on `node`."""
        client = self._hello(call, now)
        self._end(client, lease)
        reader = self.nodes.get(node)
        shelf = self._memory.shelf(reader, slot_bytes(block_bytes)) if reader else -1
        k, firsts = self._find(keys)
        if reader and shelf >= 0 and self._memory.provide_staging(reader, shelf, slot_bytes(block_bytes), firsts):
            k, firsts = self._find(keys)  # the slab that was taken away may have held some
        index_here = reader.index if reader else -1
        source, staged = np.empty(len(k), np.int64), np.empty(len(k), np.int64)
        n, remote = leases.match(self._shelves.c, k, firsts, index_here, shelf, source, staged)
        source, staged = source[:n], staged[:n]
        gens, places = self._shelves.describe(source, block_bytes)
        below = int(np.count_nonzero(places["node"] & 1))
        self.counters["lookups"] += len(k)
        self.counters["hits"] += n
        promoted = self._promoted(reader, places)
        self.counters["remote_hits"] += remote - below - promoted
        self.counters["external_hits"] += below
        self.counters["promoted"] += promoted
        self.counters["gpu_hits"] += n - remote if reader and reader.on_gpu else 0
        if n == 0:
            return Matched(self.epoch, b"", b"")
        staged_gens, staged_places = self._shelves.describe(staged, block_bytes) if remote else (staged.copy(), None)
        client.holds[lease] = Hold(call.seq, index_here, shelf, k[:n], source, gens, staged, staged_gens, writes=False)
        return Matched(self.epoch, places.tobytes(), b"" if staged_places is None else staged_places.tobytes())

    def _promoted(self, reader: Node | None, places: Places) -> int:
        """How many of the places are in the memory of the node whose GPU reads."""
        host = self.nodes.get(reader.host) if reader and reader.on_gpu else None
        return int(np.count_nonzero(places["node"] == host.index)) if host else 0

    def stream(self, call: Call, lease: int, start: int, block_bytes: int, now: float) -> Matched:
        """Further staging for a lease whose blocks before `start` were read: their staging slots are given back."""
        client = self._hello(call, now)
        hold = client.holds.get(lease)
        if hold is None or hold.writes or not 0 <= start <= len(hold.source):
            return Matched(self.epoch, b"", b"")
        c = self._shelves.c
        leases.let_go(c, hold.staged[:start], hold.staged_gens[:start], hold.staged[:0], hold.staged_gens[:0])
        hold.staged[:start] = -1
        rest = slice(start, None)
        n = leases.restage(
            c,
            hold.keys[rest],
            hold.source[rest],
            hold.gens[rest],
            hold.node,
            hold.shelf,
            hold.staged[rest],
            hold.staged_gens[rest],
        )
        rows = slice(start, start + n)
        _, source = self._shelves.describe(hold.source[rows], block_bytes)
        hold.staged_gens[rows], staged = self._shelves.describe(hold.staged[rows], block_bytes)
        return Matched(self.epoch, source.tobytes(), staged.tobytes())

    def whereabouts(self, keys: bytes) -> dict[str, int]:
        """How many blocks of the longest prefix of `keys` that is ready each node has, by name, where it has any.

        For whoever chooses a reader: nothing is touched, leased or counted.
        """
        hosts = np.zeros(len(self._shelves.c.grid), np.int64)
        numbers: dict[str, int] = {}
        for node in self.nodes.values():
            if node.slabs:
                hosts[node.index & NODE_MASK] = numbers.setdefault(node.host, len(numbers))
        counts, last = np.zeros((2, len(numbers)), np.int64)
        leases.whereabouts(self._shelves.c, self._find(keys)[1], hosts, counts, last)
        return {name: int(counts[number]) for name, number in numbers.items() if counts[number]}

    # ------------------------------------------------------------------ writers

    def reserve(
        self, call: Call, reservation: int, node: str, keys: bytes, start: int, block_bytes: int, now: float
    ) -> Reserved:
        """Slots for what is missing of keys[start:]. keys[:start] are their parents, touched along with them."""
        client = self._hello(call, now)
        self._end(client, reservation)
        k, firsts = self._find(keys)
        stride = slot_bytes(block_bytes)
        writer = self.nodes.get(node)
        shelf = self._memory.shelf(writer, stride) if writer and writer.offered_to >= index.TO_OWN else -1
        if writer is None or shelf < 0 or not 0 <= start <= len(k):
            return Reserved(self.epoch, start, b"", b"", b"")
        if self._memory.provision(writer, shelf, stride, int(placement.missing(self._shelves.c, firsts[start:]))):
            k, firsts = self._find(keys)  # the slab that was taken away may have held some
        source, staged, granted = (np.empty(len(k), np.int64) for _ in range(3))
        others = self._others(writer, stride)
        heap = self._shelves.heaps[stride]
        covered, grants = placement.reserve(
            self._shelves.c, k, firsts, start, shelf, others, heap, self.locality, source, staged, granted
        )
        if not grants:  # else the rest is asked for in another call
            self.counters["refused"] += len(k) - covered
        granted = granted[:grants]
        gens, places = self._shelves.describe(source, block_bytes)
        staged_gens, staged_places = self._shelves.describe(staged, block_bytes)
        client.holds[reservation] = Hold(
            call.seq, writer.index, shelf, k, source, gens, staged, staged_gens, writes=True
        )
        return Reserved(
            self.epoch,
            covered,
            granted.astype(np.int32).tobytes(),
            places.take(granted).tobytes(),
            staged_places.take(granted).tobytes(),
        )

    def _others(self, writer: Node, stride: int) -> Rows:
        """Where else a writer's blocks may go; of a GPU's, into its own node's memory first."""
        shelf, host = writer.shelves[stride], self.nodes.get(writer.host, writer).shelves.get(stride, -1)
        others = [other for other in self._shelves.sizes[stride] if other != shelf]
        return np.array(sorted(others, key=lambda other: other != host), np.int64)

    def commit(
        self, call: Call, reservation: int, places: bytes, keys: bytes, written: bytes, now: float
    ) -> tuple[int, int]:
        """Offer the blocks that were `written` (uint8 mask): (epoch, how many are offered). Ends the reservation.

        `call` must still list the reservation as held: what it does not list is let go before anything else is done.
        Idempotent: judged by place, key and generation, whatever became of the reservation.
        """
        client = self._hello(call, now)
        rows, gens = self._shelves.rows_of(np.frombuffer(places, PLACE))
        k = np.frombuffer(keys, np.uint64).reshape(-1, 2)
        done = np.frombuffer(written, np.uint8)
        if not len(rows) == len(k) == len(done):
            return self.epoch, 0
        accepted = np.zeros(len(rows), np.uint8)
        hold = client.holds.get(reservation)
        if not done.all():  # a slot that another hold writes is not this one's to give up
            rows[(done == 0) & ~np.isin(rows, hold.source if hold else [])] = -1
        placement.commit(self._shelves.c, rows, k, gens, done, accepted)
        if hold:
            self._end(client, reservation)
            self.counters["stored"] += int(accepted.sum())
        return self.epoch, int(accepted.sum())

    # ------------------------------------------------------------------ blocks by name

    def pin(self, call: Call, keys: bytes, now: float) -> tuple[int, int]:
        """Have blocks stay until `unpin`: (epoch, how many of the keys are pinned now)."""
        self._hello(call, now)
        return self.epoch, self.pins.pin(_split(keys))

    def unpin(self, call: Call, keys: bytes, now: float) -> int:
        """Returns the epoch."""
        self._hello(call, now)
        self.pins.unpin(_split(keys))
        return self.epoch

    def forget(self, call: Call, keys: bytes, now: float) -> int:
        """Blocks that nobody will ask for again. What is held stays until it is let go. Returns the epoch."""
        client = self._hello(call, now)
        for key in _split(keys):
            client.swapped.pop(key, None)
        self._forget(keys)
        return self.epoch

    def preempted(self, call: Call, keys: bytes, now: float) -> tuple[int, int]:
        """An engine swapped a request out: its blocks stay while the engine is there, or until they are forgotten.

        Returns (epoch, how many there are): all of them, or none, where some are not there and the rest is forgotten.
        """
        client, names = self._hello(call, now), _split(keys)
        self.counters["num_cumulative_preemption"] += 1
        if self.pins.pin(names) < len(names):
            self._forget(keys)
            return self.epoch, 0
        client.swapped.update(dict.fromkeys(names))
        return self.epoch, len(names)

    def _forget_swapped(self, gone: Client) -> None:
        if gone.swapped:
            self._forget(b"".join(gone.swapped))

    def _forget(self, keys: bytes) -> None:
        self.pins.unpin(_split(keys))
        c, firsts = self._shelves.c, self._find(keys)[1]
        rows = np.empty(leases.copies(c, firsts, np.empty(0, np.int64)), np.int64)
        leases.copies(c, firsts, rows)
        self._below.doom(rows, c.rows["gen"][rows])
        slabs.forget_rows(c, rows)

    # ------------------------------------------------------------------ clients

    def beat_client(self, call: Call, now: float) -> int:
        """A client that has nothing to ask is still there. Returns the epoch."""
        self._hello(call, now)
        return self.epoch

    def bye(self, client: int, now: float) -> None:
        """A client leaves in order: nothing of it is still being written."""
        self._check(now)
        if gone := self.clients.pop(client, None):
            for hold in gone.holds.values():
                self._let_go(hold)
            self._forget_swapped(gone)

    def _hello(self, call: Call, now: float) -> Client:
        self._check(now)
        client = self.clients.setdefault(call.client, Client(now))
        client.last_seen = now
        if call.landed:
            at = np.frombuffer(call.landed, PLACE)
            came = np.zeros(len(self._shelves.c.shelves), np.int64)
            leases.landed(self._shelves.c, *self._shelves.rows_of(at), came)
            self._memory.restore_windows(came)
            if came.any():  # those that they took over from are primaries no more
                self.pins.settle()
        if client.holds:
            held = set(np.frombuffer(call.held, np.uint64).tolist())
            for i in [i for i, hold in client.holds.items() if i not in held and hold.seq < call.seq]:
                self._end(client, i)
        if self._memory.lacking:
            self._memory.settle_windows()
        if call.bad:
            rows, gens = self._shelves.rows_of(np.frombuffer(call.bad, PLACE))
            self._below.doom(rows, gens)
            self.counters["corrupt"] += int(slabs.drop(self._shelves.c, rows, gens))
            self.pins.settle()
        return client

    def _end(self, client: Client, hold: int) -> None:
        if hold in client.holds:
            self._let_go(client.holds.pop(hold))

    def _let_go(self, hold: Hold) -> None:
        leases.let_go(self._shelves.c, hold.source, hold.gens, hold.staged, hold.staged_gens)

    def _check(self, now: float) -> None:
        """Suspect nodes and expire clients; twice a second."""
        if now < self._next_check:
            return
        self._next_check = now + 0.5
        for node in self.nodes.values():
            if node.state == "alive" and now - node.last_beat > SUSPECT_AFTER_S:
                self._set_state(node, "suspect")
        for i in [i for i, client in self.clients.items() if now - client.last_seen > self.client_ttl]:
            gone = self.clients.pop(i)
            for hold in gone.holds.values():
                leases.abandon(self._shelves.c, hold.source, hold.gens)
                leases.abandon(self._shelves.c, hold.staged, hold.staged_gens)
                self._let_go(hold)
            self._forget_swapped(gone)

    # ------------------------------------------------------------------ nodes

    def join(
        self,
        name: str,
        nonce: bytes,
        slab_bytes: int,
        slab_count: int,
        epoch: int,
        now: float,
        window: int | None = None,
    ) -> tuple[int, int]:
        """A node store started, and is to have so many slabs. Returns (index of the node, epoch to stamp on its arena).

        name: the node's, or that of one of its GPUs: see `host_of`.
        Nothing is offered or granted there until `adopt`. epoch: what the arena carries. window: bytes of staging.
        """
        self._check(now)
        if epoch > self.epoch or (epoch == self.epoch and nonce not in self._stamped):
            self._shelves.c.state[EPOCH] = epoch + 1
        self._stamped.add(nonce)
        known = self.nodes.get(name)
        if known and known.nonce == nonce:
            known.last_beat = now
            return known.index, self.epoch
        self._remove_node(name)
        window = staging_window(slab_bytes * slab_count) if window is None else window
        self.nodes[name] = node = Node(name, self._new_index(tier=False), nonce, slab_bytes, window, now, slab_count)
        node.leaving = node.host in self._leaving
        return node.index, self.epoch

    def adopt(
        self,
        name: str,
        places: bytes,
        keys: bytes,
        positions: bytes,
        stamps: bytes,
        busy: bytes,
        now: float,
        offered: int = 0,
    ) -> None:
        """What a node store found in its arena: ready blocks, and slots that somebody still writes (`busy`).

        positions, stamps (uint32): of each block in its chain, and of its last use. offered: slabs allocated there, or
        blocks would be evicted for want of room until the next beat. Where the rows of the node are known they rule,
        and headers can only veto.
        """
        self._check(now)
        node = self.nodes.get(name)
        if node is None:
            return
        node.last_beat = now
        at, k = np.frombuffer(places, PLACE), np.frombuffer(keys, np.uint64).reshape(-1, 2)
        if node.state == "joining":
            writing = np.frombuffer(busy, PLACE)
            self._memory.open_found(node, np.concatenate([at, writing]))
            slabs.set_aside(self._shelves.c, *self._shelves.rows_of(writing))
            depth = np.frombuffer(positions, np.uint32).astype(np.int64)
            order = np.lexsort((-depth, np.frombuffer(stamps, np.uint32)))  # oldest first, and children before parents
            order = order[at["gen"][order] > self.floor]
            rows, gens = self._shelves.rows_of(at[order])
            slabs.adopt(self._shelves.c, rows[rows >= 0], k[order][rows >= 0], gens[rows >= 0])
        else:
            rows, gens = self._shelves.rows_of(at)
            mine = self._shelves.c.rows[rows]
            other = (mine["gen"] != gens) | (mine["k0"] != k[:, 0]) | (mine["k1"] != k[:, 1])
            vetoed = (rows >= 0) & other & (gens >= mine["gen"])
            slabs.drop(self._shelves.c, rows[vetoed], mine["gen"][vetoed])
            self.pins.settle()
        joined = node.state == "joining"
        self._memory.offer(node, offered)
        self._set_state(node, "alive")
        for other in self.nodes.values():
            if other.leaving or (other.on_gpu and other.host == name):
                self._hand_over(other)  # before anybody may evict what looks like a replica here
        if joined and not node.leaving:
            self._memory.make_windows(node)

    def _new_index(self, tier: bool) -> int:
        """An index: never that of another node, nor one that another directory has given (int32); tiers' are odd."""
        return self.epoch % (1 << 31 - NODE_BITS) << NODE_BITS | next(self._indices) * 2 + tier

    def fit(self, name: str, limit: int, given_back: bytes, now: float) -> tuple[int, bytes]:
        """A node store is to have `limit` slabs; before every `adopt` and `beat`, if that may change.

        given_back: numbers (int32) of slabs whose memory was, or is about to be: they rule, whatever was agreed before.
        Returns (generation, numbers (int32)) of slabs to give back: grants there are of older generations. What nobody
        holds goes at once, coldest first, the rest as it is let go.
        """
        self._check(now)
        node = self.nodes.get(name)
        if node is None:
            return 0, b""
        if limit != node.limit:
            node.limit, node.window_bytes = limit, staging_window(node.slab_bytes * limit)
        for stride, shelf in node.shelves.items():
            self._shelves.resize_window(shelf, max(1, node.window_bytes // stride))
        if (gone := set(np.frombuffer(given_back, np.int32).tolist())) != node.withdrawn:
            self._settle_withdrawn(node, gone)
        numbers = self._memory.withdraw(node, self.pins.rows()) if node.state != "joining" else []
        return self._shelves.next_gen() if numbers else 0, np.array(numbers, np.int32).tobytes()

    def _settle_withdrawn(self, node: Node, gone: set[int]) -> None:
        kept = sorted(node.withdrawn - gone, reverse=True)  # or taken up again
        lost = [number for number in gone if number in node.slabs]  # another answer than the last came through
        for number in lost:
            self._shelves.close(node.index, node.slabs.pop(number))
        node.spare[:] = [*kept, *(number for number in node.spare if number not in gone)]
        node.withdrawn = gone
        if lost:
            self._disown()

    def beat(self, name: str, offered: int, now: float) -> tuple[int, int, bytes] | None:
        """A node store is alive and has allocated `offered` slabs. None: it is unknown here, and is to `join` again.

        Returns (epoch, generation up to which all was cleared, PLACEs to sweep).
        """
        self._check(now)
        node = self.nodes.get(name)
        if node is None or node.state == "joining":
            return None
        node.last_beat = now
        self._memory.offer(node, offered)
        if node.state == "suspect":
            self._set_state(node, "alive")
        return self.epoch, self.floor, self._memory.limbo(node).tobytes()

    def swept(self, places: bytes, verdicts: bytes, keys: bytes, gens: bytes, now: float) -> None:
        """What a sweep found: verdicts (uint8) 0 still written, 1 freed, 2 ready as (key, uint64 generation)."""
        self._check(now)
        rows, granted = self._shelves.rows_of(np.frombuffer(places, PLACE))
        states, k = np.frombuffer(verdicts, np.uint8), np.frombuffer(keys, np.uint64).reshape(-1, 2)
        found = np.frombuffer(gens, np.uint64).astype(np.int64)
        if len(rows) == len(states) == len(k) == len(found):
            slabs.settle(self._shelves.c, rows, granted, states, k, found, self.floor)

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
        slots = sum(self._shelves.span(record)[1] for record in node.slabs.values())
        for record in node.slabs.values():
            self._shelves.close(node.index, record)
        for stride, shelf in node.shelves.items():
            self._shelves.remove(shelf, stride)
            self._memory.lacking.pop(shelf, None)
        self._below.leave(name)
        self._cooling.settle(name, np.zeros(0, PLACE), np.zeros(0, np.uint8))
        self._disown()  # the node may come back with the same generations in the same rows
        return slots

    def _disown(self) -> None:
        """Whoever holds rows of slabs that were closed holds nothing there."""
        for client in self.clients.values():
            for hold in client.holds.values():
                self._shelves.disown(hold.source, hold.gens)
                self._shelves.disown(hold.staged, hold.staged_gens)
        self._cooling.disown()
        self.pins.settle()

    def leave(self, name: str, now: float) -> None:
        """A node is about to leave: nothing new is stored there, and what only it has is `departing`.

        To be said to a new directory before any node joins.
        """
        self._check(now)
        self._leaving.add(name)
        for node in self._of_host(name):
            if not node.leaving:  # it is said every second
                node.leaving = True
                self._set_state(node, node.state)
                self._hand_over(node)

    def departing(self, name: str, now: float) -> tuple[bytes, bytes, int] | None:
        """(PLACEs, keys) of blocks that would go with a node, youngest first; DEPARTING_PER_CALL at most.

        And how many would go in all, with those that are being written. None: what the node has is not known here.
        `bytes` of a place is its slot's.
        """
        self._check(now)
        found, k, going = [], [], 0
        nodes, shared = self._of_host(name), self._below.tiers.get("")
        if name not in self.nodes or any(node.state == "joining" for node in nodes):
            return None
        below = shared.index if shared and not shared.unreached else -1
        for node in nodes:
            if node.leaving:
                self._hand_over(node)
        c = self._shelves.c  # not before: a slab that is opened may replace the columns
        for node in nodes:
            for stride, shelf in node.shelves.items():
                rows = np.empty(DEPARTING_PER_CALL, np.int64)
                n = leases.departing(c, shelf, below, rows, 0)
                for record in node.slabs.values():
                    if c.slabs[record]["shelf"] == shelf:
                        n = leases.held_there(c, *self._shelves.span(record), below, rows, n)
                found.append(self._shelves.describe(rows[:n], stride)[1].tobytes())
                k.append(np.stack([c.rows["k0"][rows[:n]], c.rows["k1"][rows[:n]]], axis=1).tobytes())
            going += sum(int(leases.going(c, *self._shelves.span(record), below)) for record in node.slabs.values())
        return b"".join(found), b"".join(k), going

    def _hand_over(self, node: Node) -> None:
        self._memory.hand_over(node)
        self.pins.settle()

    def _set_state(self, node: Node, state: str) -> None:
        node.state = state
        for stride, shelf in node.shelves.items():
            self._shelves.offer(shelf, stride, node.offered_to)
        self._below.suspect(node.name, state == "suspect")

    # ------------------------------------------------------------------ external tiers

    def beat_tier(
        self, name: str, capacity: int, shared: bool, reached: bool, lost: bytes, now: float
    ) -> tuple[int, bool] | None:
        """A node store has an external tier, which it reaches or not. lost: where what was there is gone, the name of
        what is there now, by which each store of a shared tier tells of the same loss.

        Returns (index of the tier in places, whether the store is to tell what lies there: `found`); None: it is to
        `join` first.
        """
        self._check(now)
        node = self.nodes.get(name)
        if node is None:
            return None
        if lost:
            self._below.forget(name, lost)
            self._disown()
        answer = self._below.beat(name, capacity, shared, reached, lambda: self._new_index(tier=True))
        self._below.suspect(name, node.state == "suspect")
        return answer

    def found(self, name: str, keys: bytes, sizes: bytes, last: bool, now: float) -> None:
        """What lies in a node's tier from before, oldest first: keys and block_bytes (int64). last: that is all."""
        self._check(now)
        k, s = np.frombuffer(keys, np.uint64).reshape(-1, 2), np.frombuffer(sizes, np.int64)
        if len(k) == len(s):
            self._below.found(name, k, s, last)

    def sink(self, name: str, places: bytes, keys: bytes, stored: bytes, seen: int, whole: bool, now: float) -> Sunk:
        """What of a node's blocks goes down to its tier next; whole: in the end, everything.

        places, keys, stored (uint8 mask): what became of earlier answers, as often as it is said. seen: number of the
        last answer whose deletions were carried out.
        """
        self._check(now)
        at = np.frombuffer(places, PLACE)
        k, done = np.frombuffer(keys, np.uint64).reshape(-1, 2), np.frombuffer(stored, np.uint8)
        node = self.nodes.get(name)
        if node is None or node.state == "joining" or not len(at) == len(k) == len(done):
            return NOTHING
        if self._below.sunk(name, at, k, done, seen):
            self._below.look_again(node.shelves.values())
        self.pins.renew([key for key, stored_now in zip(_split(keys), done, strict=True) if stored_now])
        share, slots = self._below.share, self._memory.slots(node)
        if whole and share > 0.0:
            held = np.concatenate([self.pins.rows(), self._memory.held(node, self._below.min_uses)])
            return self._below.sink(name, node.shelves, slots, 1.0, sum(slots.values()), held)
        if node.spare and share < 1.0:  # there is room
            share = 0.0
        return self._below.sink(name, node.shelves, slots, share, demotion.LOOKS, self.pins.rows())

    def cool(self, name: str, places: bytes, stored: bytes, now: float) -> Cooled:
        """What of a GPU's blocks goes down to its node's memory next.

        places, stored (uint8 mask): what became of the last answer.
        """
        self._check(now)
        at, done = np.frombuffer(places, PLACE), np.frombuffer(stored, np.uint8)
        node, host = self.nodes.get(name), self.nodes.get(host_of(name))
        if node is None or host is None or node is host or len(at) != len(done):
            return Cooled(b"", b"", b"")
        self.counters["cooled"] += self._cooling.settle(name, at, done)
        self.pins.settle()
        if node.offered_to != index.TO_OWN or host.offered_to != index.TO_ALL:
            return Cooled(b"", b"", b"")
        return self._cooling.next(node, host)

    def indices(self) -> dict[int, str]:
        """Nodes by the index that places carry: their memory's, and their own tier's."""
        own = {tier.index: name for name, tier in self._below.tiers.items() if tier.owner}
        return {node.index: name for name, node in self.nodes.items()} | own

    # ------------------------------------------------------------------ slabs

    # ------------------------------------------------------------------ all

    def clear(self, now: float) -> int:
        """Forget every block; what is held stays until it is let go. Returns how many keys there were."""
        self._check(now)
        keys = int(self._shelves.c.state[ENTRIES])
        self.floor = self._shelves.last_gen
        for node in self.nodes.values():
            for record in node.slabs.values():
                slabs.clear_rows(self._shelves.c, *self._shelves.span(record))
        self._below.clear()
        self.pins.settle()
        return keys

    def stats(self, now: float) -> dict[str, Any]:
        """Slots by node and state, holds, and totals since start."""
        self._check(now)
        held = [hold.writes for client in self.clients.values() for hold in client.holds.values()]
        tiers = self._below.stats()
        used = sum(tier["bytes_used"] for tier in tiers.values())
        return {
            "epoch": self.epoch,
            "keys": int(self._shelves.c.state[ENTRIES]),
            "leases": held.count(False),
            "reservations": held.count(True),
            "clients": len(self.clients),
            "pinned": len(self.pins),
            "evicted": int(self._shelves.c.shelves["evicted"].sum()),
            **self.counters,
            "nodes": {name: self._memory.stats(node, now) for name, node in self.nodes.items()},
            "tiers": tiers,
            "external_cache_usage": used / max(1, sum(tier["capacity"] for tier in tiers.values())),
        }

    def _find(self, keys: bytes) -> tuple[Keys, Rows]:
        k = np.frombuffer(keys, np.uint64).reshape(-1, 2)
        firsts = np.empty(len(k), np.int64)
        index.find(self._shelves.c, k, firsts)
        return k, firsts


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
