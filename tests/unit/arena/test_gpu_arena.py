"""Arenas on a GPU, and rows there: on a stand-in for CuPy; with `-m gpu`, on a GPU."""

import errno
import gc
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.arena.gpu_arenas import POOL, SIZE, Locations, gpu_arena, granted, has, memory_arena, some
from helpers.arena.gpus import Bytes, elsewhere, environment, forget, noise, page_locked, put
from helpers.arena.worker import GEN, PRINT, SLAB, block_of, fork, key_of
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from raykv.arena import checksum, files, header
from raykv.arena.arena import Arena
from raykv.arena.buffers import Rows, rows_of
from raykv.arena.files import remove, remove_left_behind
from raykv.arena.gpu import device as devices
from raykv.arena.gpu import host_copy
from raykv.arena.gpu.device import BOUNCE_BYTES, Device
from raykv.arena.gpu_arena import UNKNOWN, GpuArena, copy_between
from raykv.client.leases.lease import Lease
from raykv.client.leases.leased_blocks import LeaseName
from raykv.client.stores.local_store import LocalStore
from raykv.errors import CapacityError, DeviceError
from raykv.protocol.transfers import ALTERED, FAILED, PULLED
from raykv.system import file_locks
from raykv.system.file_locks import SlotLocks
from raykv.transports import selector
from raykv.transports.object_store import ObjectStore
from raykv.transports.tcp import Tcp

SIZES = [1, 4095, 4097, SIZE, 300_001]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    remove_left_behind(POOL)


@pytest.fixture
def host(cupy: Any) -> Iterator[Arena]:
    arena = memory_arena()
    yield arena
    arena.close(unlink=True)


@pytest.fixture
def ours(gpu: Device) -> Iterator[GpuArena]:
    """The GPU's."""
    arena = gpu_arena(gpu)
    yield arena
    arena.close(unlink=True)


