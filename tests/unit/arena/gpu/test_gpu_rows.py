"""An arena copies rows on a GPU in and out, on a stand-in for CuPy; with `-m gpu`, on a GPU."""

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.arena.gpu_arenas import SIZES, gpu_arena, granted, has, memory_arena, some, sums_of
from helpers.arena.gpu_rows import on_gpu, read_to_gpu
from helpers.arena.gpus import forget, meanwhile, put, refuse
from helpers.arena.worker import key_of

from raykv.arena.arena import Arena
from raykv.arena.buffers import rows_of
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import Device
from raykv.arena.gpu_arena import UNKNOWN, GpuArena

pytestmark = pytest.mark.usefixtures("nothing_left", "locked")


@pytest.fixture(params=["registered", "bounced", "gpu"])
def arena(request: pytest.FixtureRequest, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """The arena, in memory or on a GPU, that rows on a GPU are copied to and from."""
    if request.param == "bounced":
        monkeypatch.setattr(Device, "register", refuse)
    arena = gpu_arena(gpu) if request.param == "gpu" else memory_arena()
    yield arena
    arena.close(unlink=True)


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
    """Blocks that come from memory get checksums on the GPU, too."""
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
    """No reader sees a block whose copy was submitted but is not done."""
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
