"""A small cluster around a directory: clients, node stores and their headers, none of which behave.

Every call goes to the directory and to its oracle, and must get one answer.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

import numpy as np
from oracle import PLACE, Oracle, split, unpack

from raykv import index
from raykv.calls import Call
from raykv.directory import Directory
from raykv.place import slot_bytes

SIZES = (4096, 8000, 12288)  # block_bytes: slots of 1, 2 and 3 pages
SLAB = 8 * 4096
NAMES = ("a", "b", "c", "d")
LONGEST = 12
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
    """What a client was told of a hold."""

    writes: bool
    size: int
    keys: list[bytes]
    places: list[bytes]
    staged: list[bytes]
    read: int = 0


@dataclass
class Worker:
    id: int
    node: str
    seq: int = 0
    holds: dict[int, Held] = field(default_factory=dict)
    landed: list[bytes] = field(default_factory=list)
    bad: list[bytes] = field(default_factory=list)


@dataclass
class Store:
    """A node store's arena, as its headers tell of it."""

    nonce: bytes
    slabs: int
    epoch: int = 0
    offered: int = 0
    index: int = -1
    headers: dict[tuple[int, int], tuple[tuple[int, ...], bytes]] = field(default_factory=dict)

    def write(self, place: tuple[int, ...], key: bytes) -> None:
        old = self.headers.get((place[1], place[2]))
        if old and old[0][4] > place[4]:
            return
        self.headers = {at: h for at, h in self.headers.items() if at[0] != place[1] or h[0][4] == place[4]}
        if not old or old[0][5] < place[5]:
            self.headers[place[1], place[2]] = (place, key)