@pytest.fixture(params=["registered", "bounced", "gpu"])
def arena(request: pytest.FixtureRequest, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """One that rows on a GPU are copied to and from."""
    if request.param == "bounced":
        monkeypatch.setattr(Device, "register", refuse)
    arena = gpu_arena(gpu) if request.param == "gpu" else memory_arena()
    yield arena
    arena.close(unlink=True)


def refuse(*_: object) -> None:
    raise DeviceError("cudaErrorNotSupported")


@pytest.fixture(autouse=True)
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    return page_locked(monkeypatch)


def on_gpu(cupy: Any, blocks: Bytes) -> Rows:
    return rows_of([cupy.asarray(blocks)])


def read_to_gpu(cupy: Any, arena: Arena, at: Locations, keys: Bytes, verify: bool = False) -> tuple[Any, Bytes]:
    out = cupy.zeros((len(at), int(at["bytes"][0])), np.uint8)
    return arena.read(at, keys, rows_of([out]), verify), out.get()


def sums_of(blocks: Bytes) -> list[int]:
    return [xxh3_64_intdigest(block.tobytes()) for block in blocks]


def header_of(arena: Arena, slot: int, slab: int = 1) -> header.Words:
    first = arena._shape[1] + (slab * (SLAB // 4096) + slot) * header.HEADER_WORDS
    return arena._memory[0][first : first + header.HEADER_WORDS]


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do it once, when a copy on a GPU is done and nobody knows of it yet."""
    original, acts = Device.copy, [act]

    def copy(self: Device, table: Any, *how: Any) -> None:
        original(self, table, *how)
        if acts:
            acts.pop()()

    monkeypatch.setattr(Device, "copy", copy)


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize("size", SIZES)
def test_rows_on_a_gpu(cupy: Any, arena: Arena, size: int) -> None:
    at, keys, blocks = some(3, size)
    assert arena.write(at, keys, on_gpu(cupy, blocks), np.arange(7, 10)).all()
    for verify in (False, True):
        ok, found = read_to_gpu(cupy, arena, at, keys, verify)
        assert ok.all() and (found == blocks).all() and has(arena, at, keys, blocks, verify)
    sums, positions, ok = arena.read_headers(at, keys)
    assert ok.all() and positions.tolist() == [7, 8, 9]
    assert sums.tolist() == ([UNKNOWN] * 3 if isinstance(arena, GpuArena) else sums_of(blocks))
    ok, found = read_to_gpu(cupy, arena, granted(at), keys)
    assert not ok.any() and not found.any()


def test_registered_or_not(gpu: Device, arena: Arena, request: pytest.FixtureRequest, locked: dict[int, int]) -> None:
    at, keys, blocks = some(3)
    assert arena.write(at, keys, blocks).all()
    if not isinstance(arena, GpuArena):
        reached = request.node.callspec.params["arena"] == "registered"
        assert arena.register(gpu.uuid, arena.addresses(at)) == bool(locked) == reached
    arena.close()
    assert not locked


def test_rows_in_parts(cupy: Any, arena: Arena) -> None:
    at, keys, blocks = some(2, 1000)
    parts = [cupy.asarray(blocks[:, a:b]) for a, b in ((0, 1), (1, 700), (700, 1000))]
    assert arena.write(at, keys, rows_of(parts)).all() and has(arena, at, keys, blocks)


def test_host_rows(cupy: Any, ours: GpuArena) -> None:
    """What comes from memory has its checksum on the GPU, too."""
    at, keys, blocks = some(3)
    assert ours.write(at, keys, blocks).all() and has(ours, at, keys, blocks)
    assert ours.read_headers(at, keys)[0].tolist() == sums_of(blocks)
    ok, found = read_to_gpu(cupy, ours, at, keys, verify=True)
    assert ok.all() and (found == blocks).all()


def test_altered_bytes_are_found_by_verify(gpu: Device, ours: GpuArena) -> None:
    at, keys, blocks = some(2)
    assert ours.write(at, keys, blocks).all()
    put(gpu, int(ours.addresses(at)[1]) + 5, ~blocks[1, 5:6])
    out = np.zeros_like(blocks)
    assert ours.read(at, keys, out, verify=True).tolist() == [True, False] and ours.corrupt == 1
    assert ours.read(at, keys, out).all(), "nobody asked for it to be verified"


def test_rows_of_another_gpu(on_host: Any) -> None:
    gpu = devices.device(devices.visible()[0])
    ours, host = gpu_arena(gpu), memory_arena()
    at, keys, blocks = some(2)
    with on_host.cuda.Device(1):
        there, out = on_host.asarray(blocks), on_host.zeros(blocks.shape, np.uint8)
    assert ours.write(at[:1], keys[:1], blocks[:1]).all()
    with pytest.raises(ValueError, match=f"memory of {devices.visible()[1]}.*device='{gpu.uuid}'"):
        ours.write(at[1:], keys[1:], rows_of([there])[1:])
    with pytest.raises(ValueError, match=devices.visible()[1]):
        ours.read(at[:1], keys[:1], rows_of([out])[:1])
    assert ours.write(at[1:], keys[1:], blocks[1:]).all(), "the same grant is good yet"
    assert has(ours, at, keys, blocks)
    assert host.write(at, keys, rows_of([there])).all() and host.read(at, keys, rows_of([out])).all()
    assert (out.get() == blocks).all()
    for arena in (ours, host):
        arena.close(unlink=True)


def test_rows_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "cupy", None)
    interface = {"shape": (2, 8), "typestr": "|u1", "data": (1 << 20, False), "strides": None, "version": 3}
    with pytest.raises(ImportError, match="pip install 'cupy-cuda13x>=14'"):
        rows_of([SimpleNamespace(__cuda_array_interface__=interface)])


def test_ready_is_what_was_copied(cupy: Any, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what was submitted: nobody sees a block whose copy is under way."""
    at, keys, blocks = some(2)
    rows = on_gpu(cupy, blocks)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(arena.read_headers(at, keys)[2].any()))

    def look() -> None:
        thread.start()
        thread.join()

    meanwhile(monkeypatch, look)
    assert arena.write(at, keys, rows).all()
    assert seen == [False] and has(arena, at, keys, blocks)


def test_a_block_evicted_while_it_is_read_is_a_miss(cupy: Any, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    at, keys, blocks = some(2)
    assert arena.write(at, keys, blocks).all()
    new = granted(at, slab=1)[:1]
    meanwhile(monkeypatch, lambda: arena.write(new, key_of(9), blocks[1:]))
    ok, _ = read_to_gpu(cupy, arena, at, keys)
    assert ok.tolist() == [False, True] and has(arena, new, key_of(9), blocks[1:])


# ---------------------------------------------------------------------- a GPU that fails


def test_a_lost_gpu(on_host: Any, locked: dict[int, int]) -> None:
    gpu = devices.device(devices.visible()[0])
    ours, host = gpu_arena(gpu), memory_arena()
    at, keys, blocks = some(2)
    rows = on_gpu(on_host, blocks)
    assert ours.write(at, keys, rows).all() and host.write(at, keys, rows).all()
    host.populate(gpu.uuid)
    assert len(locked) == 2
    on_host.cuda.runtime.lose()
    for arena in (ours, host):
        new = granted(at)
        with pytest.raises(DeviceError):
            arena.write(new, keys, rows)
        with pytest.raises(DeviceError):
            arena.read(at, keys, rows)
        assert not arena._locks.busy(0, 1 << 20) and not len(arena.inventory().writing), "all locks were dropped"
    assert has(host, at, keys, blocks) and host.write(granted(at), keys, blocks).all(), "memory is as it was"
    with pytest.raises(DeviceError):
        copy_between(ours, at, keys, host, granted(at, gen=200))
    assert not len(host.inventory().writing)
    for arena in (ours, host):
        arena.close(unlink=True)
    gc.collect()  # frames of what was raised
    assert not locked


class DirectoryClient:
    def __init__(self) -> None:
        self.blamed, self.faults = 0, []  # type: tuple[int, list[str]]

    def corrupt(self, locations: Locations) -> None:
        self.blamed += len(locations)

    def fault(self, kind: str, detail: object) -> None:
        self.faults.append(kind)


@pytest.mark.parametrize(
    "lost, replaced, faults, blamed", [(True, False, ["gpu"], 0), (False, True, [], 0), (False, False, ["read"], 2)]
)
def test_verdicts_of_blocks_that_were_not_copied(
    on_host: Any, lost: bool, replaced: bool, faults: list[str], blamed: int
) -> None:
    """The directory is told of blocks that are not there; of those that a reader can't reach, or that another arena
    has, it would be wrong."""
    host, directory = memory_arena(), DirectoryClient()
    at, keys, blocks = some(2)
    at["node"], rows = 4, on_gpu(on_host, blocks)
    if lost:
        assert host.write(at, keys, rows).all()
        on_host.cuda.runtime.lose()
    local: Any = object.__new__(LocalStore)
    local.arena = host
    session: Any = SimpleNamespace(directory=directory, local=None if replaced else local)
    lease = Lease(session, local, SIZE, LeaseName(b"", 4, 1, 1, 0), at, keys)
    assert not lease._copy(at, keys, rows, False).any()
    assert (directory.faults, directory.blamed) == (faults, blamed)
    host.close(unlink=True)
    gc.collect()  # frames of what was raised, while this CuPy is here


# ---------------------------------------------------------------------- between arenas


@pytest.fixture(params=["up", "down", "down, bounced"])
def pair(
    request: pytest.FixtureRequest, host: Arena, ours: GpuArena, monkeypatch: pytest.MonkeyPatch
) -> tuple[Arena, Arena]:
    """Source and target."""
    if "bounced" in request.param:
        monkeypatch.setattr(Device, "register", refuse)
    return (host, ours) if request.param == "up" else (ours, host)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("written", ["in memory", "on a GPU"])
def test_copy_between_gpu_and_host(cupy: Any, pair: tuple[Arena, Arena], size: int, written: str) -> None:
    source, target = pair
    at, keys, blocks = some(4, size)
    assert source.write(at, keys, on_gpu(cupy, blocks) if written == "on a GPU" else blocks, np.arange(7, 11)).all()
    keys[2] ^= 1  # another block
    verdicts = copy_between(source, at, keys, target, granted(at))
    assert verdicts.tolist() == [PULLED, PULLED, ALTERED, PULLED]
    there = verdicts == PULLED
    assert has(target, granted(at)[there], keys[there], blocks[there])
    sums, positions, ok = target.read_headers(granted(at), keys)
    assert (ok == there).all() and positions[ok].tolist() == [7, 8, 10] and sums[ok].tolist() == sums_of(blocks[ok])


@pytest.mark.parametrize("size", SIZES)
def test_copy_between_gpus(on_host: Any, size: int) -> None:
    first, second = (gpu_arena(devices.device(uuid)) for uuid in devices.visible())
    at, keys, blocks = some(3, size)
    assert copy_between(first, at, keys, second, granted(at)).tolist() == [ALTERED] * 3, "nothing is there"
    assert first.write(at[:1], keys[:1], on_gpu(on_host, blocks[:1])).all()
    assert first.write(at[1:], keys[1:], blocks[1:], np.array([8, 9])).all()
    put(devices.device(first.gpu), int(first.addresses(at)[2]), ~blocks[2, :1])
    assert copy_between(first, at, keys, second, granted(at)).tolist() == [PULLED, PULLED, ALTERED]
    assert has(second, granted(at)[:2], keys[:2], blocks[:2])
    sums, positions, _ = second.read_headers(granted(at)[:2], keys[:2])
    assert sums.tolist() == sums_of(blocks[:2]) and positions.tolist() == [0, 8]
    for arena in (first, second):
        arena.close(unlink=True)


def test_blocks_altered_on_a_gpu_are_not_demoted(gpu: Device, host: Arena, ours: GpuArena) -> None:
    at, keys, blocks = some(3)
    assert ours.write(at, keys, blocks).all()
    put(gpu, int(ours.addresses(at)[1]) + SIZE - 1, ~blocks[1, -1:])
    assert copy_between(ours, at, keys, host, granted(at)).tolist() == [PULLED, ALTERED, PULLED] and host.corrupt == 1


def test_blocks_evicted_during_copy_between(pair: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, the rest of the batch does not, and its slot is good for another try."""
    source, target = pair
    at, keys, blocks = some(3)
    assert source.write(at, keys, blocks).all()
    new = granted(at, slab=1)[1:2]
    meanwhile(monkeypatch, lambda: source.write(new, key_of(9), blocks[2:]))
    assert copy_between(source, at, keys, target, granted(at)).tolist() == [PULLED, FAILED, PULLED]
    assert target.corrupt == 0 and not len(target.inventory().writing)
    assert copy_between(source, new, key_of(9), target, granted(at)[1:2]).tolist() == [PULLED]
    assert has(target, granted(at)[1:2], key_of(9), blocks[2:])


def test_copy_between_into_slots_that_are_not_granted(pair: tuple[Arena, Arena]) -> None:
    source, target = pair
    at, keys, blocks = some(3)
    assert source.write(at, keys, blocks).all() and target.write(granted(at)[:1], key_of(9), blocks[:1]).all()
    stale, other = granted(at, gen=50), Arena.attach(target.path, target.nonce)
    with other._locks.locked(target._lock_numbers(target._find(stale).headers)[2:]):
        assert copy_between(source, at, keys, target, stale).tolist() == [FAILED, PULLED, FAILED]
    assert has(target, granted(at)[:1], key_of(9), blocks[:1])
    other.close()


def test_demotion_is_no_use_of_a_block(pair: tuple[Arena, Arena]) -> None:
    source, target = pair
    at, keys, blocks = some(2)
    assert source.write(at, keys, blocks).all()
    source._clock_base -= 1000
    stamps = [int(header_of(source, slot)[header.STAMP]) for slot in at["slot"]]
    assert (copy_between(source, at, keys, target, granted(at), used=False) == PULLED).all()
    assert [int(header_of(source, slot)[header.STAMP]) for slot in at["slot"]] == stamps
    assert (copy_between(source, at, keys, target, granted(at, gen=200)) == PULLED).all()
    assert all(header_of(source, slot)[header.STAMP] >= 1000 for slot in at["slot"])


def test_an_arena_closed_during_copy_between(pair: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stops while it copies: no crash."""
    source, target = pair
    at, keys, blocks = some(2)
    assert source.write(at, keys, blocks).all()
    claims = source.read_headers

    def then_close(*args: Any) -> Any:
        found = claims(*args)
        source.close()
        return found

    monkeypatch.setattr(source, "read_headers", then_close)
    assert (copy_between(source, at, keys, target, granted(at)) == FAILED).all() and not len(target.inventory().writing)


@pytest.mark.parametrize("kind", ["host", "ours"])
def test_read_for_peer(request: pytest.FixtureRequest, cupy: Any, kind: str) -> None:
    arena: Arena = request.getfixturevalue(kind)
    at, keys, blocks = some(4)
    assert arena.write(at[:2], keys[:2], blocks[:2], np.array([3, 4])).all()
    assert arena.write(at[3:], keys[3:], on_gpu(cupy, blocks[3:]), np.array([6])).all()
    sums, positions, ok, runs = arena.read_for_peer(at, keys)
    assert ok.tolist() == [True, True, False, True] and positions[ok].tolist() == [3, 4, 6]
    assert np.concatenate([run.reshape(-1) for run in runs]).tobytes() == blocks[ok].tobytes()
    assert sums[ok].tolist() == sums_of(blocks[ok])
    _, _, ok, runs = arena.read_for_peer(at[2:3], keys[2:3])
    assert not ok.any() and not sum(run.size for run in runs)


def test_read_for_peer_of_blocks_that_are_evicted(ours: GpuArena, monkeypatch: pytest.MonkeyPatch) -> None:
    at, keys, blocks = some(3)
    assert ours.write(at, keys, blocks).all()
    meanwhile(monkeypatch, lambda: ours.write(granted(at, slab=1)[1:2], key_of(9), blocks[2:]))
    sums, _, ok, runs = ours.read_for_peer(at, keys)
    assert ok.tolist() == [True, False, True] and runs[0].tobytes() == blocks[ok].tobytes()
    assert sums[ok].tolist() == sums_of(blocks[ok])


def test_read_for_peer_of_a_size_that_no_slab_has(ours: GpuArena) -> None:
    """Memory is taken for the blocks that are there, whatever the size of others is said to be."""
    at, keys, blocks = some(4)
    assert ours.write(at, keys, blocks).all()
    at["bytes"][2:] = 0xFFFFFFFF
    found = ours.read_for_peer(at, keys)
    assert found.there.tolist() == [True, True, False, False]
    assert (np.concatenate(found.runs).reshape(-1, SIZE) == blocks[:2]).all()


def test_no_nixl_for_a_gpu(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes addresses for those of host memory."""
    host, ours = memory_arena(), gpu_arena(devices.device(devices.visible()[0]))
    monkeypatch.setattr(selector, "why_not", lambda: "")
    monkeypatch.setattr(selector, "Nixl", lambda arena: SimpleNamespace(name="nixl", close=lambda: None))
    names = {}
    for arena in (host, ours):
        opened = selector.open_transports(arena, "nixl", "127.0.0.1")
        names[arena] = [transport.name for transport in opened._transports]
        opened.close()
        arena.close(unlink=True)
    assert names == {host: ["nixl", Tcp.name, ObjectStore.name], ours: [Tcp.name, ObjectStore.name]}


# ---------------------------------------------------------------------- pages


LENGTHS = st.one_of(st.integers(0, 5), st.integers(BOUNCE_BYTES - 2, 3 * BOUNCE_BYTES), st.integers(0, BOUNCE_BYTES))


@given(st.lists(LENGTHS, max_size=12))
def test_batches(lengths: list[int]) -> None:
    """Every byte once, and as few batches as that makes of at most BOUNCE_BYTES."""
    table = np.zeros((len(lengths), 3), np.int64)
    table[:, 2] = lengths
    table[:, 0] = 1_000_000 + np.cumsum(lengths) - lengths
    table[:, 1] = 5_000_000_000 - 2 * table[:, 0]  # another order
    before = table.copy()
    batches = list(host_copy.batches(table))
    sizes = [int(batch[2].sum()) for batch in batches]
    assert (table == before).all() and all(0 < size <= BOUNCE_BYTES for size in sizes) and sum(sizes) == sum(lengths)
    assert all(a + b > BOUNCE_BYTES - max(lengths) for a, b in itertools.pairwise(sizes))
    pieces = np.concatenate([np.zeros((3, 0), np.int64), *batches], axis=1).T
    assert (pieces[:, 2] > 0).all() and (np.diff(pieces[:, 0]) == pieces[:-1, 2]).all()
    of = {int(start): (int(source), int(length)) for start, source, length in table.tolist() if length}
    for start, source, length in pieces.tolist():
        first = max(at for at in of if at <= start)
        assert source - of[first][0] == start - first and start + length <= first + of[first][1]


def test_big_blocks_through_the_bounce_buffer(cupy: Any, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "register", refuse)
    monkeypatch.setattr(host_copy, "BOUNCE_BYTES", 70_001)
    arena = memory_arena()
    at, keys, blocks = some(3, 300_001)
    assert arena.write(at, keys, on_gpu(cupy, blocks)).all() and has(arena, at, keys, blocks)
    ok, found = read_to_gpu(cupy, arena, at, keys)
    assert ok.all() and (found == blocks).all()
    arena.close(unlink=True)


@pytest.mark.parametrize("to_gpu", [True, False])
def test_a_bounce_buffer_is_filled_while_the_other_is_emptied(
    on_host: Any, monkeypatch: pytest.MonkeyPatch, to_gpu: bool
) -> None:
    """Each copy out of a buffer waits for the next copy into the other buffer to begin."""
    monkeypatch.setattr(host_copy, "BOUNCE_BYTES", 70_001)
    gpu = devices.device(devices.visible()[0])
    blocks = noise(4 * 70_001).reshape(4, -1)
    far = on_host.asarray(blocks if not to_gpu else np.zeros_like(blocks))
    near = np.zeros_like(blocks) if not to_gpu else blocks
    far_rows, near_rows = far.data.ptr + 70_001 * np.arange(4), near.ctypes.data + 70_001 * np.arange(4)
    begun = [threading.Event() for _ in range(5)]
    begun[4].set()  # nothing comes after the last
    fills, empties = itertools.count(), itertools.count()

    def filled(copy: Callable[..., object]) -> Callable[..., object]:
        def begin(*args: Any) -> None:
            begun[next(fills)].set()
            copy(*args)

        return begin

    def emptied(copy: Callable[..., object]) -> Callable[..., object]:
        def wait(*args: Any) -> None:
            assert begun[next(empties) + 1].wait(20.0), "the next copy waits for this one"
            copy(*args)

        return wait

    here, there = (filled, emptied) if to_gpu else (emptied, filled)
    monkeypatch.setattr(checksum, "copy", here(checksum.copy))
    monkeypatch.setattr(Device, "copy", there(Device.copy))
    target, source = (far_rows, near_rows) if to_gpu else (near_rows, far_rows)
    table = np.stack([target, source, np.full(4, 70_001)], axis=1)
    host_copy.copy(gpu.uuid, table, registered=False, to_gpu=to_gpu)
    monkeypatch.undo()
    assert (far.get() == blocks).all() and (near == blocks).all()


def test_discarded_pages_are_mapped_anew(cupy: Any, gpu: Device, host: Arena, locked: dict[int, int]) -> None:
    """GPUs would go on with the old ones, which a client has registered: it maps the file anew."""
    client = Arena.attach(host.path, host.nonce)
    at, keys, blocks = some(3)
    assert client.write(at, keys, on_gpu(cupy, blocks)).all()
    old, slots = client._memory[1].ctypes.data, client.addresses(at)
    assert locked.keys() == {client.region(1)[0]}
    assert host.give_back(1, GEN + 1000)
    host.discard(1)
    assert host.offer_next()
    new = granted(at, slab=1, gen=2000)
    new["slab_gen"] = GEN + 1001
    assert client.write(new, keys, on_gpu(cupy, blocks)).all() and has(host, new, keys, blocks)
    assert client._memory[1].ctypes.data != old
    assert not client.register(gpu.uuid, slots) and not locked, "the old mapping is not registered"
    ok, found = read_to_gpu(cupy, client, new, keys)
    assert ok.all() and (found == blocks).all() and locked.keys() == {client.region(1)[0]}
    client.close()
    assert not locked


def test_a_closed_arena_stays_closed(gpu: Device, host: Arena, locked: dict[int, int]) -> None:
    client = Arena.attach(host.path, host.nonce)
    at, keys, blocks = some(3)
    assert client.write(at, keys, blocks).all()
    slots, mapped = client.addresses(at), client._memory
    assert host.give_back(0, GEN + 1000)
    host.discard(0)
    client.close()
    assert not client.register(gpu.uuid, slots) and not len(client._memory[1]) and not locked
    del mapped


def test_the_owner_unregisters_slabs_that_it_discards(
    cupy: Any, gpu: Device, host: Arena, locked: dict[int, int]
) -> None:
    at, keys, blocks = some(2)
    assert host.write(at, keys, on_gpu(cupy, blocks)).all() and locked.keys() == {host.region(1)[0]}
    assert host.give_back(1, GEN + 1000) and locked
    host.discard(1)
    assert not locked
    assert host.write(granted(at), keys, on_gpu(cupy, blocks)).all() and locked.keys() == {host.region(0)[0]}


@pytest.mark.parametrize("kind", ["host", "ours"])
def test_a_close_during_a_copy(
    request: pytest.FixtureRequest,
    cupy: Any,
    gpu: Device,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    locked: dict[int, int],
) -> None:
    """Memory is unregistered, or freed, when the copy is done."""
    free = gpu._memory()[0]
    arena: Arena = request.getfixturevalue(kind)
    at, keys, blocks = some(2)
    assert arena.write(at, keys, blocks).all()
    meanwhile(monkeypatch, arena.close)
    out = cupy.zeros(blocks.shape, np.uint8)
    ok = arena.read(at, keys, rows_of([out]))
    assert ok.all() and (out.get() == blocks).all()
    assert not locked
    del out
    if kind == "ours":
        assert gpu._memory()[0] >= free - SLAB
    assert not arena.read(at, keys, np.zeros_like(blocks)).any()


def test_a_forked_child_unregisters_nothing(on_host: Any, locked: dict[int, int]) -> None:
    host = memory_arena()
    at, keys, blocks = some(2)
    assert host.write(at, keys, on_gpu(on_host, blocks)).all()
    asked, answer = fork.Pipe(duplex=False)

    def child() -> None:
        host.close()
        answer.send(len(locked))

    process = fork.Process(target=child)
    process.start()
    process.join()
    assert asked.recv() == 1
    assert len(locked) == 1 and host.read(at, keys, on_gpu(on_host, blocks)).all()
    host.close(unlink=True)
    assert not locked


# ---------------------------------------------------------------------- a GPU's arena and its file


def test_full_shm(cupy: Any, ours: GpuArena) -> None:
    """But for headers."""
    before = os.stat(ours.path).st_blocks
    at, keys, blocks = some(4)
    assert ours.write(at, keys, on_gpu(cupy, blocks)).all() and has(ours, at, keys, blocks)
    assert os.stat(ours.path).st_blocks == before < SLAB // 512


def test_the_memory_goes_with_the_arena(on_host: Any) -> None:
    gpu = devices.device(devices.visible()[0])
    gpu.bounce_buffer()
    free = gpu._memory()[0]
    for used in (False, True):
        arena = gpu_arena(gpu)
        assert not used or arena.write(*some(2)).all()
        assert gpu._memory()[0] <= free - 3 * SLAB
        arena.close(unlink=True)
        taken = free - gpu._memory()[0]
        assert taken < SLAB, "what copies need stays"


def test_full_gpu(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = devices.device(devices.visible()[0])
    before = gpu._memory()[0]
    with pytest.raises(CapacityError, match="lower gpu_memory"):
        GpuArena.open_new(POOL, PRINT, gpu, SLAB, 100)
    calls = iter([None, OSError(errno.ENOSPC, "No space left on device")])

    def allocate(*_: int) -> None:
        if error := next(calls):
            raise error

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(CapacityError, match="bytes of headers: No space left on device; lower gpu_memory"):
        GpuArena.open_new(POOL, PRINT, gpu, SLAB, 3)
    assert gpu._memory()[0] == before and not [name for name in os.listdir("/dev/shm") if POOL in name]


DEAD = """
import os, sys
from raykv.arena.gpu.device import device
from raykv.arena.gpu_arena import GpuArena
print(GpuArena.open_new(sys.argv[1], b"fingerprint 16 B", device(sys.argv[2]), 4 << 20, 2).path, flush=True)
os._exit(0)
"""


def test_files_of_living_and_dead_stores(gpu: Device) -> None:
    """A living one's stay, a dead one's are taken over, or removed."""
    path = elsewhere(DEAD, POOL, gpu.uuid).stdout.strip()
    assert os.path.exists(path)
    first, second = gpu_arena(gpu), gpu_arena(gpu)
    assert first.path == path != second.path
    assert not remove(first.path) and remove_left_behind(POOL) == 0
    for arena in (first, second):
        arena.close(unlink=True)
    assert not os.path.exists(path) and not os.path.exists(second.path)
    assert elsewhere(DEAD, POOL, gpu.uuid).stdout.strip() == path
    assert remove_left_behind(POOL) == 1 and not os.path.exists(path)


def test_a_file_that_another_store_replaced_is_not_removed(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another store was faster, and has one of that name."""
    gpu = devices.device(devices.visible()[0])
    path = elsewhere(DEAD, POOL, gpu.uuid).stdout.strip()
    made: list[GpuArena] = []

    def first(*args: Any) -> bool:
        monkeypatch.setattr(files, "lock", file_locks.lock)
        os.unlink(path)
        made.append(gpu_arena(gpu))
        return file_locks.lock(*args)

    monkeypatch.setattr(files, "lock", first)
    assert not remove(path) and made[0].path == path and os.path.exists(path)
    made[0].close(unlink=True)


# ---------------------------------------------------------------------- other processes


CLIENT = """
import sys
import time
import numpy as np
from helpers.arena.worker import key_of
from raykv.arena.gpu_arena import GpuArena
from helpers.arena.gpu_arenas import granted, has, some
path, nonce, gpu, handle = sys.argv[1:]
arena = GpuArena.map(path, bytes.fromhex(nonce), gpu, bytes.fromhex(handle))
at, keys, blocks = some(3)
assert has(arena, at, keys, blocks)
assert arena.write(granted(at), keys, ~blocks).all()
assert has(arena, granted(at), keys, ~blocks)
arena.close()
assert not arena.read(at, keys, blocks).any() and not arena.write(granted(at, gen=200), keys, blocks).any()
"""


def test_another_process_stores_and_reads(ours: GpuArena, gpu: Device) -> None:
    at, keys, blocks = some(3)
    assert ours.write(at, keys, blocks).all()
    done = elsewhere(CLIENT, ours.path, ours.nonce.hex(), gpu.uuid, ours.handle.hex())
    assert done.returncode == 0, done.stderr
    assert has(ours, at, keys, blocks) and has(ours, granted(at), keys, ~blocks)


STORE = """
import sys
import time
from raykv.arena import gpu_arena as gpu_arenas
from raykv.arena.gpu.device import device
from helpers.arena.gpu_arenas import gpu_arena, some
arena = gpu_arena(device(sys.argv[1]), sys.argv[2])
assert arena.write(*some(3)).all()
print(arena.path, arena.nonce.hex(), arena.handle.hex(), flush=True)
if patience := sys.stdin.readline():  # to stop with so many seconds
    gpu_arenas.LET_GO_S = float(patience)
    arena.close(unlink=True)
    print("freed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(gpu: Device) -> Iterator[tuple["subprocess.Popen[str]", GpuArena]]:
    """A node store's process, and the arena of its GPU, mapped here."""
    command = [sys.executable, "-c", STORE, gpu.uuid, POOL]
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin and process.stdout
    path, nonce, handle = process.stdout.readline().split()
    arena = GpuArena.map(path, bytes.fromhex(nonce), gpu.uuid, bytes.fromhex(handle))
    yield process, arena
    arena.close()
    process.kill()
    process.communicate()


@pytest.mark.parametrize("opened", [False, True])
def test_a_store_that_is_killed(cupy: Any, store: tuple["subprocess.Popen[str]", GpuArena], opened: bool) -> None:
    """Its memory is gone: nobody may copy there, whether the region was opened before or not."""
    process, arena = store
    at, keys, blocks = some(3)
    assert not opened or has(arena, at, keys, blocks)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for rows in (rows_of([blocks]), on_gpu(cupy, blocks)):
        with pytest.raises(DeviceError, match="its node store is gone"):
            arena.read(at, keys, rows)
        with pytest.raises(DeviceError, match="its node store is gone"):
            arena.write(granted(at), keys, rows)


def test_a_store_that_is_killed_while_its_blocks_are_read(
    cupy: Any, store: tuple["subprocess.Popen[str]", GpuArena], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, arena = store
    at, keys, _ = some(3)

    def kill() -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    meanwhile(monkeypatch, kill)
    with pytest.raises(DeviceError, match="its node store is gone"):
        read_to_gpu(cupy, arena, at, keys)


def test_a_store_that_stops_frees_its_memory_when_others_have_let_go(
    store: tuple["subprocess.Popen[str]", GpuArena],
) -> None:
    process, arena = store
    assert process.stdin and process.stdout
    at, keys, blocks = some(3)
    assert has(arena, at, keys, blocks) and not arena.lost
    process.stdin.write("60\n")
    process.stdin.flush()
    while not arena.lost:
        time.sleep(0.01)
    with pytest.raises(DeviceError, match="its node store is gone"):
        arena.read(at, keys, rows_of([blocks]))
    assert not select.select([process.stdout], [], [], 0.5)[0], "it waits for this process"
    arena.close()
    assert process.stdout.readline() == "freed\n"


def test_a_forked_child_keeps_no_memory_shared(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ours, other = (SlotLocks(os.open(tmp_path / "file", os.O_RDWR), 0, 8) for _ in range(2))
    end = ours.share()
    assert other.shared_elsewhere()
    started, ends = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.write(started[1], b"x")
        os.close(ends[1])
        os.read(ends[0], 1)
        os._exit(0)
    try:
        os.read(started[0], 1)
        end()
        assert not other.shared_elsewhere()
    finally:
        os.close(ends[1])
        os.waitpid(child, 0)
    for locks in (ours, other):
        locks.close()


def test_a_store_that_stops_waits_for_nobody_for_ever(store: tuple["subprocess.Popen[str]", GpuArena]) -> None:
    process, arena = store
    assert process.stdin and process.stdout
    assert has(arena, *some(3))
    process.stdin.write("0.1\n")
    process.stdin.flush()
    assert process.stdout.readline() == "freed\n" and arena.lost


def test_nothing_is_mapped_before_it_is_copied(on_host: Any) -> None:
    ours = gpu_arena(devices.device(devices.visible()[0]))
    arena = GpuArena.map(ours.path, ours.nonce, ours.gpu, bytes(64))
    assert arena._region is None and block_of(key_of(1)).size
    arena.close()
    ours.close(unlink=True)
