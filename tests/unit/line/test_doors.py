"""Fuzzers: whatever bytes come through a door, the process lives, and stored blocks are read back unchanged.

Each runs for a few seconds in the suite. For hours: RAYKV_FUZZ_SECONDS=36000 RAYKV_FUZZ_SEED=2 make fuzz
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from helpers.arena import worker as w
from helpers.arena.guarded import SIZE, SLABS, Guarded, Locations, guarded
from helpers.arena.worker import PRINT, SLAB
from helpers.directory.door import STEPS, DirectoryDoor
from helpers.line import fuzz
from helpers.line.connection_door import connections
from helpers.line.fuzz import Door, Mutator
from helpers.line.stand_ins import OwnRedisTier, Selector, nixl_of
from numpy.typing import NDArray

from raykv.actors.store.node_store import NodeStore
from raykv.actors.store.single_flight import SingleFlight
from raykv.arena import header
from raykv.arena.arena import Arena
from raykv.cluster import ray_calls
from raykv.errors import ArenaMismatch
from raykv.protocol.location import ALIGN
from raykv.protocol.transfers import PULLED, BlocksRead, Transfer
from raykv.system.counts import Counts
from raykv.tiers import Tier, parse
from raykv.tiers.base import path_of
from raykv.tiers.copier import TierCopier
from raykv.tiers.file import FileTier
from raykv.tiers.guarded import GuardedTier
from raykv.transports.base import Peer, PullRequest
from raykv.transports.nixl import BLOCK_INFO, Nixl
from raykv.transports.object_store import ObjectStore

Mask = NDArray[np.bool_]
Step = Callable[[Mutator], None]


def some(m: Mutator, gate: Guarded) -> NDArray[np.intp]:
    """Numbers of the blocks that a message names: any blocks, in any order, some twice."""
    return np.array([m.randrange(len(gate.at)) for _ in range(m.randint(1, 12))])


def twisted(m: Mutator, gate: Guarded, which: NDArray[np.intp]) -> tuple[Locations, NDArray[np.uint8]]:
    """(locations, keys) of blocks, mostly with something wrong."""
    at, keys = m.maybe(m.records, gate.at[which], 0.9), gate.keys[which]
    return at, m.maybe(lambda right: np.roll(right, 1, 0), keys, 0.1)


# ---------------------------------------------------------------------- what peers read


@contextlib.contextmanager
def reads() -> Iterator[Step]:
    with guarded() as gate:
        yield lambda m: read(m, gate)


def read(m: Mutator, gate: Guarded) -> None:
    arena, which = gate.arena, some(m, gate)
    at, keys = twisted(m, gate, which)
    peer = arena.read_for_peer(at, keys)
    same = (at["slab"] == gate.at["slab"][which]) & (at["slot"] == gate.at["slot"][which])
    same &= (keys == gate.keys[which]).all(1) & (at["gen"] == gate.at["gen"][which]) & (at["bytes"] == SIZE)
    moved = peer.there & ~same  # location and key may both be another block's
    data = np.concatenate([run.reshape(-1) for run in peer.runs]) if peer.runs else np.zeros(0, np.uint8)
    strides = -(-at["bytes"][peer.there].astype(int) // ALIGN) * ALIGN
    assert len(data) <= int(strides.sum())
    if not moved.any() and len(data) == SIZE * int(peer.there.sum()):
        assert (data.reshape(-1, SIZE) == gate.blocks[which[peer.there]]).all()
    assert len(arena.with_lengths(at)) == len(arena.holds_other_length(at, keys)) == len(at)
    arena.identify(at)
    arena.addresses(at)
    with contextlib.suppress(ValueError):
        arena.views(at)
    out = np.zeros((len(at), SIZE), np.uint8)
    with contextlib.suppress(ValueError):
        ok = arena.read(at, keys, out, verify=m.random() < 0.5)
        assert (out[ok & same] == gate.blocks[which[ok & same]]).all()
    gate.there()


# ---------------------------------------------------------------------- writes, sweeps, and slabs given back


def excused(gate: Guarded, at: Locations) -> Mask:
    """(n,) blocks whose slots these locations grant again, by a later generation or a later format."""
    lost = np.zeros(len(gate.at), np.bool_)
    for location in at:
        slab = gate.at["slab"] == location["slab"]
        later = slab & (location["slab_gen"] > gate.at["slab_gen"]) & (location["slab_gen"] <= location["gen"])
        lost |= later | (slab & (location["slot"] == gate.at["slot"]) & (location["gen"] >= gate.at["gen"]))
    return lost


@contextlib.contextmanager
def writes() -> Iterator[Step]:
    with contextlib.ExitStack() as stack:
        gates, turns = [stack.enter_context(guarded())], [0]

        def step(m: Mutator) -> None:
            turns[0] += 1
            if not write(m, gates[0], turns[0]):
                stack.pop_all().close()
                gates[0] = stack.enter_context(guarded())

        yield step


def write(m: Mutator, gate: Guarded, turn: int) -> bool:
    """AssertionError if a block is lost whose slot was not granted again. Returns whether all are still there."""
    arena, which = gate.arena, some(m, gate)
    at = m.maybe(m.records, (gate.grants(turn) if m.random() < 0.7 else gate.at)[which], 0.9)
    rows = gate.blocks[which]
    with contextlib.suppress(ValueError):
        if m.random() < 0.5:
            arena.write(at, gate.keys[which], rows[: m.choice([len(rows), 1])], m.choice([None, np.zeros(1)]))
        elif m.random() < 0.5:
            arena.fill(at, gate.keys[which], lambda mask, addresses: [0] * (len(addresses) - m.choice([0, 0, 1])))
        else:
            arena.sweep(at)
    slab, generation = m.choice([0, 1, 2, m.number()]), m.choice([0, w.GEN, m.number()])
    given_back = generation > w.GEN + 1 and arena.give_back(slab, generation)
    lost = excused(gate, at) | (given_back & (gate.at["slab"] == slab))
    return bool(gate.there(lost).all())


# ---------------------------------------------------------------------- headers, slab table and superblock


@contextlib.contextmanager
def altered_words() -> Iterator[Step]:
    with guarded() as gate:
        words = gate.arena._memory[0]
        sound = words.copy()

        def step(m: Mutator) -> None:
            changed = alter(m, gate, words)
            try:
                use_altered(m, gate, changed)
            finally:
                words[:] = sound

        yield step


def alter(m: Mutator, gate: Guarded, words: header.Words) -> Mask:
    """Write numbers over some words. Returns (n,) the blocks that these words describe."""
    changed = np.zeros(len(gate.at), np.bool_)
    first = gate.arena._shape[1] + 8 * (gate.at["slab"].astype(int) * (SLAB // ALIGN) + gate.at["slot"])
    for _ in range(m.randint(1, 3)):
        kind, i = m.randrange(3), m.randrange(len(first))
        if kind == 0:
            word = m.randrange(16)
            changed[:] = True
        elif kind == 1:
            word = header.TABLE + m.randrange(2 * SLABS)
            changed |= gate.at["slab"] == (word - header.TABLE) // 2
        else:
            word = int(first[i]) + m.randrange(header.HEADER_WORDS)
            changed[i] = True
        value = m.choice([m.number(), int(words[word]) ^ 1 << m.randrange(64), int(words[word]) + m.choice([-1, 1])])
        words[word] = np.uint64(value & (1 << 64) - 1).astype(np.int64)
    return changed


def use_altered(m: Mutator, gate: Guarded, changed: Mask) -> None:
    arena, grants = gate.arena, gate.grants(m.randrange(1000))
    gate.there(changed)
    found = arena.inventory()
    known = {bytes(key) for key in gate.keys}
    assert known - {bytes(key) for key in found.keys} <= {bytes(key) for key in gate.keys[changed]}
    arena.sweep(grants)
    arena.write(grants, gate.keys, gate.blocks)
    arena.read_for_peer(gate.at, gate.keys)
    arena.with_lengths(gate.at)
    arena.populate()
    arena.refilled()
    with contextlib.suppress(ValueError):
        arena.raise_epoch(arena.epoch)
    gate.there(changed)
    with contextlib.suppress(ArenaMismatch):
        client = Arena.attach(arena.path, arena.nonce)
        client.read_headers(gate.at, gate.keys)
        client.close()
    adopt_a_copy(arena)


def adopt_a_copy(arena: Arena) -> None:
    """Adopt a copy of the arena's file, whose owner is dead, as a restarted store does."""
    copy = f"{arena.path}-copy"
    fd = os.open(copy, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, arena._size)
        os.pwrite(fd, arena._memory[0][: arena._shape[1] + 8 * 1024].tobytes(), 0)
    finally:
        os.close(fd)
    adopted = Arena.adopt(copy, PRINT, SLAB, SLABS)
    if adopted:
        adopted.inventory()
        adopted.close(unlink=True)
    assert not os.path.exists(copy)