class World:
    """oracle=False: callers are confused beyond what the oracle follows (sizes mixed up); only invariants are checked."""

    def __init__(self, seed: int, oracle: bool = True) -> None:
        self.rng = rng = Random(seed)
        self.locality = rng.choice([1.0, 1.5])
        self.window = rng.choice([4096, 3 * 4096, SLAB, 2 * SLAB])
        self.with_oracle = oracle
        self.names = NAMES[: rng.randint(1, 4)]
        self.sizes = SIZES[: rng.randint(1, 3)]
        self.now = 0.0
        self.steps = 0
        self.ids = 0
        self.grants: dict[bytes, bytes] = {}  # keys of places that were handed to writers, most recent last
        self.log: list[str] = []
        self.workers = [self._worker() for _ in range(4)]
        self.stores = {name: Store(rng.randbytes(16), rng.randint(2, 6)) for name in self.names}
        self._new_directory()

    def _worker(self) -> Worker:
        self.ids += 1
        return Worker(self.ids, self.rng.choice([*self.names, *self.names, "nowhere"]))

    def _new_directory(self) -> None:
        self.real = Directory(locality=self.locality, client_ttl=TTL)
        self.model = Oracle(locality=self.locality, client_ttl=TTL)
        for name in self.names:
            if self.rng.random() < 0.9:
                self.join(name)
                self.adopt(name)
                self.beat(name)

    # ------------------------------------------------------------------ both at once

    def do(self, name: str, *args: Any) -> Any:
        """Ask both. An argument is logged so that a failure can be replayed by hand."""
        self.steps += 1
        self.log.append(f"{name}{args}")
        try:
            real = getattr(self.real, name)(*args)
            if self.with_oracle:
                more = {"choices": self._choices(real)} if name == "reserve" else {}
                model = getattr(self.model, name)(*args, **more)
                assert real == model, f"{name}: directory {real}, oracle {model}"
        except Exception as error:
            error.add_note("the last calls were:\n" + "\n".join(self.log[-8:]))
            raise
        return real

    @staticmethod
    def _choices(reserved: Any) -> dict[int, int]:
        granted = np.frombuffer(reserved.indices, np.int32).tolist()
        return {i: place[0] for i, place in zip(granted, unpack(reserved.places), strict=True)}

    def check(self) -> None:
        """Compare all state, and look whether it makes sense by itself."""
        try:
            check_invariants(self.real)
            assert self.do("stats", self.now)["keys"] >= 0
            if self.with_oracle:
                assert rows_of_directory(self.real) == rows_of_oracle(self.model)
                assert chains_of(self.real) == {
                    key: [(row.slab.node, row.slab.number, row.slot) for row in rows]
                    for key, rows in self.model.table.items()
                }
        except Exception as error:
            error.add_note("the last calls were:\n" + "\n".join(self.log[-8:]))
            raise

    # ------------------------------------------------------------------ clients

    def call(self, worker: Worker) -> Call:
        rng = self.rng
        worker.seq += 1
        late = rng.random() < 0.05
        held = struct.pack(f"<{len(worker.holds)}Q", *worker.holds)
        if late and rng.random() < 0.5:
            held = b""  # sent before anything was held
        if rng.random() < 0.3:
            worker.landed += [p for h in worker.holds.values() for p in h.staged if any(p) and rng.random() < 0.5]
        landed, worker.landed = worker.landed, []
        bad, worker.bad = worker.bad, []
        for place in landed:
            self._write_header(place, self.grants.get(place, b""))
        return Call(worker.id, worker.seq - 3 if late else worker.seq, held, b"".join(landed), b"".join(bad))

    def keys(self) -> tuple[int, list[bytes]]:
        """(block_bytes, keys): mostly a prefix of a document."""
        rng = self.rng
        size = rng.choice(self.sizes)
        doc = min(rng.randrange(16), rng.randrange(16))
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
            return self.rng.choice(list(worker.holds))  # said twice
        self.ids += 1
        return self.ids

    def match(self) -> None:
        worker = self.rng.choice(self.workers)
        size, keys = self.keys()
        lease = self.new_id(worker)
        got = self.do("match", self.call(worker), lease, worker.node, b"".join(keys), size, self.now)
        worker.holds.pop(lease, None)
        places = _split(got.source)
        if places:
            staged = _split(got.staged)
            worker.holds[lease] = Held(False, size, keys[: len(places)], places, staged)
            self.grants.update({p: k for p, k in zip(staged, keys, strict=False) if any(p)})

    def _hold(self, writes: bool) -> tuple[Worker, int, Held] | None:
        found = [(w, i, h) for w in self.workers for i, h in w.holds.items() if h.writes == writes]
        return self.rng.choice(found) if found else None

    def stream(self) -> None:
        rng = self.rng
        if not (found := self._hold(writes=rng.random() < 0.02)):
            return
        worker, lease, held = found
        held.read = rng.choice([rng.randint(0, len(held.keys) + 1), min(len(held.keys), held.read + 1)])
        got = self.do("stream", self.call(worker), lease, held.read, held.size, self.now)
        staged = _split(got.staged)
        held.staged = [bytes(PLACE.size)] * held.read + staged
        self.grants.update(zip(staged, held.keys[held.read :], strict=False))

    def reserve(self) -> None:
        rng = self.rng
        worker = rng.choice(self.workers)
        size, keys = self.keys()
        start = rng.choice([0, rng.randint(0, len(keys)), rng.randint(-1, len(keys) + 1)])
        reservation = self.new_id(worker)
        call = self.call(worker)
        stored = []
        if start >= 0 and not call.held and not call.bad and len(worker.holds) == 0:
            stored = [key for key in keys if self._present(key)]
        got = self.do("reserve", call, reservation, worker.node, b"".join(keys), start, size, self.now)
        assert all(self._present(key) for key in stored), "a batch evicted its own keys"
        worker.holds.pop(reservation, None)
        granted = [keys[i] for i in np.frombuffer(got.indices, np.int32)]
        worker.holds[reservation] = Held(True, size, granted, _split(got.places), _split(got.staged))
        self.grants.update({p: k for p, k in zip(_split(got.places), granted, strict=True)})
        self.grants.update({p: k for p, k in zip(_split(got.staged), granted, strict=True) if any(p)})

    def _present(self, key: bytes) -> bool:
        rows = chain_of(self.real, key)
        return any(self.real._shelves.c.rows[row]["state"] in (index.READY, index.REPLICA) for row in rows)

    def commit(self) -> None:
        rng = self.rng
        if not (found := self._hold(writes=True)):
            return
        worker, reservation, held = found
        pairs = list(zip(held.places, held.keys, strict=True))
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
        for (place, key), done in zip(pairs, written, strict=True):
            if done:
                self._write_header(place, key)
        if rng.random() < 0.05:
            reservation = rng.choice([self.ids + 1, *worker.holds])
        places, keys = b"".join(p for p, _ in pairs), b"".join(k for _, k in pairs)
        for _ in range(2 if rng.random() < 0.1 else 1):
            self.do("commit", self.call(worker), reservation, places, keys, written, self.now)
            worker.holds.pop(reservation, None)

    def _stale(self, worker: Worker) -> list[tuple[bytes, bytes]]:
        """Places that anybody was granted at any time."""
        known = list(self.grants.items())[-60:]
        pairs = self.rng.sample(known, min(4, len(known)))
        if not self.with_oracle:
            pairs += [(_garbled(self.rng, place), key) for place, key in pairs]
        return pairs

    def release(self) -> None:
        if found := self._hold(writes=self.rng.random() < 0.3):
            found[0].holds.pop(found[1])

    def beat_client(self) -> None:
        worker = self.rng.choice(self.workers)
        if self.rng.random() < 0.5:
            self.release()
        self.do("beat_client", self.call(worker), self.now)

    def report(self) -> None:
        """A worker found something altered, or says that of what it should not."""
        worker = self.rng.choice(self.workers)
        worker.bad += [p for h in worker.holds.values() for p in h.places if self.rng.random() < 0.2]
        worker.landed += [place for place, _ in self._stale(worker)]

    def leave(self) -> None:
        i = self.rng.randrange(len(self.workers))
        if self.rng.random() < 0.5:
            self.do("bye", self.workers[i].id, self.now)
        if self.rng.random() < 0.8:  # otherwise it is not gone, and calls again
            self.workers[i] = self._worker()

    # ------------------------------------------------------------------ nodes

    def _write_header(self, place: bytes, key: bytes) -> None:
        fields = unpack(place)[0]
        for store in self.stores.values():
            if store.index == fields[0] and key and fields[4]:
                store.write(fields, key)

    def join(self, name: str) -> None:
        store = self.stores[name]
        count, epoch = store.slabs, store.epoch
        store.index, store.epoch = self.do("join", name, store.nonce, SLAB, count, epoch, self.now, self.window)
        assert store.epoch >= epoch

    def adopt(self, name: str) -> None:
        rng, store = self.rng, self.stores[name]
        known = self.real.nodes.get(name)
        fresh = known is not None and known.state == "joining"
        ready, busy = [], []
        for place, key in store.headers.values():
            place = (store.index, *place[1:])
            if rng.random() < 0.1:
                place, key = (*place[:5], place[5] + rng.choice([-1, 0, 1])), rng.choice(list(DEPTH))
                if SIZE_OF[key] != slot_size(place):
                    continue
            (busy if fresh and rng.random() < 0.15 else ready).append((PLACE.pack(*place), key))
        if not self.with_oracle:
            busy += [(_garbled(rng, place), key) for place, key in busy]
            ready += [(_garbled(rng, place), key) for place, key in ready if rng.random() < 0.1]
        places, keys = (b"".join(part) for part in zip(*ready, strict=True)) if ready else (b"", b"")
        positions = struct.pack(f"<{len(ready)}I", *(DEPTH[key] for _, key in ready))
        stamps = struct.pack(f"<{len(ready)}I", *(rng.randrange(4) for _ in ready))
        self.do("adopt", name, places, keys, positions, stamps, b"".join(p for p, _ in busy), self.now)

    def beat(self, name: str) -> None:
        rng, store = self.rng, self.stores[name]
        store.offered = min(store.slabs, store.offered + rng.randint(0, 2))
        answer = self.do("beat", name, store.offered, self.now)
        if answer is None:
            self.join(name)
            if rng.random() < 0.8:
                self.adopt(name)
        elif answer[2] and rng.random() < 0.7:
            store.epoch = answer[0]
            self.sweep(answer[2])

    def sweep(self, limbo: bytes) -> None:
        rng = self.rng
        places = [place for place in _split(limbo) if rng.random() < 0.8]
        if rng.random() < 0.1:
            places += [place for place, _ in self._stale(self.workers[0])]
        keys, gens = b"", []
        for place in places:
            fields = unpack(place)[0]
            bytes_of = slot_size(fields, self.real)
            keys += rng.choice([key for key, size in SIZE_OF.items() if slot_bytes(size) == bytes_of] or [bytes(16)])
            gens.append(fields[5] - (rng.random() < 0.1 and fields[5] > 0))
        verdicts = bytes(rng.choice([0, 1, 1, 2]) for _ in places)
        self.do("swept", b"".join(places), verdicts, keys, struct.pack(f"<{len(gens)}Q", *gens), self.now)

    def heartbeats(self) -> None:
        quiet = self.rng.random() < 0.15
        for name in self.names:
            if not quiet or self.rng.random() < 0.5:
                self.beat(name)

    def node_lost(self) -> None:
        """A node dies, or its store restarts, with the same arena or a new one."""
        rng = self.rng
        name = rng.choice(self.names)
        store = self.stores[name]
        how = rng.random()
        if how < 0.5:
            self.do("remove_node", name, self.now)
        if how > 0.7:
            store = self.stores[name] = Store(rng.randbytes(16), rng.randint(2, 6), epoch=rng.randint(0, 2))
        if rng.random() < 0.1:
            store.epoch += rng.randint(1, 2)  # another directory was here
        store.offered = 0
        if rng.random() < 0.8:
            self.join(name)
            if rng.random() < 0.9:
                self.adopt(name)

    def restart(self) -> None:
        """The directory dies; a new one asks every node store."""
        for store in self.stores.values():
            store.offered = 0
        self._new_directory()

    def wait(self) -> None:
        self.now += self.rng.choice([0.05, 0.3, 0.6, 1.0, 1.0, 4.0, TTL + 1])

    def clear(self) -> None:
        self.do("clear", self.now)

    # ------------------------------------------------------------------ all

    MIXES: dict[str, dict[Callable[["World"], None], int]] = {}

    def burst(self, mix: str, steps: int) -> None:
        ops, weights = zip(*self.MIXES[mix].items(), strict=True)
        stop, looks = self.steps + steps, 0
        while self.steps < stop:
            before = self.steps
            self.rng.choices(ops, weights)[0](self)
            if self.steps > before and (self.steps >> 4) != looks:
                looks = self.steps >> 4
                self.check()
            self.now += 0.01
            stop -= self.steps == before and 1
        self.check()

    def everybody_goes(self) -> None:
        """Nothing of a client outlives it."""
        for wait in (TTL + 1, 1.0):
            self.now += wait
            self.do("stats", self.now)
        for name in self.real.nodes:
            if answer := self.do("beat", name, 0, self.now):
                n = len(answer[2]) // PLACE.size
                self.do("swept", answer[2], bytes([1]) * n, bytes(16 * n), bytes(8 * n), self.now)
        self.check()
        rows = self.real._shelves.c.rows
        assert not rows["pins"].any()
        assert np.isin(rows["state"], (index.FREE, index.READY, index.REPLICA, index.CLOSED)).all()
        stats = self.do("stats", self.now)
        assert (stats["clients"], stats["leases"], stats["reservations"]) == (0, 0, 0)


