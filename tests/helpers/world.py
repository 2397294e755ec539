"""A small cluster around a directory: clients and node stores that call late, twice, or not at all.

Every call goes to the directory and to its oracle, and both must give the same answer.
"""

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any, ClassVar

import numpy as np

from helpers.directory_checks import (
    chain_of,
    chains_of,
    check_invariants,
    pins_of_directory,
    pins_of_oracle,
    rows_of_directory,
    rows_of_oracle,
)
from helpers.oracle import intents as oracle_intents
from helpers.oracle.gpu_demotion import BYTES_PER_CALL
from helpers.oracle.oracle import SOLE_COPIES_PER_CALL, Oracle
from helpers.oracle.slots import LOCATION, unpack
from helpers.oracle.tiers import BATCH_BYTES, KEYS_PER_CALL, TIER_SLAB
from raykv.config import Quota
from raykv.directory import demotion, intents, membership, tier_catalog
from raykv.directory.directory import Directory
from raykv.directory.kernels import columns
from raykv.protocol import (
    FREED,
    ArenaDescription,
    Call,
    CommitRequest,
    DemotionReport,
    Demotions,
    ExistingBlocks,
    GpuDemotionReport,
    GpuDemotions,
    Intent,
    Inventory,
    MatchRequest,
    NextWindowRequest,
    ReserveRequest,
    SlabReport,
    SweepResult,
    TierReport,
    host_of,
    slot_bytes,
)

SIZES = (4096, 8000, 12288)  # block_bytes: slots of 1, 2 and 3 pages
SLAB = 8 * 4096
NAMES = ("a", "b", "c", "d")
LONGEST = 12
TENANTS = ("", "one", "two", "three")
TTL = 10.0


def _key(parent: bytes, token: int) -> bytes:
    return blake2b(parent + bytes([token]), digest_size=16).digest()


