"""Impossible indices, lengths and offsets from peers, files and Ray calls are a miss or an error, never a crash.

Each of them once killed the process or lost a block, so the tests run in child processes.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from helpers.apart import apart
from helpers.arena import worker as w
from helpers.arena.guarded import SIZE, SLABS, Guarded, guarded
from helpers.arena.worker import PRINT, SLAB
from helpers.tiers.redis_server import redis_server

from raykv.actors.store.node_store import NodeStore
from raykv.actors.store.single_flight import SingleFlight
from raykv.arena import header
from raykv.arena.arena import Arena
from raykv.arena.gpu_arena import copy_between
from raykv.cluster import ray_calls
from raykv.errors import ArenaMismatch
from raykv.protocol import location, stores, transfers
from raykv.protocol.location import ALIGN
from raykv.protocol.transfers import FAILED, PULLED, BlocksRead, Transfer
from raykv.system.counts import Counts
from raykv.system.jit import compile_all
from raykv.tiers import Block, open_tier, parse
from raykv.tiers.base import HEAD_BYTES, path_of
from raykv.tiers.file import FileTier
from raykv.transports import base
from raykv.transports.base import Peer, PullRequest
from raykv.transports.block_server import CLAIM
from raykv.transports.object_store import ObjectStore

IMPOSSIBLE = {
    "a slot and a size whose product overflows": {"slot": 0xFFFFFFFF, "bytes": 0x7FFFFFFF},
    "a slot that is not there": {"slot": 0xFFFFFFFF},
    "a size that no slab has": {"bytes": 0xFFFFFFFF},
    "no bytes": {"bytes": 0},
    "a slab that is not offered": {"slab": 2},
    "a slab beyond the file": {"slab": 0x7FFFFFFF},
    "a slab below the file": {"slab": 0xFFFFFFFF},
    "a generation that no header keeps": {"slab_gen": 1 << 62, "gen": 1 << 63},
}


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    """Compile the kernels in this process, so that child processes have them from the start."""
    compile_all("raykv.arena")


def twisted(gate: Guarded, change: dict[str, int]) -> Any:
    """The locations of the stored blocks, with some fields changed."""
    at = gate.at.copy()
    for name, value in change.items():
        at[name] = value
    return at


def ask_everything(change: dict[str, int]) -> None:
    with guarded() as gate:
        arena, at = gate.arena, twisted(gate, change)
        assert not arena.read_headers(at, gate.keys).there.any()
        blocks = arena.read_for_peer(at, gate.keys)
        assert not blocks.there.any() and not blocks.runs
        assert arena.holds_other_length(at, gate.keys).all() == (change.keys() == {"bytes"})  # only the length differs
        assert len(arena.with_lengths(at)) == len(at)
        if "gen" not in change:
            assert not arena.addresses(at).any()
            assert not arena.identify(at)[0].any() and set(arena.sweep(at)) == {stores.FREED}
            with pytest.raises(ValueError, match="no slot"):
                arena.views(at)
        assert not arena.fill(at, gate.keys, lambda which, addresses: [0] * len(addresses)).any()
        gate.there()


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_location_that_no_directory_grants_is_a_miss(change: dict[str, int]) -> None:
    apart(ask_everything, change)


def ask_of_an_arena_that_offers(count: int) -> None:
    with guarded() as gate:
        header.store(gate.arena._memory[0], header.OFFERED, count)
        far = twisted(gate, {"slab": SLABS + 1000})
        assert not gate.arena.read_headers(far, gate.keys).there.any()
        assert gate.arena.available <= SLABS and gate.arena.given_back() == []
        assert len(gate.arena.inventory().ready) in (0, len(gate.at))
        gate.arena.populate()
        if count > 0:
            gate.there()


@pytest.mark.parametrize("count", [-1, -(1 << 63), 1 << 20, (1 << 63) - 1])
def test_an_arena_whose_superblock_offers_more_than_it_has(count: int) -> None:
    apart(ask_of_an_arena_that_offers, count)


ALTERED_SUPERBLOCK = [
    (word, value)
    for word in range(header.SLAB_BYTES, header.DISCARDS + 1)
    for value in (-1, -(1 << 63), (1 << 63) - 1, 1 << 62)
]


@pytest.mark.parametrize(("word", "value"), ALTERED_SUPERBLOCK)
def test_an_altered_superblock_is_neither_mapped_nor_adopted(word: int, value: int, tmp_path: Path) -> None:
    path = f"/dev/shm/raykv-doors-{os.getpid()}-altered"
    arena = Arena.create(path, PRINT, SLAB, SLABS)
    header.store(arena._memory[0], word, value)
    nonce = arena.nonce
    arena.close()
    try:
        with pytest.raises(ArenaMismatch):
            Arena.attach(path, nonce)
        assert Arena.adopt(path, PRINT, SLAB, SLABS) is None
        assert not os.path.exists(path)  # otherwise no store of this pool could ever use the name
    finally:
        if os.path.exists(path):
            os.unlink(path)


def format_a_slab_of_stride(stride: int) -> None:
    with guarded() as gate:
        gate.arena._memory[0][header.TABLE + 1] = stride
        assert len(gate.arena.inventory().ready) <= len(gate.at)
        grants = gate.grants(1)
        grants["slab_gen"][grants["slab"] == 0] += 100
        gate.arena.write(grants, gate.keys, gate.blocks)
        gate.there(gate.at["slab"] == 0)


@pytest.mark.parametrize("stride", [1, 4097, -7, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_a_slab_whose_size_of_slots_was_altered(stride: int) -> None:
    apart(format_a_slab_of_stride, stride)


@pytest.mark.parametrize("generation", [-1, -(1 << 63), (1 << 63) - 1])
def test_a_slab_whose_generation_was_altered(generation: int) -> None:
    """With such a slab the store could not join any directory."""
    with guarded() as gate:
        gate.arena._memory[0][header.TABLE] = generation
        found = gate.arena.inventory()
        assert set(found.ready["slab"].tolist()) == {1} and not len(found.writing)
        gate.there()


def test_a_grant_older_than_its_slab_formats_nothing() -> None:
    with guarded() as gate:
        late = gate.grants(1)
        late["slab_gen"], late["gen"] = late["gen"] + 1000, late["slab_gen"] + 500  # the two fields are swapped
        assert not gate.arena.write(late, gate.keys, gate.blocks).any()
        gate.there()


@pytest.mark.parametrize("short", ["positions", "expected"])
def test_arrays_of_a_peer_that_are_too_short(short: str) -> None:
    with guarded() as gate:
        with pytest.raises(ValueError, match="of shape"):
            gate.arena.write(gate.grants(1), gate.keys, gate.blocks, **{short: np.zeros(1, np.uint64)})
        assert gate.arena.write(gate.grants(1), gate.keys, gate.blocks).all()


def test_what_a_directory_says_of_slabs_and_epochs_is_checked() -> None:
    with guarded() as gate:
        arena = gate.arena
        for slab in (-1, SLABS, 1 << 40):
            with pytest.raises(ValueError, match="no slab"):
                arena.region(slab)
            assert not arena.give_back(slab, w.GEN + 1000)
        for generation in (-1, location.GENERATIONS, 1 << 63):
            assert not arena.give_back(0, generation)
            with pytest.raises(ValueError, match="generation"):
                arena.raise_floor(generation)
        for epoch in (-1, location.EPOCHS, 1 << 63):
            with pytest.raises(ValueError, match="epoch"):
                arena.raise_epoch(epoch)
        gate.there()


def test_slots_of_another_size_are_not_copied_into() -> None:
    """A copy would write beyond the slots."""
    with guarded() as gate, guarded("-other") as other:
        small = other.grants(1)
        small["bytes"] = ALIGN
        for target in (small, small[:1]):
            with pytest.raises(ValueError, match="sizes"):
                copy_between(gate.arena, gate.at, gate.keys, other.arena, target)
        other.there()


# ---------------------------------------------------------------------- Ray calls


def store_of(gate: Guarded, monkeypatch: pytest.MonkeyPatch, **peer: Any) -> Any:
    """A node store without Ray. peer: the methods of its peers' actors."""
    store: Any = object.__new__(NodeStore)
    memory = SimpleNamespace(arena=gate.arena, index=0, name="here")
    peer_store = Peer("there", SimpleNamespace(**{name: SimpleNamespace(remote=f) for name, f in peer.items()}))
    store._memory, store._memories, store._arena = memory, [memory], gate.arena
    store._demoter, store._pulls, store._counts, store._lacks_gpus = None, SingleFlight(), Counts(), False
    store._peers = SimpleNamespace(get=lambda _: peer_store, forget=lambda _: None)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    return store