_USE = {World.match: 10, World.reserve: 10, World.commit: 9, World.stream: 4, World.release: 4, World.beat_client: 2}
_CARE = {World.heartbeats: 2, World.report: 1, World.wait: 2, World.leave: 1}
World.MIXES = {
    "all": {**_USE, **_CARE, World.node_lost: 1, World.clear: 1, World.restart: 1},
    "use": {**_USE, World.heartbeats: 1},
    "write": {World.reserve: 4, World.commit: 3, World.release: 1},
    "read": {World.match: 6, World.stream: 3, World.release: 2, World.reserve: 1, World.commit: 1},
    "nodes": {**_USE, World.heartbeats: 4, World.node_lost: 4, World.wait: 2},
    "leave": {**_USE, World.leave: 4, World.wait: 3, World.heartbeats: 4},
}


def _split(places: bytes) -> list[bytes]:
    return [places[i : i + PLACE.size] for i in range(0, len(places), PLACE.size)]


def _garbled(rng: Random, place: bytes) -> bytes:
    fields = list(unpack(place)[0])
    i = rng.randrange(len(fields))
    fields[i] = rng.choice([fields[i] + 1, max(0, fields[i] - 1), 0]) if i else rng.randrange(9)
    return PLACE.pack(*fields)


def slot_size(place: tuple[int, ...], directory: Directory | None = None) -> int:
    """Bytes of a place's slot. A place that was to be swept does not tell; the directory's slab does."""
    if place[3] or directory is None:
        return slot_bytes(place[3])
    for node in directory.nodes.values():
        if node.index == place[0] and place[1] in node.slabs:
            return SLAB // directory._shelves.span(node.slabs[place[1]])[1] // 4096 * 4096
    return 0