def _document(size: int, doc: int) -> list[bytes]:
    """A chain of keys. Documents with equal leading bits share a prefix."""
    keys = [_key(struct.pack("<I", size), doc >> 3)]
    for position in range(1, LONGEST):
        keys.append(_key(keys[-1], doc >> max(0, 3 - position // 2)))
    return keys


DOCUMENTS = {size: [_document(size, doc) for doc in range(16)] for size in SIZES}
DEPTH = {key: depth for docs in DOCUMENTS.values() for doc in docs for depth, key in enumerate(doc)}
SIZE_OF = {key: size for size, docs in DOCUMENTS.items() for doc in docs for key in doc}


@dataclass
class Held:
    """What a client knows of its lease or reservation."""

    writes: bool
    size: int
    keys: list[bytes]
    locations: list[bytes]
    staged: list[bytes]
    read: int = 0


@dataclass
class Worker:
    id: int
    node: str
    tenant: str = ""
    seq: int = 0
    holds: dict[int, Held] = field(default_factory=dict)
    pulled: list[bytes] = field(default_factory=list)
    corrupt: list[bytes] = field(default_factory=list)
    intents: list[int] = field(default_factory=list)


@dataclass
class Store:
    """A node store, and the headers of its arena."""

    nonce: bytes
    slabs: int
    epoch: int = 0
    offered: int = 0
    index: int = -1
    headers: dict[tuple[int, int], tuple[tuple[int, ...], bytes]] = field(default_factory=dict)
    demoted: list[Demotions] = field(default_factory=list)  # all answers that it got
    seen: int = 0  # number of the last answer whose deletions it carried out
    gpu_demoted: list[GpuDemotions] = field(default_factory=list)  # all answers that it got

    def write(self, location: tuple[int, ...], key: bytes) -> None:
        old = self.headers.get((location[1], location[2]))
        if old and old[0][4] > location[4]:
            return
        self.headers = {at: h for at, h in self.headers.items() if at[0] != location[1] or h[0][4] == location[4]}
        if not old or old[0][5] < location[5]:
            self.headers[location[1], location[2]] = (location, key)


class World:
    """oracle=False: callers are more confused than the oracle can follow, and only invariants are checked."""

    gpu_share = 0.5  # of worlds that have GPUs

    def __init__(self, seed: int, oracle: bool = True) -> None:
        self.rng = rng = Random(seed)
        self.locality = rng.choice([1.0, 1.5])
        self.window = rng.choice([4096, 3 * 4096, 3 * 4096, SLAB])
        self.with_oracle = oracle
        self.hosts = NAMES[: rng.randint(1, 4)]
        has_gpus = rng.random() < self.gpu_share
        counts = [rng.choice([0, 1, 1, 2]) if has_gpus else 0 for _ in self.hosts]
        self.gpus = [f"{host}/{n}" for host, count in zip(self.hosts, counts, strict=True) for n in range(count)]
        self.names = [*self.hosts, *self.gpus]
        self.small = [host for host in self.hosts if self.gpus and rng.random() < 0.1]
        rng.shuffle(self.names)  # a GPU may be known before its node
        self.sizes = SIZES[: rng.choice([1, 2, 2, 3])]
        self.now = 0.0
        self.steps = 0
        self.failed = False
        self.ids = 0
        self.grants: dict[bytes, bytes] = {}  # keys by the locations that were granted for them, newest last
        self.log: list[tuple[str, tuple[Any, ...]]] = []  # since the directory started
        self.workers = [self._worker() for _ in range(4)]
        self.stores = {name: Store(rng.randbytes(16), self.slabs(name)) for name in self.names}
        self.tiers = rng.choice(["none", "own", "own", "shared"])
        self.tiered = [name for name in self.hosts if self.tiers != "none" and rng.random() < 0.9]
        self.capacity = rng.choice([1, 2, 6, 6, 30]) * TIER_SLAB + rng.choice([0, 4096])
        self.share, self.min_hits = rng.choice([0.0, 0.25, 0.5, 1.0, 1.0]), rng.choice([0, 0, 0, 0, 1, 2])
        self.quotas = self._quotas() if rng.random() < 0.5 else {}
        self.tier_content: dict[str, dict[bytes, None]] = {}  # by tier: its keys, oldest first
        self._new_directory()

    def slabs(self, name: str) -> int:
        """How many slabs a node store has; a GPU has few, so that it is often full."""
        return self.rng.choice([1, 1, 2]) if name in self.gpus else self.rng.randint(2, 8)

    def slab_bytes(self, name: str) -> int:
        """The slabs of some hosts are too small for the longest blocks of their GPUs."""
        return 2 * 4096 if name in self.small else SLAB

    def _worker(self) -> Worker:
        self.ids += 1
        node = self.rng.choice([*self.names, *self.names, *self.gpus, *self.gpus, "nowhere"])
        return Worker(self.ids, node, self.rng.choice(TENANTS))

    def _new_directory(self) -> None:
        self.real, self.model = self._pair()
        self.log.clear()
        for tenant, quota in self.quotas.items():
            self.do("set_quota", tenant, quota, self.now)
        for name in self.names:
            if self.rng.random() < 0.9:
                self.join(name)
                self.adopt(name)
                self.heartbeat(name)
        for name in self.tiered:
            if self.rng.random() < 0.8:
                self.tier_heartbeat(name)

    def _pair(self) -> tuple[Directory, Oracle]:
        how: dict[str, Any] = {"locality": self.locality, "client_ttl": TTL}
        how |= {"share": self.share, "min_hits": self.min_hits}
        return self._new(**how), Oracle(**how)

    def _new(self, **how: Any) -> Directory:
        return Directory(**how)

    # ------------------------------------------------------------------ both at once

    def do(self, name: str, *args: Any) -> Any:
        """Ask both."""
        self.steps += 1
        self.log.append((name, args))
        with self.explained():
            return self._ask(self.real, self.model, name, args)

    def _ask(self, directory: Directory, oracle: Oracle, name: str, args: tuple[Any, ...]) -> Any:
        with _small_calls():
            real = self._call(directory, name, args)
        if self.with_oracle:
            more = {"choices": self._choices(real)} if name == "reserve" else {}
            model = getattr(oracle, name)(*args, **more)
            assert real == model, f"{name}: directory {real}, oracle {model}"
        return real

    def _call(self, directory: Directory, name: str, args: tuple[Any, ...]) -> Any:
        return getattr(directory, name)(*args)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add to a failure the fewest calls to a new directory that still lead to one."""
        try:
            yield
        except Exception as error:
            if not self.failed:
                self.failed = True
                calls, last = self._shrunk()
                text = "\n".join(f"    {name}{tuple(map(_short, args))}" for name, args in calls)
                error.add_note(f"{len(calls)} calls are enough ({self._settings()}):\n{text}\n    -> {last!r}")
            raise

    def _settings(self) -> str:
        return f"locality {self.locality}, share {self.share}, min_hits {self.min_hits}"

    def _shrunk(self) -> tuple[list[tuple[str, tuple[Any, ...]]], Exception | None]:
        calls, piece = list(self.log), len(self.log)
        stop = time.monotonic() + 60
        last = self._replay(calls)
        while last and piece and time.monotonic() < stop:
            for start in range(0, len(calls), piece):
                fewer = calls[:start] + calls[start + piece :]
                if error := self._replay(fewer):
                    calls, last = fewer, error
                    break
            else:
                piece //= 2
        return calls, last

    def _replay(self, calls: list[tuple[str, tuple[Any, ...]]]) -> Exception | None:
        real, model = self._pair()
        try:
            for name, args in calls:
                self._ask(real, model, name, args)
                if len(calls) < 100:
                    self._compare(real, model)
            self._compare(real, model)
        except Exception as error:
            return error
        return None

    @staticmethod
    def _choices(reserved: Any) -> dict[int, int]:
        granted = np.frombuffer(reserved.indices, np.int32).tolist()
        return {i: location[0] for i, location in zip(granted, unpack(reserved.locations), strict=True)}

    def check(self) -> None:
        """Compare the state of both, and check the directory's invariants."""
        with self.explained():
            self._compare(self.real, self.model)
        self.do("stats", self.now)

    def _compare(self, directory: Directory, oracle: Oracle) -> None:
        check_invariants(directory)
        if self.with_oracle:
            real, model = rows_of_directory(directory), rows_of_oracle(oracle)
            differ = {at: (real.get(at), model.get(at)) for at in real | model if real.get(at) != model.get(at)}
            assert not differ, differ
            assert directory.indices() == oracle.owners()
            assert pins_of_directory(directory) == pins_of_oracle(oracle)
            assert chains_of(directory) == {
                key: [(row.slab.node, row.slab.number, row.slot) for row in rows] for key, rows in oracle.table.items()
            }

    # ------------------------------------------------------------------ clients

    def call(self, worker: Worker) -> Call:
        rng = self.rng
        worker.seq += 1
        late = rng.random() < 0.05
        held = struct.pack(f"<{len(worker.holds) + len(worker.intents)}Q", *worker.holds, *worker.intents)
        if late and rng.random() < 0.5:
            held = b""  # sent before anything was held
        if rng.random() < 0.3:
            worker.pulled += [p for h in worker.holds.values() for p in h.staged if any(p) and rng.random() < 0.5]
        pulled, worker.pulled = worker.pulled, []
        corrupt, worker.corrupt = worker.corrupt, []
        for location in pulled:
            self._write_header(location, self.grants.get(location, b""))
        return Call(worker.id, worker.seq - 3 if late else worker.seq, held, b"".join(pulled), b"".join(corrupt))

    def keys(self) -> tuple[int, list[bytes]]:
        """(block_bytes, keys): mostly a prefix of a document."""
        rng = self.rng
        size = rng.choice(self.sizes)
        doc = min(rng.randrange(16) for _ in range(3))
        keys = DOCUMENTS[size][doc][: rng.randint(0 if rng.random() < 0.05 else 1, LONGEST)]
        if rng.random() < 0.04:
            keys = keys + rng.choices(keys or [bytes(16)], k=3)
        if rng.random() < 0.03:
            rng.shuffle(keys)
        if not self.with_oracle and rng.random() < 0.3:
            size = rng.choice([*SIZES, 0, 1, 40000])
        return size, keys

    def new_id(self, worker: Worker) -> int:
        if worker.holds and self.rng.random() < 0.05:
            return self.rng.choice(list(worker.holds))  # an id that is used twice
        self.ids += 1
        return self.ids

    def match(self) -> None:
        self._match(self.rng.choice(self.workers), *self.keys())

    def _match(self, worker: Worker, size: int, keys: list[bytes]) -> int:
        lease = self.new_id(worker)
        stage = self.rng.choice([LONGEST, 0, 1, 3])
        request = MatchRequest(lease, worker.node, b"".join(keys), size, stage, tenant=worker.tenant)
        got = self.do("match", self.call(worker), request, self.now)
        worker.holds.pop(lease, None)
        self._leased(worker, lease, size, keys, got)
        return lease

    def match_parts(self) -> None:
        """Blocks of one to three parts, or readers, each of which reads them, or the last of them, somewhere."""
        rng = self.rng
        worker, (size, keys) = rng.choice(self.workers), self.keys()
        leases = list(dict.fromkeys(self.new_id(worker) for _ in range(rng.randint(1, 3))))
        documents = [keys[:LONGEST], *DOCUMENTS.get(size, DOCUMENTS[SIZES[0]])[:6]]
        parts = [documents[0], *rng.choices(documents, k=len(leases) - 1)]
        parts = [part[: min(map(len, parts))] for part in parts]
        windows, tokens = [rng.choice([0, 0, 1, 2, 3]) for _ in parts], [rng.choice([1, 1, 1, 2, 3]) for _ in parts]
        requests = [
            MatchRequest(
                *(lease, rng.choice([worker.node, *self.names, *self.names, "nowhere"]), b"".join(part), size),
                *(rng.choice([LONGEST, 0, 1, 3]), window, tokens, worker.tenant),
            )
            for lease, part, window, tokens in zip(leases, parts, windows, tokens, strict=True)
        ]
        got = self.do("match_parts", self.call(worker), tuple(requests), self._intent(worker), self.now)
        for lease in leases:
            worker.holds.pop(lease, None)
        for lease, part, found in zip(leases, parts, got.parts, strict=False):
            self._leased(worker, lease, size, part[found.first :], found)
        if rng.random() < 0.5:  # released together
            for lease in leases:
                worker.holds.pop(lease, None)

    def _intent(self, worker: Worker) -> Intent | None:
        """Of some questions; some of a worker's are over before."""
        rng = self.rng
        worker.intents = [intent for intent in worker.intents if rng.random() < 0.8]
        if rng.random() < 0.3:
            return None
        if rng.random() < 0.1:
            return Intent(0, rng.random() < 0.7)
        intent = rng.choice(worker.intents) if worker.intents and rng.random() < 0.05 else self.new_id(worker)
        worker.intents.append(intent)
        return Intent(intent, rng.random() < 0.7)

    def _leased(self, worker: Worker, lease: int, size: int, keys: list[bytes], got: Any) -> None:
        locations, staged = _split(got.source), _split(got.staged)
        if locations:
            worker.holds[lease] = Held(False, size, keys[: len(locations)], locations, staged)
            self.grants.update({p: k for p, k in zip(staged, keys, strict=False) if any(p)})

    def locate_prefix(self) -> None:
        self.do("locate_prefix", b"".join(self.keys()[1]))

    def stored(self) -> None:
        self.do("stored", b"".join(self.keys()[1]))

    def _hold(self, writes: bool) -> tuple[Worker, int, Held] | None:
        found = [(w, i, h) for w in self.workers for i, h in w.holds.items() if h.writes == writes]
        return self.rng.choice(found) if found else None

    def next_window(self) -> None:
        rng = self.rng
        if not (found := self._hold(writes=rng.random() < 0.02)):
            return
        worker, lease, held = found
        held.read = rng.choice([rng.randint(0, len(held.keys) + 1), min(len(held.keys), held.read + 1)])
        by = worker if rng.random() < 0.7 else rng.choice(self.workers)
        stop = rng.choice([len(held.keys), held.read + rng.randint(-1, 3)])
        request = NextWindowRequest(worker.id, lease, held.read, stop, held.size, rng.random() < 0.2)
        answer = self.do("next_window", self.call(by), request, self.now)
        passed, staged = _split(answer.passed), _split(answer.staged)
        held.locations[: len(passed)] = passed
        held.staged = [bytes(LOCATION.size)] * held.read + staged
        self.grants.update(zip(staged, held.keys[held.read :], strict=False))

    def reserve(self) -> None:
        rng = self.rng
        worker = rng.choice(self.workers)
        size, keys = self.keys()
        start = rng.choice([0, rng.randint(0, len(keys)), rng.randint(-1, len(keys) + 1)])
        reservation = self.new_id(worker)
        call = self.call(worker)
        stored = []
        windows = self.real._allocator.lacking  # for which blocks are evicted before the batch is served
        if self.with_oracle and start >= 0 and not call.corrupt and not call.pulled and not windows:
            swapped = {
                key for client in self.real.clients.values() for key in client.swapped
            }  # such a client may have expired
            stored = [key for key in keys if self._present(key) and key not in swapped]
        request = ReserveRequest(reservation, worker.node, b"".join(keys), start, size, worker.tenant)
        got = self.do("reserve", call, request, self.now)
        assert all(self._present(key) for key in stored), "a batch evicted its own keys"
        worker.holds.pop(reservation, None)
        granted = [keys[i] for i in np.frombuffer(got.indices, np.int32)]
        worker.holds[reservation] = Held(True, size, granted, _split(got.locations), _split(got.staged))
        self.grants.update({p: k for p, k in zip(_split(got.locations), granted, strict=True)})
        self.grants.update({p: k for p, k in zip(_split(got.staged), granted, strict=True) if any(p)})

    def _present(self, key: bytes) -> bool:
        rows = chain_of(self.real, key)
        return any(self.real._size_classes.c.rows[row]["state"] in (columns.READY, columns.REPLICA) for row in rows)

    def commit(self) -> None:
        rng = self.rng
        if not (found := self._hold(writes=True)):
            return
        worker, reservation, held = found
        pairs = list(zip(held.locations, held.keys, strict=True))
        how = rng.random()
        if how < 0.15:
            pairs = [pair for pair in pairs if rng.random() < 0.6]
        elif how < 0.2 and pairs:
            pairs += rng.choices(pairs, k=2)
        elif how < 0.25:
            pairs = self._stale(worker)
        elif how < 0.3 and pairs:
            pairs = [(rng.choice(pairs)[0], key) for _, key in pairs]
        written = bytes(rng.random() < 0.9 for _ in pairs)
        for (location, key), done in zip(pairs, written, strict=True):
            if done:
                self._write_header(location, key)
        if rng.random() < 0.05:
            reservation = rng.choice([self.ids + 1, *worker.holds])
        locations, keys = b"".join(p for p, _ in pairs), b"".join(k for _, k in pairs)
        for _ in range(2 if rng.random() < 0.1 else 1):
            self.do("commit", self.call(worker), CommitRequest(reservation, locations, keys, written), self.now)
            worker.holds.pop(reservation, None)

    def _stale(self, worker: Worker) -> list[tuple[bytes, bytes]]:
        """(location, key) of grants to any client at any time."""
        known = list(self.grants.items())[-60:]
        pairs = self.rng.sample(known, min(4, len(known)))
        if not self.with_oracle:
            pairs += [(_garbled(self.rng, location), key) for location, key in pairs]
        return pairs

    def release(self) -> None:
        if found := self._hold(writes=self.rng.random() < 0.3):
            found[0].holds.pop(found[1])

    def client_heartbeat(self) -> None:
        worker = self.rng.choice(self.workers)
        if self.rng.random() < 0.5:
            self.release()
        self.do("client_heartbeat", self.call(worker), self.now)

    def report(self) -> None:
        """A worker reports blocks as corrupt, and stale locations as pulled."""
        worker = self.rng.choice(self.workers)
        worker.corrupt += [p for h in worker.holds.values() for p in h.locations if self.rng.random() < 0.2]
        worker.pulled += [location for location, _ in self._stale(worker)]

    def pin(self) -> None:
        keys = self.keys()[1][: self.rng.choice([1, 1, 3, LONGEST])]
        if self.rng.random() < 0.15:
            keys = list(DEPTH)  # all that is stored
        ttl, priority = self.rng.choice([None, None, 0.4, 3.0]), self.rng.choice([None, 0, 0, 1, 2])
        self.do("pin", self.call(self.rng.choice(self.workers)), b"".join(keys), self.now, ttl, priority)

    def unpin(self) -> None:
        rng = self.rng
        keys = [key for key in self.real.pins if rng.random() < 0.5] + rng.sample(list(DEPTH), rng.randint(0, 1))
        self.do("unpin", self.call(rng.choice(self.workers)), b"".join(keys), self.now)

    def forget(self) -> None:
        self.do("forget", self.call(self.rng.choice(self.workers)), b"".join(self.keys()[1]), self.now)

    def preempted(self) -> None:
        self.do("preempted", self.call(self.rng.choice(self.workers)), b"".join(self.keys()[1]), self.now)

    def disconnect(self) -> None:
        i = self.rng.randrange(len(self.workers))
        if self.rng.random() < 0.5:
            self.do("disconnect", self.workers[i].id, self.now)
        if self.rng.random() < 0.8:  # else it calls again
            self.workers[i] = self._worker()

    # ------------------------------------------------------------------ tenants

    def set_quota(self) -> None:
        """Give a tenant a quota, or another one, or none any more."""
        rng = self.rng
        tenant = rng.choice(TENANTS[1:])
        if rng.random() < 0.2:
            self.quotas.pop(tenant, None)
            self.do("remove_quota", tenant, self.now)
            return
        self.quotas[tenant] = self._quota(1 - sum(q.minimum for name, q in self.quotas.items() if name != tenant))
        self.do("set_quota", tenant, self.quotas[tenant], self.now)

    def _quotas(self) -> dict[str, Quota]:
        """Of some tenants, from the start."""
        tenants = self.rng.sample(TENANTS[1:], self.rng.randint(1, 3))
        return {tenant: self._quota(1 / len(tenants)) for tenant in tenants}

    def _quota(self, left: float) -> Quota:
        """left: what its minimum may be."""
        minimum = self.rng.choice([0.0, 0.1, 0.25, 0.5, 1.0]) * left
        return Quota(minimum, max(minimum, self.rng.choice([0.0, 0.1, 0.3, 0.6, 1.0, 1.0])))

    # ------------------------------------------------------------------ nodes

    def _write_header(self, location: bytes, key: bytes) -> None:
        fields = unpack(location)[0]
        for store in self.stores.values():
            if store.index == fields[0] and key and fields[4]:
                store.write((*fields[:3], fields[3] or SIZE_OF[key], *fields[4:]), key)  # a target's is 0

    def join(self, name: str) -> None:
        store = self.stores[name]
        arena = ArenaDescription(store.nonce, self.slab_bytes(name), store.slabs, store.epoch)
        window = min(self.window, 3 * 4096) if name in self.gpus else self.window  # else it is all of a GPU
        store.index, store.epoch = self.do("join", name, arena, self.now, window)
        assert store.epoch >= arena.epoch

    def adopt(self, name: str) -> None:
        rng, store = self.rng, self.stores[name]
        known = self.real.nodes.get(name)
        fresh = known is not None and known.state == "joining"
        ready: list[tuple[bytes, bytes]] = []
        busy: list[tuple[bytes, bytes]] = []
        for location, key in store.headers.values():
            location = (store.index, *location[1:])
            if rng.random() < 0.1:
                location, key = (*location[:5], location[5] + rng.choice([-1, 0, 1])), rng.choice(list(DEPTH))
                if SIZE_OF[key] != slot_size(location):
                    continue
            (busy if fresh and rng.random() < 0.15 else ready).append((LOCATION.pack(*location), key))
        if not self.with_oracle:
            busy += [(_garbled(rng, location), key) for location, key in busy]
            ready += [(_garbled(rng, location), key) for location, key in ready if rng.random() < 0.1]
        locations, keys = (b"".join(part) for part in zip(*ready, strict=True)) if ready else (b"", b"")
        positions = struct.pack(f"<{len(ready)}I", *(DEPTH.get(key, 0) for _, key in ready))
        stamps = struct.pack(f"<{len(ready)}I", *(rng.randrange(4) for _ in ready))
        writing = b"".join(location for location, _ in busy)
        self.do("adopt", name, Inventory(locations, keys, positions, stamps, writing), self.now, store.offered)

    def heartbeat(self, name: str) -> None:
        rng, store = self.rng, self.stores[name]
        store.offered = min(store.slabs, store.offered + rng.randint(0, 2))
        answer = self.do("heartbeat", name, store.offered, self.now)
        if answer is None:
            self.join(name)
            if rng.random() < 0.8:
                self.adopt(name)
        elif answer.sweep and rng.random() < 0.7:
            store.epoch = answer.epoch
            self.sweep(answer.sweep)

    def sweep(self, quarantined: bytes) -> None:
        rng = self.rng
        locations = [location for location in _split(quarantined) if rng.random() < 0.8]
        if rng.random() < 0.1:
            locations += [location for location, _ in self._stale(self.workers[0])]
        keys, gens = b"", []
        for location in locations:
            fields = unpack(location)[0]
            bytes_of = slot_size(fields, self.real)
            keys += rng.choice([key for key, size in SIZE_OF.items() if slot_bytes(size) == bytes_of] or [bytes(16)])
            gens.append(fields[5] - (rng.random() < 0.1 and fields[5] > 0))
        verdicts = bytes(rng.choice([0, 1, 1, 2]) for _ in locations)
        generations = struct.pack(f"<{len(gens)}Q", *gens)
        self.do("sweep_result", SweepResult(b"".join(locations), verdicts, keys, generations), self.now)

    def heartbeats(self) -> None:
        quiet = self.rng.random() < 0.15
        for name in self.names:
            if not quiet or self.rng.random() < 0.5:
                self.heartbeat(name)
                if name in self.tiered and self.rng.random() < 0.4:
                    self.tier_heartbeat(name)

    def node_lost(self) -> None:
        """A node dies, or its store restarts, with the same arena or a new one."""
        rng = self.rng
        name = rng.choice(self.names)
        store = self.stores[name]
        how = rng.random()
        if how < 0.5:
            self.do("remove_node", name, self.now)
        if how > 0.7 or name in self.gpus:  # the blocks on a GPU are lost with its process
            store = self.stores[name] = Store(rng.randbytes(16), self.slabs(name), epoch=rng.randint(0, 2))
        if rng.random() < 0.1:
            store.epoch += rng.randint(1, 2)  # another directory was here
        store.offered = 0
        if rng.random() < 0.8:
            self.join(name)
            if rng.random() < 0.9:
                self.adopt(name)

    def leave_node(self) -> None:
        """A node is about to leave. Most often others stay, and have copies of some of its blocks."""
        rng = self.rng
        name = rng.choice(self.hosts if rng.random() < 0.95 else self.names)
        if any(not node.leaving for other, node in self.real.nodes.items() if other != name) or rng.random() < 0.1:
            for _ in range(rng.choice([0, 2, 4])):
                self._pull(rng.choice(self.workers), *self.keys())
            self.do("leave", name, self.now)

    def sole_copies(self) -> None:
        """Ask for a node's sole copies, and have another node pull some."""
        rng = self.rng
        leaving = [name for name, node in self.real.nodes.items() if node.leaving]
        name = rng.choice([host_of(name) if rng.random() < 0.9 else name for name in leaving or self.names])
        answer = self.do("sole_copies", name, self.now)
        size = rng.choice(self.sizes)
        keys = [key for key in _keys(answer.keys if answer else b"") if SIZE_OF.get(key) == size][: rng.randint(1, 6)]
        if keys and rng.random() < 0.7:
            self._pull(
                rng.choice([worker for worker in self.workers if worker.node != name] or self.workers), size, keys
            )

    def _pull(self, worker: Worker, size: int, keys: list[bytes]) -> None:
        lease = self._match(worker, size, keys)
        if held := worker.holds.get(lease):
            worker.pulled += [location for location in held.staged if any(location) and self.rng.random() < 0.9]
            if self.rng.random() < 0.7:
                self.do("client_heartbeat", self.call(worker), self.now)
                del worker.holds[lease]
                self.do("client_heartbeat", self.call(worker), self.now)

    # ------------------------------------------------------------------ external tiers

    def content_of(self, name: str) -> dict[bytes, None]:
        """Keys in a node's tier."""
        return self.tier_content.setdefault("" if self.tiers == "shared" else name, {})

    def tier_heartbeat(self, name: str = "") -> None:
        rng = self.rng
        if not self.tiered:
            return
        name = name or rng.choice(self.tiered)
        capacity, shared = self.capacity, self.tiers == "shared"
        if not self.with_oracle:
            capacity, shared = rng.choice([capacity, capacity, 0]), shared ^ (rng.random() < 0.1)
        lost = rng.randbytes(8) if rng.random() < 0.02 else b""
        if lost:
            self.content_of(name).clear()
        report = TierReport(capacity, shared, rng.random() < 0.95, lost)
        answer = self.do("tier_heartbeat", name, report, self.now)
        if answer and answer.list_it and rng.random() < 0.8:
            self.report_existing(name)

    def report_existing(self, name: str = "") -> None:
        """A node lists its tier, in pieces, of which one may be late, or lost."""
        rng = self.rng
        name = name or rng.choice(self.names)
        keys = list(self.content_of(name))
        keys += rng.choices([*keys, *DEPTH], k=rng.choice([0, 0, 1, 8]))
        pieces = [keys[at : at + 5] for at in range(0, len(keys), 5)] or [[]]
        for number, piece in enumerate(pieces):
            if rng.random() < 0.1:
                self.rng.choice([World.clear, World.match, World.reserve, World.commit])(self)
            sizes = [SIZE_OF[key] if rng.random() < 0.97 else rng.choice([-5000, 0, 4096, 1 << 20]) for key in piece]
            last = number == len(pieces) - 1 and rng.random() < 0.9
            existing = ExistingBlocks(b"".join(piece), struct.pack(f"<{len(sizes)}q", *sizes), last)
            self.do("report_existing", name, existing, self.now)

    def demote(self) -> None:
        """A node reports on its last answer, or on other things, and gets another."""
        rng = self.rng
        name = rng.choice(self.tiered or self.names)
        store = self.stores[name]
        answers = store.demoted[-1:] if rng.random() < 0.8 else []
        if rng.random() < 0.15:  # repeated, or late
            answers = answers + rng.choices(store.demoted[-4:] or [Demotions(b"", b"", b"", b"", 0)], k=1)
        if rng.random() < 0.03:
            answers = answers + [s.demoted[-1] for s in self.stores.values() if s.demoted]
        pairs = [pair for a in answers for pair in zip(_split(a.target), _keys(a.keys), strict=True)]
        if rng.random() < 0.15:
            pairs = [pair for pair in pairs if rng.random() < 0.6]
        if not self.with_oracle:
            pairs += [(_garbled(rng, location), key) for location, key in pairs] + self._stale(self.workers[0])
        failing = rng.choice([0.0, 0.0, 0.0, 0.2, 1.0])
        stored = bytes(rng.random() >= failing for _ in pairs)
        for (_, key), done in zip(pairs, stored, strict=True):
            if done and key in SIZE_OF:
                self.content_of(name)[key] = None
        locations, keys = b"".join(location for location, _ in pairs), b"".join(key for _, key in pairs)
        seen = store.seen if rng.random() < 0.9 else rng.choice([-1, 0, store.seen - 1, store.seen + 1])
        got = self.do("demote", name, DemotionReport(locations, keys, stored, seen, rng.random() < 0.5), self.now)
        if rng.random() < 0.9:
            store.demoted.append(got)
            if rng.random() < 0.9:  # else it died before it deleted
                store.seen = got.number
                for key in _keys(got.to_delete):
                    self.content_of(name).pop(key, None)

    # ------------------------------------------------------------------ GPUs

    def demote_gpu(self) -> None:
        """A GPU reports on its last answer, or on other things, and gets another."""
        rng = self.rng
        if not self.gpus:
            return
        full = [name for name, node in self.real.nodes.items() if node.on_gpu and node.slabs and not node.spare]
        name = rng.choice(full if full and rng.random() < 0.8 else self.gpus)
        if rng.random() < 0.03:
            name = rng.choice([*self.names, "nowhere", "nowhere/0"])
        received = self.stores[name].gpu_demoted if name in self.stores else []
        answers = received[-1:] if rng.random() < 0.85 else []
        if rng.random() < 0.15:  # repeated, or late
            answers = answers + rng.choices(received[-4:] or [GpuDemotions(b"", b"", b"")], k=1)
        if rng.random() < 0.03:
            answers = answers + [store.gpu_demoted[-1] for store in self.stores.values() if store.gpu_demoted]
        pairs = [pair for a in answers for pair in zip(_split(a.target), _keys(a.keys), strict=True)]
        if rng.random() < 0.15:
            pairs = [pair for pair in pairs if rng.random() < 0.6]
        if rng.random() < 0.05:
            pairs += self._stale(self.workers[0])
        if not self.with_oracle:
            pairs += [(_garbled(rng, location), key) for location, key in pairs]
        failing = rng.choice([0.0, 0.0, 0.0, 0.2, 1.0])
        stored = bytes(rng.random() >= failing for _ in pairs)
        for (location, key), done in zip(pairs, stored, strict=True):
            if done:
                self._write_header(location, key)
        stored += bytes(rng.random() < 0.01)
        report = GpuDemotionReport(b"".join(location for location, _ in pairs), stored)
        got = self.do("demote_gpu", name, report, self.now)
        if name in self.stores and rng.random() < 0.95:
            received.append(got)
            self.grants.update(zip(_split(got.target), _keys(got.keys), strict=True))

    def set_slab_target(self) -> None:
        """A node's memory grows or shrinks."""
        rng = self.rng
        name = rng.choice(self.names)
        if self.with_oracle or name not in self.real.nodes:
            return
        given = [number for number in self.real.nodes[name].withdrawn if rng.random() < 0.95]
        given += [number for number in range(8) if rng.random() < 0.02]
        limit = rng.randint(1, self.stores[name].slabs)
        report = SlabReport(self.stores[name].offered, limit, np.array(given, np.int32).tobytes())
        self.do("set_slab_target", name, report, self.now)

    # ------------------------------------------------------------------ the directory

    def restart(self) -> None:
        """The directory dies; a new one asks every node store."""
        for store in self.stores.values():
            store.offered = 0
        self._new_directory()

    def wait(self) -> None:
        self.now += self.rng.choice([0.05, 0.3, 0.3, 0.6, 0.6, 1.0, 1.0, 1.0, 4.0, TTL + 1])

    def clear(self) -> None:
        self.do("clear", self.now)

    # ------------------------------------------------------------------ all

    MIXES: ClassVar[dict[str, dict[Callable[["World"], None], float]]] = {}

    def burst(self, mix: str, steps: int) -> None:
        ops, weights = zip(*self.MIXES[mix].items(), strict=True)
        stop, checked = self.steps + steps, 0
        while self.steps < stop:
            before = self.steps
            self.rng.choices(ops, weights)[0](self)
            if self.steps > before and (self.steps >> 4) != checked:
                checked = self.steps >> 4
                self.check()
            self.now += 0.01
            stop -= self.steps == before and 1
        self.check()

    def everybody_leaves(self) -> None:
        """When all clients are gone, nothing is held; when all nodes are, nothing is stored but in a shared tier."""
        self.do("unpin", self.call(self.workers[0]), b"".join(self.real.pins), self.now)
        for wait in (TTL + 1, 1.0):
            self.now += wait
            self.do("stats", self.now)
        for name in self.gpus:  # all are suspect by now, and get no more demotions
            self.do("demote_gpu", name, GpuDemotionReport(b"", b""), self.now)
        for name in self.real.nodes:
            if answer := self.do("heartbeat", name, 0, self.now):
                n = len(answer.sweep) // LOCATION.size
                freed = SweepResult(answer.sweep, bytes([FREED]) * n, bytes(16 * n), bytes(8 * n))
                self.do("sweep_result", freed, self.now)
        unreached = TierReport(self.capacity, self.tiers == "shared", False, b"")
        for name in list(self.real.nodes):
            self.do("demote", name, DemotionReport(b"", b"", b"", 0, False), self.now)  # it stored nothing of the last
            self.do("tier_heartbeat", name, unreached, self.now)
            self.do("demote", name, DemotionReport(b"", b"", b"", 0, False), self.now)
        self.check()
        rows = self.real._size_classes.c.rows
        assert not rows["holds"].any()
        resting = [columns.FREE, columns.READY, columns.REPLICA, columns.EXTERNAL, columns.CLOSED]
        resting += [] if self.with_oracle else [columns.DEMOTING]  # a node may have changed its tier
        assert np.isin(rows["state"], resting).all()
        stats = self.do("stats", self.now)
        assert (stats["clients"], stats["leases"], stats["reservations"], stats["intents"]) == (0, 0, 0, 0)
        for name in list(self.real.nodes):
            self.do("remove_node", name, self.now)
        self.check()
        assert np.isin(self.real._size_classes.c.rows["state"], (columns.FREE, columns.EXTERNAL, columns.CLOSED)).all()


_USE = {
    World.match: 10,
    World.reserve: 9,
    World.commit: 9,
    World.next_window: 4,
    World.release: 9,
    World.client_heartbeat: 2,
}
_USE |= {World.locate_prefix: 2, World.stored: 2, World.match_parts: 4}
_TIERS = {World.tier_heartbeat: 1, World.demote: 12}
_USE |= _TIERS | {World.demote_gpu: 10}
_BY_KEY = {World.pin: 1, World.unpin: 1.5, World.forget: 0.5, World.preempted: 0.5}
_UPKEEP = {World.heartbeats: 4, World.report_existing: 0.3, World.report: 1, World.wait: 1, World.disconnect: 1}
World.MIXES = {
    "all": {
        **{**_USE, **_UPKEEP, **_BY_KEY},
        **{World.node_lost: 1, World.clear: 0.2, World.restart: 0.2, World.leave_node: 0.3, World.sole_copies: 0.6},
        **{World.set_slab_target: 0.5, World.set_quota: 0.5},
    },
    "use": {**_USE, World.heartbeats: 1},
    "gpus": {
        **{
            World.match: 4,
            World.reserve: 8,
            World.commit: 8,
            World.release: 8,
            World.next_window: 1,
            World.demote_gpu: 8,
        },
        **{World.heartbeats: 4, World.demote: 3, World.node_lost: 0.3, World.clear: 0.1, World.set_slab_target: 0.3},
        **{World.pin: 0.5, World.unpin: 0.5, World.forget: 0.5},
    },
    "tenants": {
        **{World.match: 6, World.reserve: 10, World.commit: 10, World.release: 9, World.match_parts: 1},
        **{World.set_quota: 1, World.heartbeats: 4, World.demote: 2, World.demote_gpu: 2, World.tier_heartbeat: 1},
        **{World.pin: 0.2, World.unpin: 0.3, World.report: 0.5, World.node_lost: 0.2},
    },
    "write": {World.reserve: 4, World.commit: 3, World.release: 1},
    "read": {World.match: 6, World.next_window: 3, World.release: 2, World.reserve: 1, World.commit: 1},
    "nodes": {**_USE, World.heartbeats: 4, World.node_lost: 4, World.wait: 2},
    "tiers": {
        **_USE,
        World.demote: 20,
        World.tier_heartbeat: 4,
        World.heartbeats: 3,
        World.report: 1,
        World.node_lost: 0.3,
    },
    "drain": {**_USE, **_BY_KEY, World.leave_node: 2, World.sole_copies: 6, World.node_lost: 0.7, World.heartbeats: 4},
    "pins": {**_USE, **_BY_KEY, World.pin: 6, World.unpin: 5, World.report: 1, World.node_lost: 1, World.heartbeats: 4},
    "full of pins": {
        World.reserve: 8,
        World.commit: 8,
        World.release: 6,
        World.pin: 6,
        World.heartbeats: 1,
        World.unpin: 0.3,
    },
    "disconnect": {**_USE, World.disconnect: 4, World.wait: 3, World.heartbeats: 4},
}


def _split(locations: bytes) -> list[bytes]:
    return [locations[i : i + LOCATION.size] for i in range(0, len(locations), LOCATION.size)]


def _keys(keys: bytes) -> list[bytes]:
    return [keys[i : i + 16] for i in range(0, len(keys), 16)]


@contextmanager
def _small_calls() -> Iterator[None]:
    """With limits so small that a tier is full of a few blocks and an answer of fewer."""
    before = {name: getattr(tier_catalog, name) for name in ("slab_bytes", "BATCH_BYTES", "KEYS_PER_CALL")}
    small = {"slab_bytes": lambda _: TIER_SLAB, "BATCH_BYTES": BATCH_BYTES, "KEYS_PER_CALL": KEYS_PER_CALL}
    gpus_before = {name: getattr(demotion, name) for name in ("BYTES_PER_CALL", "KEYS_PER_CALL")}
    sole_copies = membership.SOLE_COPIES_PER_CALL
    intents_before = {name: getattr(intents, name) for name in ("KEYS_MAX", "TTL_S")}
    try:
        vars(tier_catalog).update(small)
        vars(demotion).update({"BYTES_PER_CALL": BYTES_PER_CALL, "KEYS_PER_CALL": KEYS_PER_CALL})
        membership.SOLE_COPIES_PER_CALL = SOLE_COPIES_PER_CALL
        vars(intents).update({name: getattr(oracle_intents, name) for name in intents_before})
        yield
    finally:
        vars(tier_catalog).update(before)
        vars(demotion).update(gpus_before)
        membership.SOLE_COPIES_PER_CALL = sole_copies
        vars(intents).update(intents_before)


def _short(value: Any) -> Any:
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(str(_short(field)) for field in value)})"
    return f"{len(value)} bytes {blake2b(value, digest_size=3).hexdigest()}" if isinstance(value, bytes) else value


def _garbled(rng: Random, location: bytes) -> bytes:
    fields = list(unpack(location)[0])
    i = rng.randrange(len(fields))
    fields[i] = rng.choice([fields[i] + 1, max(0, fields[i] - 1), 0]) if i else rng.randrange(9)
    return LOCATION.pack(*fields)


def slot_size(location: tuple[int, ...], directory: Directory | None = None) -> int:
    """Bytes of a location's slot. That of a quarantined one is in the directory's slab, not in the location."""
    if location[3] or directory is None:
        return slot_bytes(location[3])
    for node in directory.nodes.values():
        if node.index == location[0] and location[1] in node.slabs:
            return node.slab_bytes // directory._size_classes.span(node.slabs[location[1]])[1] // 4096 * 4096
    return 0