# ---------------------------------------------------------------------- Ray calls of a node store


@contextlib.contextmanager
def store_calls() -> Iterator[Step]:
    with guarded() as gate:
        store: Any = object.__new__(NodeStore)
        memory = SimpleNamespace(arena=gate.arena, index=0, name="here", transports=Selector(nixl_of(gate.arena)))
        store._memory, store._memories, store._arena = memory, [memory], gate.arena
        store._demoter, store._pulls, store._counts, store._lacks_gpus = None, SingleFlight(), Counts(), False
        asked: dict[str, bytes] = {}
        peer = Peer("there", SimpleNamespace(pull=SimpleNamespace(remote=lambda _: asked["answer"])))
        store._peers = SimpleNamespace(get=lambda _: peer, forget=lambda _: None)
        ray.get = lambda answer, timeout: answer  # type: ignore[assignment]
        turns = iter(range(1 << 60))

        def step(m: Mutator) -> None:
            which = some(m, gate)
            asked["answer"] = m.maybe(m.bytes_of, bytes([PULLED] * len(which)))
            with contextlib.suppress(ValueError, TypeError):
                call(m, store, gate, which, gate.grants(next(turns))[which])
            gate.there()

        yield step


def call(m: Mutator, store: Any, gate: Guarded, which: NDArray[np.intp], grants: Locations) -> None:
    at, keys = twisted(m, gate, which)
    method = m.choice(["pull", "push", "read", "sizes", "serve", "clear"])
    if method in ("pull", "push"):
        at["node"] = m.choice([0, 2, 3])
        right = Transfer(at.tobytes(), keys.tobytes(), grants.tobytes())
        wrong = m.maybe(m.message, right, 0.5)
        target = np.frombuffer(wrong.target[: len(wrong.target) // 32 * 32], grants.dtype)
        if not excused(gate, target).any():  # only a directory may grant slots again
            assert len(getattr(store, method)(tuple(wrong))) == len(target)
    elif method == "read":
        read = BlocksRead(*store.read(m.maybe(m.bytes_of, at.tobytes()), m.maybe(m.bytes_of, keys.tobytes(), 0.1)))
        assert len(read.checksums) == 8 * len(read.mask) == 2 * len(read.positions)
    elif method == "sizes":
        store.sizes(m.maybe(m.bytes_of, at.tobytes()))
    elif method == "serve":
        args = ["agent", at.tobytes(), keys.tobytes(), 0]
        i = m.randrange(len(args) + 1)
        args[i : i + 1] = [m.choice([m.number(), b"", m.bytes_of(at.tobytes()), None])]
        store.serve("here", "nixl", *args)
    else:
        content = m.maybe(m.bytes_of, b"content!")
        store.clear(m.choice([-1, 1 << 63, 1 << 80, 0]), content)


# ---------------------------------------------------------------------- answers of peers


@contextlib.contextmanager
def answers() -> Iterator[Step]:
    with guarded() as gate, guarded("-reader") as reader:
        turns, nixl = iter(range(1 << 60)), nixl_of(reader.arena)

        def step(m: Mutator) -> None:
            which = some(m, gate)
            grants = reader.grants(next(turns))[which]
            grants["slot"] = 100 + np.arange(len(which))
            pull = object_store_answer if m.random() < 0.5 else nixl_answer
            with contextlib.suppress(ValueError, TypeError, ConnectionError):
                verdicts = pull(
                    m,
                    gate,
                    which,
                    PullRequest(gate.at[which], gate.keys[which], reader.arena, grants, time.monotonic() + 20),
                    nixl,
                )
                out = np.zeros((len(which), SIZE), np.uint8)
                ok = reader.arena.read(grants, gate.keys[which], out)
                assert ok[verdicts == PULLED].all()
            reader.there()

        yield step


def object_store_answer(
    m: Mutator, gate: Guarded, which: NDArray[np.intp], request: PullRequest, nixl: Nixl
) -> NDArray[np.uint8]:
    order = np.lexsort((request.source["slot"], request.source["slab"]))
    sums, positions, mask, runs = gate.arena.read_for_peer(request.source[order], request.keys[order])
    right = BlocksRead(mask.tobytes(), sums.tobytes(), positions.tobytes(), [run.copy() for run in runs])
    wrong = m.maybe(m.message, right, 0.9)
    if m.random() < 0.5:
        i = m.randrange(len(runs))
        wrong.runs[i] = m.choice(
            [runs[i][1:], runs[i].astype(float), runs[i][::2], runs[i].reshape(1, -1), runs[0][:0]]
        )
    ray_calls.wait, ray_calls.get = lambda answer, timeout: (answer, []), lambda answer, timeout: tuple(wrong)
    peer = Peer("there", SimpleNamespace(read=SimpleNamespace(remote=lambda *_: None)))
    return ObjectStore().pull(peer, None, request)


def nixl_answer(
    m: Mutator, gate: Guarded, which: NDArray[np.intp], request: PullRequest, nixl: Nixl
) -> NDArray[np.uint8]:
    """The answer of a peer over NIXL. The bytes may be in the slots already."""
    headers, info = gate.arena.read_headers(request.source, request.keys), np.zeros(len(which), BLOCK_INFO)
    info["there"], info["position"], info["sum"] = headers.there, headers.positions, headers.checksums
    data = m.maybe(m.bytes_of, info.tobytes(), 0.9)
    answer = m.choice([(data, 1, b"metadata"), (data, 1, b""), (data, 1), (data, m.number(), b"x"), None])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raykv.transports.nixl.ask", lambda *_: answer)
        return nixl.pull(Peer("there", None), "offer", request._replace(end=time.monotonic() + 20))


# ---------------------------------------------------------------------- tiers


@contextlib.contextmanager
def tier_files() -> Iterator[Step]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    tier = FileTier(parse(f"file://{folder}?capacity=1MiB"))
    try:
        with tier_step(tier, lambda m, key: alter_file(m, folder / "0" / path_of(key))) as step:
            yield step
    finally:
        shutil.rmtree(folder)


def alter_file(m: Mutator, path: Path) -> Callable[[], object]:
    """Alter a file. Returns a function that undoes it."""
    right = path.read_bytes()
    path.unlink()
    kind = m.randrange(8)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to(m.choice(["/dev/zero", "/nowhere", str(path)]))
    elif kind > 3:
        head = m.maybe(m.bytes_of, right[:64])
        path.write_bytes(m.maybe(m.bytes_of, head + right[64:]))

    def undo() -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(right)

    return undo


@contextlib.contextmanager
def redis_values() -> Iterator[Step]:
    tier = OwnRedisTier()

    def alter_value(m: Mutator, key: bytes) -> Callable[[], object]:
        name = tier._name(key)
        right = tier.own.values[name]
        wrong = m.maybe(m.bytes_of, right[:64]) + m.maybe(m.bytes_of, right[64:])
        tier.own.values[name] = m.choice([wrong, wrong, wrong, None, RuntimeError("WRONGTYPE of value")])
        return lambda: tier.own.values.update({name: right})

    with tier_step(tier, alter_value) as step:
        yield step


@contextlib.contextmanager
def tier_step(tier: Tier, alter: Callable[[Mutator, bytes], Callable[[], object]]) -> Iterator[Step]:
    """The step of a tier with all blocks of an arena: alter some, load all, and check the loaded blocks."""
    with guarded() as gate:
        external = GuardedTier(lambda: tier, PRINT)
        assert external.open(b"content!")
        copier, turns = TierCopier(gate.arena, external), iter(range(1 << 60))
        assert copier.demote(gate.at, gate.keys).all()

        def step(m: Mutator) -> None:
            which = np.unique(some(m, gate))
            undo = [alter(m, gate.keys[i].tobytes()) for i in which]
            try:
                load(copier, gate, which, gate.grants(next(turns)))
            finally:
                for each in undo:
                    each()
            gate.there()

        yield step
        external.close()


def load(copier: TierCopier, gate: Guarded, which: NDArray[np.intp], grants: Locations) -> None:
    verdicts = copier.load(gate.keys, gate.arena, grants)
    out = np.zeros_like(gate.blocks)
    ok = gate.arena.read(grants, gate.keys, out)
    assert (ok == (verdicts == PULLED)).all()
    assert (out[ok] == gate.blocks[ok]).all(), "an altered record was taken for a block"
    assert ok[np.setdiff1d(np.arange(len(ok)), which)].all(), "a record is missed because of another"
    assert copier.external.up
    listed = [block for batch in copier.external.scan() for block in batch]
    assert all(len(key) == 16 and size >= 0 for key, size in listed) and copier.external.up


# ---------------------------------------------------------------------- the directory


@contextlib.contextmanager
def messages() -> Iterator[Step]:
    doors = [DirectoryDoor()]

    def step(m: Mutator) -> None:
        doors[0].step(m)
        if doors[0].steps == STEPS:
            doors[0].everybody_leaves()
            doors[0] = DirectoryDoor()

    yield step


# ---------------------------------------------------------------------- connections


@contextlib.contextmanager
def plain_connections() -> Iterator[Step]:
    with connections(encrypted=False) as door:
        yield door.step


@contextlib.contextmanager
def tls_connections() -> Iterator[Step]:
    with connections(encrypted=True) as door:
        yield door.step


DOORS: list[Door] = [reads, writes, altered_words, store_calls, answers, tier_files, redis_values, messages]
DOORS += [plain_connections, tls_connections]


@pytest.mark.timeout(fuzz.SECONDS + 120)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_nothing_that_comes_through_a_door_kills_or_loses_anything(door: Door) -> None:
    steps = fuzz.fuzz(door, fuzz.SECONDS / len(DOORS))
    print(f"{steps} steps")
    assert steps
