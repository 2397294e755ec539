"""Copies on a GPU do not disturb the engine in whose process they run: its contexts, captures, cores and time."""

import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers.arena.gpu_arenas import granted, has, memory_arena, some
from helpers.arena.gpus import get, noise, put, table_of
from helpers.arena.worker import GEN
from xxhash import xxh3_64_intdigest

from raykv.arena import block_copy
from raykv.arena.arena import Arena
from raykv.arena.buffers import rows_of
from raykv.arena.gpu import cuda
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.copy_kernel import LONG, UNIT, Way, blocks_of
from raykv.arena.gpu.device import Device
from raykv.errors import DeviceError

MIB = 1 << 20


def in_a_thread(act: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(act).result()


def all_that_calls_cuda(gpu: Device, memory: Any) -> None:
    """Make every call that uses CUDA. memory: host memory of a page or more."""
    gpu.register(memory.ctypes.data, 4096)
    region = gpu.allocate(4096)
    put(gpu, region.address, noise(4096))
    gpu.copy(table_of((memory.ctypes.data, region.address, 4096)), (), "to_host")
    assert (memory[:4096] == noise(4096)).all() and gpu._memory()
    region.close()
    gpu.unregister(memory.ctypes.data)


@pytest.fixture
def memory() -> Any:
    return np.frombuffer(mmap.mmap(-1, MIB), np.uint8)


# ---------------------------------------------------------------------- contexts and captures


def test_no_other_gpu_gets_a_context(on_host: Any, memory: Any) -> None:
    """For an engine on the second GPU no thread may make a context on the first, which would take half a GiB."""
    driver, gpu = on_host.cuda.driver, devices.device(devices.visible()[1])

    def act() -> None:
        all_that_calls_cuda(gpu, memory)
        assert not driver.ctxGetCurrent(), "the thread is as it was"

    in_a_thread(act)
    events = [cuda.events_after(gpu.ordinal, {1})]
    in_a_thread(events.clear)  # the thread with the last reference destroys the events
    assert driver.contexts == {1}
    rows = rows_of([on_host.zeros((2, 8), np.uint8)])  # this thread, as the engine's own, is on the first GPU
    assert driver.contexts == {0, 1} and rows.device == devices.visible()[0]
    all_that_calls_cuda(gpu, memory)
    assert on_host.cuda.runtime.getDevice() == 0


def test_a_capture_goes_on(on_host: Any, memory: Any) -> None:
    """While the engine captures a CUDA graph, other threads may not allocate, free or page-lock."""
    driver, gpu = on_host.cuda.driver, devices.device(devices.visible()[0])
    with driver.capture():
        in_a_thread(lambda: all_that_calls_cuda(gpu, memory))
        with pytest.raises(on_host.cuda.runtime.CUDARuntimeError, match="Capture"):
            on_host.cuda.runtime.malloc(1)  # this thread's capture mode is unchanged


@pytest.mark.parametrize("error", [RuntimeError("Failed to find CUDA headers"), ImportError("libnvrtc.so.13")])
def test_a_kernel_that_cannot_be_compiled(on_host: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """CuPy raises errors of any type. raykv must turn them into DeviceError, or they would look like bugs."""

    def compile_it(_: object) -> None:
        raise error

    monkeypatch.setattr(on_host.RawKernel, "compile", compile_it)
    with pytest.raises(DeviceError, match=f"GPU-.*{error}.*nvidia-cuda-runtime==13"):
        devices.device(devices.visible()[0])


# ---------------------------------------------------------------------- page-locking


@pytest.fixture
def host() -> Iterator[Arena]:
    arena = memory_arena()
    yield arena
    arena.close(unlink=True)


def test_a_slab_that_is_being_locked_is_not_waited_for(
    on_host: Any, host: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's first hits come while the arena is being page-locked. They go through the bounce buffer."""
    gpu, lock = devices.visible()[0], on_host.cuda.runtime.hostRegister
    begun, go_on = threading.Event(), threading.Event()

    def slowly(address: int, size: int, flags: int) -> None:
        if address == host.region(1)[0]:
            begun.set()
            assert go_on.wait(60)
        lock(address, size, flags)

    monkeypatch.setattr(on_host.cuda.runtime, "hostRegister", slowly)
    at, keys, blocks = some(3)
    with ThreadPoolExecutor(1) as thread:
        locking = thread.submit(host.populate, gpu)
        assert begun.wait(60)
        rows = rows_of([on_host.asarray(blocks)])
        assert not host.register(gpu, host.addresses(at)) and host.write(at, keys, rows).all()
        assert has(host, at, keys, blocks)
        there = granted(at)
        assert host.register(gpu, host.addresses(there)) and host.write(there, keys, rows).all()
        assert host.give_back(1, GEN + 5000)
        host.discard(1)
        assert host.refilled() == [1], "the memory stays while CUDA is at it"
        go_on.set()
        locking.result()
    host.discard(1)
    assert not host.refilled()


def test_a_refusal_is_remembered(
    on_host: Any, host: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(*arguments: int) -> None:
        asked.append(arguments)
        raise on_host.cuda.runtime.CUDARuntimeError(1)

    monkeypatch.setattr(on_host.cuda.runtime, "hostRegister", refuse)
    at, _, _ = some(3)
    for _ in range(2):
        assert not host.register(devices.visible()[0], host.addresses(at))
    assert len(asked) == 1 and [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_refusal_for_a_capture_is_tried_again(
    on_host: Any, host: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Should a driver refuse to page-lock beside a capture: the slab is page-locked after the capture."""
    gpu, lock, at = devices.visible()[0], on_host.cuda.runtime.hostRegister, some(3)[0]

    def refuse(*arguments: int) -> None:
        raise on_host.cuda.runtime.CUDARuntimeError(900)

    monkeypatch.setattr(on_host.cuda.runtime, "hostRegister", refuse)
    assert not host.register(gpu, host.addresses(at))
    monkeypatch.setattr(on_host.cuda.runtime, "hostRegister", lock)
    assert host.register(gpu, host.addresses(at)) and not caplog.records


# ---------------------------------------------------------------------- ways of a copy


WAYS: list[Way] = ["within", "to_host", "to_gpu"]


@pytest.mark.parametrize("length", [1000, 16 << 10, LONG])
@pytest.mark.parametrize("way", WAYS)
def test_every_way(gpu: Device, memory: Any, way: Way, length: int) -> None:
    """Two pieces change places, and no byte beside them changes."""
    gpu.register(memory.ctypes.data, len(memory))
    region, data = gpu.allocate(4 * MIB), noise(2 * length)
    place = {"within": region.address + 2 * MIB, "to_host": memory.ctypes.data, "to_gpu": region.address}
    of = {"within": region.address, "to_host": region.address, "to_gpu": memory.ctypes.data}[way]
    for start in range(0, 4 * MIB, MIB):
        put(gpu, region.address + start, np.zeros(MIB, np.uint8))
    memory[:] = 0
    if way == "to_gpu":
        memory[: 2 * length] = data
    else:
        put(gpu, of, data)
    gpu.copy(table_of((place[way] + length, of, length), (place[way], of + length, length)), (), way)
    arrived = memory.copy() if way == "to_host" else get(gpu, place[way], 2 * length + 1)
    assert (arrived[: 2 * length] == np.roll(data, length)).all() and not arrived[2 * length :].any()
    region.close()
    gpu.unregister(memory.ctypes.data)


@pytest.mark.parametrize(
    ("way", "length", "blocks"),
    [
        ("within", 2 * MIB, 64),
        ("within", 4096, 64),
        ("to_host", 2 * UNIT, 2),
        ("to_host", UNIT // 2, 4),
        ("to_host", 64, 8),
        ("to_gpu", 2 * UNIT, 6),
        ("to_gpu", UNIT // 2, 12),
        ("to_gpu", 64, 32),
    ],
)
def test_no_more_thread_blocks_than_fill_the_link(way: Way, length: int, blocks: int) -> None:
    assert blocks_of(np.full((100, 3), length, np.int64), way) == blocks


@pytest.mark.parametrize(("way", "launches"), [("within", 1), ("to_host", 0), ("to_gpu", 0)])
def test_long_pieces_take_no_multiprocessor(
    on_host: Any, memory: Any, monkeypatch: pytest.MonkeyPatch, way: Way, launches: int
) -> None:
    """This is for copies across PCIe. Shorter pieces take multiprocessors."""
    launch, launched = on_host.RawKernel.__call__, list[object]()

    def counted(kernel: Any, *how: Any) -> None:
        launched.append(how)
        launch(kernel, *how)

    monkeypatch.setattr(on_host.RawKernel, "__call__", counted)
    gpu = devices.device(devices.visible()[0])
    gpu.register(memory.ctypes.data, len(memory))
    region = gpu.allocate(2 * LONG)
    far = region.address + LONG if way == "within" else memory.ctypes.data
    gpu.copy(table_of((far, region.address, LONG)), (), way)
    assert len(launched) == launches
    gpu.copy(table_of((far, region.address, LONG - 1)), (), way)
    assert len(launched) == launches + 1


# ---------------------------------------------------------------------- hashes


def test_a_share_is_hashed_while_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "SHARE", 2000)
    blocks, source = np.zeros((7, 1000), np.uint8), noise(7000).reshape(7, 1000)
    addresses = blocks.ctypes.data + 1000 * np.arange(7)

    def fetch(which: slice) -> None:
        assert not blocks[which].any()
        blocks[which] = source[which]

    sums = block_copy.sums_behind(fetch, addresses, 1000)
    assert sums == [xxh3_64_intdigest(block.tobytes()) for block in source]
    assert block_copy.sums_behind(fetch, addresses[:0], 1000) == []


def test_nobody_hashes_what_a_failed_copy_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the caller drops its locks, and others may write there."""
    monkeypatch.setattr(block_copy, "SHARE", 1)
    blocks = np.zeros((3, 1000), np.uint8)
    submitted: list[Future[Any]] = []
    threads = block_copy._threads()
    submit = threads.submit
    monkeypatch.setattr(threads, "submit", lambda *task, **options: _kept(submitted, submit(*task, **options)))

    def fetch(which: slice) -> None:
        if which.start == 2:
            raise DeviceError("lost")

    with pytest.raises(DeviceError, match="lost"):
        block_copy.sums_behind(fetch, blocks.ctypes.data + 1000 * np.arange(3), 1000)
    assert len(submitted) == 2 and all(future.done() for future in submitted)


def _kept(futures: list[Future[Any]], future: Future[Any]) -> Future[Any]:
    futures.append(future)
    return future
