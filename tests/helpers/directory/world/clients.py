"""The clients of a world, which call late, twice, or not at all."""

import struct
from typing import Any

import numpy as np

from helpers.directory.checks import rows_of
from helpers.directory.oracle.slots import LOCATION, unpack
from helpers.directory.world.cast import Cast, Held, Worker
from helpers.directory.world.documents import DEPTH, DOCUMENTS, LONGEST, SIZES
from helpers.directory.world.locations import split
from raykv.directory.kernels import columns
from raykv.protocol.clients import (
    NOT_WRITTEN,
    UNTOUCHED,
    WRITTEN,
    Call,
    CommitRequest,
    Intent,
    MatchRequest,
    NextWindowRequest,
    ReserveRequest,
)

TENANTS = ("", "one", "two", "three")


class Clients(Cast):
    """Each public method is something that a client may do at any time."""

    def _worker(self) -> Worker:
        self.ids += 1
        node = self.rng.choice([*self.names, *self.names, *self.gpus, *self.gpus, "nowhere"])
        return Worker(self.ids, node, self.rng.choice(TENANTS))

    def call(self, worker: Worker) -> Call:
        rng = self.rng
        worker.seq += 1
        late = rng.random() < 0.05
        held = struct.pack(f"<{len(worker.holds) + len(worker.intents)}Q", *worker.holds, *worker.intents)
        if late and rng.random() < 0.5:
            held = b""  # as if sent before the client held anything
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
            return self.rng.choice(list(worker.holds))  # use an id twice
        self.ids += 1
        return self.ids

    def match(self) -> None:
        self._match(self.rng.choice(self.workers), *self.keys())

    def _match(self, worker: Worker, size: int, keys: list[bytes], stages: tuple[int, ...] = (LONGEST, 0, 1, 3)) -> int:
        lease = self.new_id(worker)
        stage = self.rng.choice(stages)
        terms: Any = {"tenant": worker.tenant, "counted": self.rng.random() < 0.8}
        request = MatchRequest(lease, worker.node, b"".join(keys), size, stage, **terms)
        got = self.do("match", self.call(worker), request, self.now)
        worker.holds.pop(lease, None)
        self._leased(worker, lease, size, keys, got)
        return lease

    def match_parts(self) -> None:
        """Match one to three parts, each for a reader on any node, some with a window of the last blocks."""
        rng = self.rng
        worker, (size, keys) = rng.choice(self.workers), self.keys()
        leases = list(dict.fromkeys(self.new_id(worker) for _ in range(rng.randint(1, 3))))
        documents = [keys[:LONGEST], *DOCUMENTS.get(size, DOCUMENTS[SIZES[0]])[:6]]
        parts = [documents[0], *rng.choices(documents, k=len(leases) - 1)]
        parts = [part[: min(map(len, parts))] for part in parts]
        windows, tokens = [rng.choice([0, 0, 1, 2, 3]) for _ in parts], [rng.choice([1, 1, 1, 2, 3]) for _ in parts]
        aheads = [rng.choice([0, 0, 0, 0, 1, 2]) for _ in parts]
        requests = [
            MatchRequest(
                *(lease, rng.choice([worker.node, *self.names, *self.names, "nowhere"]), b"".join(part), size),
                *(rng.choice([LONGEST, 0, 1, 3]), window, tokens, worker.tenant),
                ahead=ahead,
            )
            for lease, part, window, tokens, ahead in zip(leases, parts, windows, tokens, aheads, strict=True)
        ]
        got = self.do("match_parts", self.call(worker), tuple(requests), self._intent(worker), self.now)
        for lease in leases:
            worker.holds.pop(lease, None)
        for lease, part, found in zip(leases, parts, got.parts, strict=False):
            self._leased(worker, lease, size, part[found.first :], found)
        if rng.random() < 0.5:  # release all leases together
            for lease in leases:
                worker.holds.pop(lease, None)

    def _intent(self, worker: Worker) -> Intent | None:
        """The intent of a question, or None. Before, some of the worker's intents end."""
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
        locations, staged = split(got.source), split(got.staged)
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
        for pause in rng.choice([(0.0,), (0.0, 0.3, 0.3)]):  # a reader that gets no slot asks again
            self.now += pause
            self._next_window(by, worker, lease, stop)

    def _next_window(self, by: Worker, worker: Worker, lease: int, stop: int) -> None:
        """A worker asks for staging slots of another's lease, or its own, up to block `stop`."""
        held = worker.holds[lease]
        again, may_wait = self.rng.random() < 0.2, self.rng.random() < 0.8
        request = NextWindowRequest(worker.id, lease, held.read, stop, held.size, again, may_wait)
        answer = self.do("next_window", self.call(by), request, self.now)
        passed, source, staged = split(answer.passed), split(answer.source), split(answer.staged)
        held.locations[: len(passed)] = passed
        held.locations[held.read : held.read + len(source)] = source
        held.staged = [bytes(LOCATION.size)] * held.read + staged
        self.grants.update(zip(staged, held.keys[held.read :], strict=False))

    def crowd(self) -> None:
        """Several workers read one document, some blocks at a time. Each is told at once of what the others pulled."""
        rng = self.rng
        size, keys = max((self.keys() for _ in range(8)), key=lambda it: sum(self.real.stored(b"".join(it[1])).found))
        readers = {worker.node: worker for worker in rng.sample(self.workers, len(self.workers))}.values()
        leases = [(worker, self._match(worker, size, keys, (0, 1, 2))) for worker in readers]
        for _ in range(rng.randint(2, 20)):
            worker, lease = rng.choice(leases)
            if (held := worker.holds.get(lease)) is None or held.writes:
                continue
            self.now += rng.choice([0.0, 0.0, 0.1, 0.3])
            came = [slot for slot in held.staged if unpack(slot)[0][4]] if rng.random() < 0.9 else []
            worker.pulled += came
            held.read = min(len(held.keys), held.read + len(came))
            self._next_window(worker, worker, lease, held.read + rng.randint(1, 5))

    def reserve(self) -> None:
        rng = self.rng
        worker = rng.choice(self.workers)
        size, keys = self.keys()
        start = rng.choice([0, rng.randint(0, len(keys)), rng.randint(-1, len(keys) + 1)])
        reservation = self.new_id(worker)
        call = self.call(worker)
        stored = []
        windows = self.real.allocator.lacking  # blocks are evicted for these before the batch is served
        if self.with_oracle and start >= 0 and not call.corrupt and not call.pulled and not windows:
            swapped = {
                key for client in self.real.clients.values() for key in client.swapped
            }  # their client may have expired
            stored = [key for key in keys if self._present(key) and key not in swapped]
        request = ReserveRequest(reservation, worker.node, b"".join(keys), start, size, worker.tenant)
        got = self.do("reserve", call, request, self.now)
        assert all(self._present(key) for key in stored), "a batch evicted its own keys"
        worker.holds.pop(reservation, None)
        granted = [keys[i] for i in np.frombuffer(got.indices, np.int32)]
        worker.holds[reservation] = Held(True, size, granted, split(got.locations), split(got.staged))
        self.grants.update({p: k for p, k in zip(split(got.locations), granted, strict=True)})
        self.grants.update({p: k for p, k in zip(split(got.staged), granted, strict=True) if any(p)})

    def _present(self, key: bytes) -> bool:
        rows = rows_of(self.real, key)
        return any(self.real.c.rows[row]["state"] in (columns.READY, columns.REPLICA) for row in rows)

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
        written = bytes(rng.choices((WRITTEN, NOT_WRITTEN, UNTOUCHED), (18, 1, 1))[0] for _ in pairs)
        for (location, key), done in zip(pairs, written, strict=True):
            if done == WRITTEN:
                self._write_header(location, key)
        if rng.random() < 0.05:
            reservation = rng.choice([self.ids + 1, *worker.holds])
        locations, keys = b"".join(p for p, _ in pairs), b"".join(k for _, k in pairs)
        for _ in range(2 if rng.random() < 0.1 else 1):
            self.do("commit", self.call(worker), CommitRequest(reservation, locations, keys, written), self.now)
            worker.holds.pop(reservation, None)

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
            keys = list(DEPTH)  # all keys there are
        self.do("pin", self.call(self.rng.choice(self.workers)), b"".join(keys), self.now)

    def unpin(self) -> None:
        rng = self.rng
        keys = [key for key in self.real.pins if rng.random() < 0.5] + rng.sample(list(DEPTH), rng.randint(0, 1))
        self.do("unpin", self.call(rng.choice(self.workers)), b"".join(keys), self.now)

    def touch(self) -> None:
        worker, seconds = self.rng.choice(self.workers), self.rng.choice([0.0, 0.4, 3.0, 30.0])
        self.do("touch", self.call(worker), b"".join(self.keys()[1]), seconds, worker.tenant, self.now)

    def done(self) -> None:
        worker, again = self.rng.choice(self.workers), self.rng.random() < 0.5
        self.do("done", self.call(worker), b"".join(self.keys()[1]), self.now, again, worker.tenant)

    def forget(self) -> None:
        self.do("forget", self.call(self.rng.choice(self.workers)), b"".join(self.keys()[1]), self.now)

    def preempted(self) -> None:
        self.do("preempted", self.call(self.rng.choice(self.workers)), b"".join(self.keys()[1]), self.now)

    def disconnect(self) -> None:
        i = self.rng.randrange(len(self.workers))
        if self.rng.random() < 0.5:
            self.do("disconnect", self.workers[i].id, self.now)
        if self.rng.random() < 0.8:  # otherwise the client calls again
            self.workers[i] = self._worker()

    def _pull(self, worker: Worker, size: int, keys: list[bytes]) -> None:
        lease = self._match(worker, size, keys)
        if held := worker.holds.get(lease):
            worker.pulled += [location for location in held.staged if any(location) and self.rng.random() < 0.9]
            if self.rng.random() < 0.7:
                self.do("client_heartbeat", self.call(worker), self.now)
                del worker.holds[lease]
                self.do("client_heartbeat", self.call(worker), self.now)
