"""Raw messages of every kind to a directory, most of them wrong somewhere."""

import contextlib
import struct
from typing import Any

import numpy as np

from helpers.directory.checks import check_invariants
from helpers.directory.pool import KEYS, PAGE, Pool
from helpers.line.fuzz import Mutator
from raykv.protocol.clients import Call, CommitRequest, Intent, MatchRequest, NextWindowRequest, ReserveRequest
from raykv.protocol.location import LOCATION
from raykv.protocol.stores import ArenaDescription, Inventory, SlabReport, SweepResult
from raykv.protocol.tiers import DemotionReport, ExistingBlocks, GpuDemotionReport, TierReport

NODES = ("a", "b", "a/gpu")
STEPS = 60  # calls until all clients and nodes leave, and a new directory takes their place
TTL = 20.0
ROWS = 4096  # a directory with more rows is not checked after each call


class DirectoryDoor:
    """A directory, and the locations and ids that a caller knows from its answers."""

    def __init__(self) -> None:
        self.pool = Pool(slots=8, slabs=3, nodes=NODES)
        self.directory, self.now, self.seq = self.pool.directory, 0.0, 100
        self.steps = 0
        self.locations, self.holds, self.seen = b"", [1], 0
        for node in "ab":
            self.directory.tier_heartbeat(node, TierReport(1 << 20, False, True, b""), 0.0)
            self.directory.report_existing(
                node, ExistingBlocks(b"".join(KEYS[90:92]), struct.pack("<2q", PAGE, PAGE), True), 0.0
            )
        for node in NODES:
            self.pool.store(node, KEYS[len(self.locations) % 7 :][:6])

    def step(self, mutate: Mutator) -> None:
        """Make one call. The directory may refuse it with ValueError or TypeError."""
        name = mutate.choice([name for name in dir(self) if name.startswith("call_")] + 2 * ["call_store", "call_pull"])
        self.now += mutate.choice([0.0, 0.1, 0.1, 1.0, 1.0, 11.0 if mutate.random() < 0.1 else 0.0])
        with contextlib.suppress(ValueError, TypeError):
            getattr(self, name)(mutate)
        self.steps += 1
        if len(self.directory.c.rows) <= ROWS:
            check_invariants(self.directory)

    def everybody_leaves(self) -> None:
        """All clients and nodes leave: then no row is held, and no intent is left."""
        rows = self.directory.c.rows
        for client in list(self.directory.clients):
            self.directory.disconnect(client, self.now)
        self.directory.unpin(self._plain_call(), b"".join(self.directory.pins), self.now)
        self.directory.client_heartbeat(self._plain_call(), self.now)
        for name in list(self.directory.nodes):
            self.directory.remove_node(name, self.now)
        rows = self.directory.c.rows
        assert not rows["holds"].any(), "something stays held"
        assert not len(self.directory.intents), "something stays intended"

    # ------------------------------------------------------------------ parts of messages

    def _plain_call(self) -> Call:
        self.seq += 1
        return Call(7, self.seq, np.array(self.holds[-4:], np.uint64).tobytes())

    def _call(self, m: Mutator) -> Call:
        call = self._plain_call()._replace(client=m.choice([7, 8]))
        if m.random() < 0.2:
            call = call._replace(pulled=self._some(m))
        if m.random() < 0.2:
            call = call._replace(corrupt=self._some(m))
        return m.maybe(m.message, call, 0.3)

    def _some(self, m: Mutator, count: int = 0) -> bytes:
        """Locations that the directory has named, some of them altered."""
        known = np.frombuffer(self.locations, LOCATION)
        if not len(known):
            known = np.zeros(1, LOCATION)
        chosen = known[[m.randrange(len(known)) for _ in range(count or m.randint(1, 5))]]
        return m.maybe(m.records, chosen).tobytes()

    def _keys(self, m: Mutator, count: int = 0) -> bytes:
        start = m.randrange(12)
        return b"".join(KEYS[start : start + (count or m.randint(1, 8))])

    def _know(self, *locations: bytes) -> None:
        self.locations = (self.locations + b"".join(locations))[-64 * LOCATION.itemsize :]

    def _node(self, m: Mutator) -> str:
        return m.choice([*NODES, *NODES, "c", "c/gpu", ""])

    def _hold(self) -> int:
        self.holds.append(self.holds[-1] + 1)
        return self.holds[-1]

    def _wrong(self, m: Mutator, message: Any) -> Any:
        return m.maybe(lambda given: m.message(given, *NODES, "x"), message, 0.6)

    # ------------------------------------------------------------------ clients

    def call_match(self, m: Mutator) -> None:
        request = MatchRequest(self._hold(), self._node(m), self._keys(m), PAGE * m.randint(1, 2), m.randint(0, 9))
        got = self.directory.match(self._call(m), self._wrong(m, request), self.now)
        self._know(got.source, got.staged)

    def call_match_parts(self, m: Mutator) -> None:
        count, parts = m.randint(1, 8), m.randint(0, 3)
        requests = [
            MatchRequest(
                *(self._hold(), self._node(m), self._keys(m, count), PAGE, 3, m.randint(0, 2), m.randint(1, 2)),
                ahead=m.choice([0, 0, 1, 2]),
            )
            for _ in range(parts)
        ]
        if requests and m.random() < 0.3:
            requests.append(m.choice(requests))
        wrong = tuple(self._wrong(m, request) for request in requests)
        intent = m.choice(
            [None, self._wrong(m, Intent(m.choice([self._hold(), *self.holds[-3:]]), m.choice([True, False])))]
        )
        got = self.directory.match_parts(self._call(m), wrong, intent, self.now)
        self._know(*(locations for part in got.parts for locations in part[2:4]))

    def call_next_window(self, m: Mutator) -> None:
        request = NextWindowRequest(m.choice([7, 8]), m.choice(self.holds), m.randint(0, 3), m.randint(0, 9), PAGE)
        self.directory.next_window(self._call(m), self._wrong(m, request), self.now)

    def call_reserve(self, m: Mutator) -> None:
        request = ReserveRequest(self._hold(), self._node(m), self._keys(m), m.randint(0, 2), PAGE * m.randint(1, 2))
        got = self.directory.reserve(self._call(m), self._wrong(m, request), self.now)
        self._know(got.locations, got.staged)

    def call_store(self, m: Mutator) -> None:
        """Reserve and commit, as a sound client does."""
        hold, keys = self._hold(), KEYS[m.randrange(12) :][: m.randint(1, 8)]
        request = ReserveRequest(hold, self._node(m), b"".join(keys), 0, PAGE)
        got = self.directory.reserve(self._plain_call(), request, self.now)
        granted = b"".join(keys[i] for i in np.frombuffer(got.indices, np.int32).tolist())
        written = bytes(m.choice([1, 1, 1, 0]) for _ in range(len(granted) // 16))
        self.directory.commit(self._plain_call(), CommitRequest(hold, got.locations, granted, written), self.now)
        self._know(got.locations)

    def call_pull(self, m: Mutator) -> None:
        """Match, and report the blocks as pulled, as a sound reader does."""
        request = MatchRequest(self._hold(), self._node(m), self._keys(m), PAGE, len(KEYS))
        got = self.directory.match(self._plain_call(), request, self.now)
        self.directory.client_heartbeat(self._plain_call()._replace(pulled=got.staged), self.now)
        self._know(got.source, got.staged)

    def call_commit(self, m: Mutator) -> None:
        n = m.randint(1, 4)
        request = CommitRequest(m.choice(self.holds), self._some(m, n), self._keys(m, n), m.randbytes(n))
        self.directory.commit(self._call(m), self._wrong(m, request), self.now)

    def call_keys(self, m: Mutator) -> None:
        method = m.choice(["pin", "unpin", "done", "forget", "preempted"])
        terms: list[Any] = []
        if method == "done":
            terms = [m.choice([True, False, m.number(), "1"]), m.choice(["", "a", m.number()])]
        getattr(self.directory, method)(self._call(m), m.maybe(m.bytes_of, self._keys(m)), self.now, *terms)

    def call_touch(self, m: Mutator) -> None:
        keys = m.maybe(m.bytes_of, self._keys(m))
        seconds: Any = m.choice([0.0, 1.0, m.number(), "1"])
        tenant: Any = m.choice(["", "a", m.number()])
        self.directory.touch(self._call(m), keys, seconds, tenant, self.now)

    def call_client_heartbeat(self, m: Mutator) -> None:
        self.directory.client_heartbeat(self._call(m), self.now)

    def call_disconnect(self, m: Mutator) -> None:
        self.directory.disconnect(m.choice([7, 8, m.number()]), self.now)

    def call_locate_prefix(self, m: Mutator) -> None:
        self.directory.locate_prefix(m.maybe(m.bytes_of, self._keys(m)))

    def call_stored(self, m: Mutator) -> None:
        self.directory.stored(m.maybe(m.bytes_of, self._keys(m)))

    # ------------------------------------------------------------------ node stores

    def call_join(self, m: Mutator) -> None:
        arena = ArenaDescription(m.choice([b"a", b"c"]), 8 * PAGE, 3, 0)
        self.directory.join(self._node(m), self._wrong(m, arena), self.now)

    def call_adopt(self, m: Mutator) -> None:
        n = m.randint(1, 4)
        found = Inventory(self._some(m, n), self._keys(m, n), bytes(4 * n), m.randbytes(4 * n), self._some(m))
        self.directory.adopt(self._node(m), self._wrong(m, found), self.now, m.choice([0, 3, 3, m.number()]))

    def call_heartbeat(self, m: Mutator) -> None:
        got = self.directory.heartbeat(self._node(m), m.choice([2, 3, 3, m.number()]), self.now)
        self._know(got.sweep if got else b"")

    def call_sweep_result(self, m: Mutator) -> None:
        n = m.randint(1, 4)
        result = SweepResult(self._some(m, n), m.randbytes(n), self._keys(m, n), m.randbytes(8 * n))
        self.directory.sweep_result(self._wrong(m, result), self.now)

    def call_set_slab_target(self, m: Mutator) -> None:
        report = SlabReport(3, m.randint(1, 4), np.arange(m.randrange(2), dtype=np.int32).tobytes())
        self.directory.set_slab_target(self._node(m), self._wrong(m, report), self.now)

    def call_leaving(self, m: Mutator) -> None:
        getattr(self.directory, m.choice(["leave", "stay", "sole_copies", "remove_node"]))(self._node(m), self.now)

    def call_pool(self, m: Mutator) -> None:
        self.directory.indices()
        self.directory.stats(self.now)
        if m.random() < 0.1:
            self.directory.clear(self.now)

    # ------------------------------------------------------------------ tiers

    def call_tier_heartbeat(self, m: Mutator) -> None:
        report = TierReport(1 << 20, False, True, m.choice([b"", b"", b"content!"]))
        self.directory.tier_heartbeat(self._node(m), self._wrong(m, report), self.now)

    def call_report_existing(self, m: Mutator) -> None:
        n = m.randint(1, 4)
        sizes = struct.pack(f"<{n}q", *(PAGE * m.randint(1, 2) for _ in range(n)))
        existing = ExistingBlocks(self._keys(m, n), sizes, m.random() < 0.5)
        self.directory.report_existing(self._node(m), self._wrong(m, existing), self.now)

    def call_demote(self, m: Mutator) -> None:
        n = m.randint(1, 4)
        report = DemotionReport(self._some(m, n), self._keys(m, n), m.randbytes(n), self.seen, m.random() < 0.3)
        got = self.directory.demote(self._node(m), self._wrong(m, report), self.now)
        self.seen = got.number
        self._know(got.source, got.target)

    def call_demote_gpu(self, m: Mutator) -> None:
        n = m.randint(1, 4)
        report = GpuDemotionReport(self._some(m, n), m.randbytes(n))
        got = self.directory.demote_gpu(self._node(m), self._wrong(m, report), self.now)
        self._know(got.source, got.target)