# ---------------------------------------------------------------------- what a directory holds


def rows_of_directory(directory: Directory) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    """State of every slot, and its turn to be taken."""
    out = {}
    c = directory._shelves.c
    for node in directory.nodes.values():
        for number, record in node.slabs.items():
            base, slots = directory._shelves.span(record)
            for slot, row in enumerate(c.rows[base : base + slots].tolist()):
                k0, k1, gen, last, _, _, _, pins, state, _ = row
                out[node.index, number, slot] = _row(
                    index.STATES[state], struct.pack("<QQ", k0, k1), gen, last, pins, int(c.slabs[record]["gen"])
                )
    return out


def rows_of_oracle(oracle: Oracle) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    return {
        (row.slab.node, row.slab.number, row.slot): _row(
            row.state, row.key, row.gen, row.last, row.pins, row.slab.gen
        )
        for row in oracle.rows()
    }


def _row(state: str, key: bytes, gen: int, last: int, pins: int, slab_gen: int) -> tuple[Any, ...]:
    return (
        state,
        key if state in ("writing", "ready", "replica", "staging") else None,
        gen if state != "free" else None,
        last if state in ("ready", "replica") and not pins else None,
        pins,
        slab_gen,
    )


def _where(directory: Directory, row: int) -> tuple[int, int, int]:
    c = directory._shelves.c
    slab = c.slabs[c.pages[row >> index.PAGE_BITS]]
    return int(c.shelves[slab["shelf"]]["node"]), int(slab["number"]), row - int(slab["base"])