@pytest.mark.parametrize("method", ["pull", "push"])
def test_a_transfer_whose_parts_do_not_fit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded() as gate:
        store, grants = store_of(gate, monkeypatch), gate.grants(1)
        other, nothing = grants.copy(), grants.copy()
        other["bytes"], nothing["bytes"] = SIZE + 1, 0
        good = gate.at.tobytes(), gate.keys.tobytes(), grants.tobytes()
        for bad in (
            (good[0][:-32], *good[1:]),
            (good[0], good[1][:-16], good[2]),
            (good[0], good[1], good[2][:-32]),
            (good[0], good[1], good[2] + bytes(5)),
            (good[0], good[1], other.tobytes()),
            (nothing.tobytes(), good[1], nothing.tobytes()),
        ):
            with pytest.raises(ValueError, match=r"[a-z]"):
                getattr(store, method)(bad)
        assert store.pull((b"", b"", b"")) == store.push((b"", b"", b"")) == b""
        gate.there()


@pytest.mark.parametrize("answer", [b"\1", b"", bytes([1] * 100), bytes([77] * 24)])
def test_a_push_whose_verdicts_are_not_one_a_block(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded() as gate:
        store = store_of(gate, monkeypatch, pull=lambda transfer: answer)
        transfer = Transfer(gate.grants(1).tobytes(), gate.keys.tobytes(), gate.at.tobytes())
        assert store.push(tuple(transfer)) == bytes([FAILED] * len(gate.at))


def test_a_read_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded() as gate:
        store = store_of(gate, monkeypatch)
        store._demoter = SimpleNamespace(index=1)
        tier = twisted(gate, {"node": 1, "bytes": 0})
        for locations, keys in ((gate.at, gate.keys[:-1]), (gate.at[:-1], gate.keys), (tier, gate.keys)):
            with pytest.raises(ValueError, match=r"[a-z]"):
                store.read(locations.tobytes(), keys.tobytes())
        with pytest.raises(ValueError, match="8 bytes"):
            store.clear(1, b"short")


# ---------------------------------------------------------------------- answers of peers


def answers(gate: Guarded) -> dict[str, BlocksRead]:
    """Answers that a peer might give to a pull of all blocks."""
    there, sums, positions, _ = (
        gate.arena.read_headers(gate.at, gate.keys)[2],
        *gate.arena.read_headers(gate.at, gate.keys),
    )
    good = BlocksRead(there.astype(np.uint8).tobytes(), sums.tobytes(), positions.tobytes(), [gate.blocks.reshape(-1)])
    wide = np.lib.stride_tricks.as_strided(gate.blocks.reshape(-1)[:1], (gate.blocks.size,), (1 << 20,))
    return {
        "fewer masks": good._replace(mask=good.mask[:-1]),
        "more masks": good._replace(mask=good.mask + b"\1"),
        "one checksum": good._replace(checksums=good.checksums[:8]),
        "one position": good._replace(positions=good.positions[:4]),
        "no bytes": good._replace(runs=[]),
        "half a block": good._replace(runs=[gate.blocks.reshape(-1)[: -SIZE // 2]]),
        "blocks in halves": good._replace(runs=np.split(gate.blocks.reshape(-1), [SIZE // 2])),
        "other numbers": good._replace(runs=[gate.blocks.astype(np.float64)]),
        "steps beyond its memory": good._replace(runs=[wide]),
    }


def pull_an_answer(name: str) -> None:
    with guarded() as gate, guarded("-reader") as reader:
        answer = answers(gate)[name]
        ray_calls.get, ray_calls.wait = lambda _, timeout: tuple(answer), lambda _, timeout: ([answer], [])
        peer = Peer("there", SimpleNamespace(read=SimpleNamespace(remote=lambda *_: answer)))
        order = np.lexsort((gate.at["slot"], gate.at["slab"]))
        request = PullRequest(gate.at[order], gate.keys[order], reader.arena, reader.grants(1), float("inf"))
        with pytest.raises((ValueError, ConnectionError)):
            ObjectStore().pull(peer, None, request)
        reader.there()


@pytest.mark.parametrize(
    "name",
    [
        *("fewer masks", "more masks", "one checksum", "one position", "no bytes", "half a block", "blocks in halves"),
        *("other numbers", "steps beyond its memory"),
    ],
)
def test_an_answer_of_a_peer_that_does_not_fit(name: str) -> None:
    apart(pull_an_answer, name)


def test_records_of_a_peer() -> None:
    claims = np.zeros(3, CLAIM)
    good = claims.tobytes()
    assert len(base.records_of(good, CLAIM, 3)) == 3
    for bad in (good[:-1], good + b"\0", b"", None, (good,)):
        with pytest.raises(ConnectionError):
            base.records_of(bad, CLAIM, 3)  # type: ignore[arg-type]
    odd = bytearray(good)
    odd[0] = 77  # a bool that is neither 0 nor 1
    assert base.records_of(bytes(odd), CLAIM, 3)["there"].view(np.uint8).tolist() == [1, 0, 0]


def test_verdicts_of_another_process() -> None:
    assert transfers.verdicts_of(bytes([PULLED, 77]), 2).tolist() == [PULLED, FAILED]
    for bad in (b"", b"\1", bytes(3)):
        with pytest.raises(ValueError, match="verdicts"):
            transfers.verdicts_of(bad, 2)


# ---------------------------------------------------------------------- tiers


def not_a_file(kind: str, path: Path) -> None:
    make: dict[str, Callable[[Path], object]] = {
        "folder": Path.mkdir,
        "pipe": os.mkfifo,
        "link": lambda path: path.symlink_to("/dev/zero"),
        "link in a circle": lambda path: path.symlink_to(path),
    }
    make[kind](path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "link in a circle"])
@pytest.mark.parametrize("size", [ALIGN, SIZE])
def test_what_is_no_file_in_a_folder_of_blocks(kind: str, size: int, tmp_path: Path) -> None:
    """The tier must not wait for a pipe, nor follow a link."""
    tier = FileTier(parse(f"file://{tmp_path}?capacity=1MiB"))
    keys = [bytes([i] * 16) for i in (1, 2)]
    blocks = [Block(key, bytes(HEAD_BYTES), memoryview(bytes(size))) for key in keys]
    assert tier.put_many(blocks[1:]) == [True]
    path = tmp_path / "0" / path_of(keys[0])
    not_a_file(kind, path)
    out = [memoryview(bytearray(size)) for _ in keys]
    assert tier.get_many(keys, out) == [None, bytes(HEAD_BYTES)]
    assert [key for batch in tier.scan() for key, _ in batch] == keys[1:]
    tier.delete_many(keys[:1])
    assert os.path.lexists(path)
    assert tier.put_many(blocks) == [kind != "folder", True]
    assert tier.get_many(keys[1:], out[1:]) == [bytes(HEAD_BYTES)]
    tier.close()


def test_a_redis_value_that_is_no_string_is_a_miss(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        tier: Any = open_tier(parse(server.url()))
        keys = [bytes([i] * 16) for i in (1, 2)]
        assert tier.put_many([Block(keys[1], bytes(HEAD_BYTES), memoryview(bytes(SIZE)))]) == [True]
        tier._client.rpush(tier._name(keys[0]), b"not ours")
        assert [block for batch in tier.scan() for block in batch] == [(keys[1], SIZE)]
        out = [memoryview(bytearray(SIZE)) for _ in keys]
        assert tier.get_many(keys, out) == [None, bytes(HEAD_BYTES)]