def chain_of(directory: Directory, key: bytes) -> list[int]:
    row = int(directory._find(key)[1][0])
    rows = directory._shelves.c.rows
    chain = []
    while row >= 0:
        chain.append(row)
        row = int(rows[row]["same"])
    return chain


def chains_of(directory: Directory) -> dict[bytes, list[tuple[int, int, int]]]:
    """Slots of every key, by the table."""
    c = directory._shelves.c
    out = {}
    for entry in c.table[c.table != 0].tolist():
        row = (entry & 0xFFFFFFFF) - 1
        key = struct.pack("<QQ", *c.rows[row].tolist()[:2])
        chain = chain_of(directory, key)
        assert chain and chain[0] == row, "an entry that a probe does not find"
        out[key] = [_where(directory, row) for row in chain]
    return out


def check_invariants(directory: Directory) -> None:
    c = directory._shelves.c
    spans = [directory._shelves.span(record) for node in directory.nodes.values() for record in node.slabs.values()]
    live = np.concatenate([np.arange(base, base + slots) for base, slots in spans] or [np.zeros(0, int)])
    assert len(set(live.tolist())) == len(live), "slabs overlap"
    rows = c.rows
    state = rows["state"]
    assert (state[live] < index.CLOSED).all()
    assert not rows["pins"][np.setdiff1d(np.arange(len(rows)), live)].any()
    for node in directory.stats(0.0)["nodes"].values():
        assert sum(node[name] for name in index.STATES) == node["slots"]
    _check_lists(directory, live)
    _check_table(directory, live)
    _check_holds(directory, live)


def _check_lists(directory: Directory, live: Any) -> None:
    c = directory._shelves.c
    rows = c.rows.tolist()
    shelves = {shelf for node in directory.nodes.values() for shelf in node.shelves.values()}
    seen = set()
    for shelf in shelves:
        for which, of in enumerate((index.FREE, index.READY, index.REPLICA)):
            head, tail, count = c.lists[shelf * index.LISTS_PER_SHELF + which].tolist()
            before, row, length, last = -1, head, 0, 1 << 62
            while row >= 0:
                length += 1
                assert length <= count and row not in seen
                seen.add(row)
                assert rows[row][4] == before and rows[row][8] == of and rows[row][9] == 1
                assert int(c.slabs[c.pages[row >> index.PAGE_BITS]]["shelf"]) == shelf
                if of != index.FREE and rows[row][7] == 0:
                    assert rows[row][3] < last, "not in the order of use"
                    last = rows[row][3]
                before, row = row, rows[row][5]
            assert (length, before) == (count, tail)
        staging = [r for r in live.tolist() if rows[r][8] == index.STAGING and _shelf_of(directory, r) == shelf]
        assert len(staging) == c.shelves[shelf]["staging"] <= c.shelves[shelf]["window"]
    for row in live.tolist():
        _, _, _, _, _, _, _, pins, state, listed = rows[row]
        assert listed == (row in seen)
        unheld = pins == 0 and state in (index.FREE, index.READY, index.REPLICA)
        assert listed or not unheld, "an unheld slot that nobody can take"
        assert not listed or unheld or state == index.READY
        assert pins > 0 or state not in (index.WRITING, index.STAGING, index.DROPPED)
        assert pins == 0 or state not in (index.FREE, index.LIMBO)


def _shelf_of(directory: Directory, row: int) -> int:
    c = directory._shelves.c
    return int(c.slabs[c.pages[row >> index.PAGE_BITS]]["shelf"])


def _check_table(directory: Directory, live: Any) -> None:
    c = directory._shelves.c
    chains = chains_of(directory)
    assert len(chains) == c.state[index.ENTRIES]
    in_table = [(key, row) for key in chains for row in chain_of(directory, key)]
    assert all(struct.pack("<QQ", *c.rows[row].tolist()[:2]) == key for key, row in in_table)
    wanted = (index.WRITING, index.READY, index.REPLICA, index.STAGING)
    assert sorted(row for _, row in in_table) == sorted(live[np.isin(c.rows["state"][live], wanted)].tolist())
    for key in chains:
        states = [int(c.rows[row]["state"]) for row in chain_of(directory, key)]
        primaries = states.count(index.READY) + states.count(index.WRITING)
        assert primaries == 1 or (primaries == 0 and index.REPLICA not in states), "replicas of nothing"


def _check_holds(directory: Directory, live: Any) -> None:
    """Who holds a row has pinned it, and nothing else pins."""
    rows = directory._shelves.c.rows
    pins = np.zeros(len(rows), int)
    for client in directory.clients.values():
        for hold in client.holds.values():
            for held, gens in ((hold.source, hold.gens), (hold.staged, hold.staged_gens)):
                mine = held >= 0
                np.add.at(pins, held[mine], 1)
                assert (rows["gen"][held[mine]] == gens[mine]).all(), "a held block was given away"
    assert (pins == rows["pins"]).all(), "pins are not what is held"


def keys_of(size: int, doc: int, n: int) -> bytes:
    return b"".join(DOCUMENTS[size][doc][:n])


__all__ = ["SIZES", "SLAB", "World", "check_invariants", "keys_of", "split"]
