"""A GPU copies every byte that a table names, on a stand-in for CuPy; with `-m gpu`, on a GPU."""

import ctypes
import mmap
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.arena.gpus import Bytes, get, noise, put, table_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raykv.arena.gpu import copy_kernel, cuda
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import Device
from raykv.errors import DeviceError

MIB = 1 << 20
one_by_one = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def host_memory(gpu: Device) -> Iterator[Bytes]:
    memory = np.frombuffer(mmap.mmap(-1, MIB), np.uint8)
    gpu.register(memory.ctypes.data, MIB)
    yield memory
    gpu.unregister(memory.ctypes.data)


LENGTHS = st.one_of(
    st.integers(0, 70), st.integers(0, 3 * copy_kernel.UNIT), st.sampled_from([copy_kernel.UNIT, 16, 4096])
)


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Pieces as (offset to, offset from, length) within a MiB. Their destinations do not overlap."""
    pieces, to, of = [], 0, 0
    for length in draw(st.lists(LENGTHS, max_size=8)):
        to, of = to + draw(st.integers(0, 17)), of + draw(st.integers(0, 17))
        pieces.append((to, of, length))
        to, of = to + length, of + length
    return draw(st.permutations(pieces))


def moved(pieces: list[tuple[int, int, int]], onto: Bytes, source: Bytes) -> Bytes:
    """The oracle: `onto` after numpy has copied the pieces."""
    expected = onto.copy()
    for to, of, length in pieces:
        expected[to : to + length] = source[of : of + length]
    return expected


@one_by_one
@given(layouts())
def test_every_byte_lands_where_the_table_says(
    gpu: Device, host_memory: Bytes, pieces: list[tuple[int, int, int]]
) -> None:
    """Bytes go into a GPU's memory and out of it again. None lands elsewhere."""
    region = gpu.allocate(MIB)
    try:
        source = noise(MIB, 1)
        host_memory[:] = source
        put(gpu, region.address, np.zeros(MIB, np.uint8))
        host = host_memory.ctypes.data
        gpu.copy(table_of(*((region.address + to, host + of, length) for to, of, length in pieces)))
        there = moved(pieces, np.zeros(MIB, np.uint8), source)
        assert (get(gpu, region.address, MIB) == there).all()
        host_memory[:] = 7
        gpu.copy(table_of(*((host + to, region.address + of, length) for to, of, length in pieces)))
        assert (host_memory == moved(pieces, np.full(MIB, 7, np.uint8), there)).all()
    finally:
        region.close()


def test_a_table_of_blocks_and_parts(gpu: Device, host_memory: Bytes) -> None:
    region = gpu.allocate(MIB)
    host_memory[:] = noise(MIB)
    to = region.address + np.arange(6) * 1000
    of = host_memory.ctypes.data + np.arange(6)[::-1] * 1000
    gpu.copy(np.stack([to, of, np.full(6, 1000)], 1).reshape(2, 3, 3))
    assert (get(gpu, region.address, 6000).reshape(6, 1000) == host_memory[:6000].reshape(6, 1000)[::-1]).all()
    region.close()


def test_a_table_of_many_pieces(gpu: Device, host_memory: Bytes) -> None:
    """The table needs more memory than is allocated for tables at first."""
    region, n = gpu.allocate(MIB), 50_000
    host_memory[:] = noise(MIB)
    order = np.random.default_rng(1).permutation(n)
    table = np.stack([region.address + 16 * np.arange(n), host_memory.ctypes.data + 16 * order, np.full(n, 16)], 1)
    gpu.copy(table)
    assert (get(gpu, region.address, 16 * n).reshape(n, 16) == host_memory[: 16 * n].reshape(n, 16)[order]).all()
    region.close()


def test_a_big_table_that_cannot_be_allocated(on_host: Any) -> None:
    """The copy fails. Copies with smaller tables do not."""
    gpu = devices.device(devices.visible()[0])
    region, bounce = gpu.allocate(MIB), gpu.bounce_buffer()
    table = np.tile(table_of((region.address, bounce.ctypes.data, 1)), (3000, 1))
    gpu.copy(table[:1])
    left = on_host.cuda.runtime.memGetInfo()[0]
    rest = on_host.cuda.Memory(left)
    for pieces in (3000, 2100):
        with pytest.raises(DeviceError, match="cudaErrorMemoryAllocation"):
            gpu.copy(table[:pieces])
    gpu.copy(table[:2000])
    del rest
    gpu.copy(table)


def test_threads_copy_at_once(gpu: Device, host_memory: Bytes) -> None:
    region = gpu.allocate(MIB)
    host_memory[:] = noise(MIB)
    share = MIB // 4

    def copy(i: int) -> None:
        for at in range(i * share, (i + 1) * share, share // 8):
            gpu.copy(table_of((region.address + at, host_memory.ctypes.data + at, share // 8)))

    threads = [threading.Thread(target=copy, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (get(gpu, region.address, MIB) == host_memory).all()
    region.close()


@pytest.mark.parametrize(
    "table, message",
    [
        (np.zeros((2, 3), np.int32), "int32"),
        (np.zeros((2, 4), np.int64), r"\(2, 4\)"),
        (np.zeros(3, np.int64), r"\(3,\)"),
        (np.array([[0, 0, 5], [16, 32, -1]]), r"\[16, 32, -1\]"),
    ],
)
def test_tables_of_wrong_shape_or_dtype_are_refused(gpu: Device, table: NDArray[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpu.copy(table)


def test_an_empty_table_copies_nothing(gpu: Device) -> None:
    gpu.copy(np.zeros((0, 3), np.int64))
    gpu.copy(np.zeros((2, 0, 3), np.int64))
    gpu.copy(table_of((1, 2, 0)))  # the addresses of an empty piece are not used


@given(st.lists(st.integers(0, 5 * copy_kernel.UNIT), min_size=1, max_size=30))
def test_units_cover_each_piece_once(lengths: list[int]) -> None:
    """Each unit belongs to one piece, in order, and a piece's units cover its bytes."""
    table = np.zeros((len(lengths), 3), np.int64)
    table[:, 2] = lengths
    pieces = copy_kernel.with_units(table)
    assert (pieces[:, :3] == table).all() and pieces.dtype == np.int64 and pieces.flags.c_contiguous
    units = np.diff(pieces[:, 3], prepend=0)
    assert ((units - 1) * copy_kernel.UNIT < table[:, 2]).all() and (table[:, 2] <= units * copy_kernel.UNIT).all()


SHIM = r"""
#define __global__
#define __device__
#define __launch_bounds__(n)
struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim, blockDim;
static long long written;
struct Byte { unsigned char value; Byte& operator=(const Byte& of) { value = of.value; ++written; return *this; } };
struct alignas(16) uint4 { unsigned x, y, z, w; };
template <class T> static T __ldcs(const T* at) { return *at; }
template <class T> static void __stcs(T* at, T value) { *at = value; written += sizeof(T); }
#define char Byte
%s
extern "C" long long launch(unsigned blocks, unsigned threads, const long long* pieces, long long count)
{
    gridDim.x = blocks, blockDim.x = threads, written = 0;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            raykv_copy(pieces, count);
    return written;
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel's own source, compiled as C++. Its threads run one by one, which is the same: they share nothing."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(SHIM % copy_kernel.SOURCE)
    names = [f"-DUNIT={copy_kernel.UNIT}LL", f"-DTHREADS={copy_kernel.THREADS}"]
    safe = ["-O1", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-shared", "-fPIC"]
    subprocess.run([compiler, *names, *safe, "-o", str(folder / "kernel.so"), str(folder / "kernel.cpp")], check=True)
    library = ctypes.CDLL(str(folder / "kernel.so"))
    library.launch.restype = ctypes.c_longlong
    return library


@one_by_one
@given(layouts(), st.integers(1, max(copy_kernel.BLOCKS.values())), st.sampled_from([1, 32, copy_kernel.THREADS]))
def test_the_kernel_writes_every_byte_once(
    compiled: Any, layout: list[tuple[int, int, int]], blocks: int, threads: int
) -> None:
    source, to = noise(MIB), np.zeros(MIB, np.uint8)
    pieces = copy_kernel.with_units(table_of(*((to.ctypes.data + a, source.ctypes.data + b, c) for a, b, c in layout)))
    if len(pieces):
        table = ctypes.c_void_p(pieces.ctypes.data)
        written = compiled.launch(blocks, threads, table, ctypes.c_longlong(len(pieces)))
        assert written == pieces[:, 2].sum()
    assert (to == moved(layout, np.zeros(MIB, np.uint8), source)).all()


def test_a_copy_follows_a_stream(cupy: Any, gpu: Device, host_memory: Bytes) -> None:
    """The copy sees all that the stream before it writes, though nobody waited for that stream."""
    region, producer = gpu.allocate(MIB), cupy.cuda.Stream(non_blocking=True)
    put(gpu, region.address, np.zeros(MIB, np.uint8))
    host_memory[: MIB // 2] = noise(MIB // 2)
    runtime, half = cupy.cuda.runtime, MIB // 2
    runtime.memcpyAsync(region.address, host_memory.ctypes.data, half, runtime.memcpyHostToDevice, producer.ptr)
    gpu.copy(
        table_of((host_memory.ctypes.data + half, region.address, half)), cuda.events_after(gpu.ordinal, {producer.ptr})
    )
    assert (host_memory[half:] == host_memory[:half]).all() and host_memory[:half].any()
    region.close()


def test_without_a_stream_a_copy_may_be_early(on_host: Any) -> None:
    """So `test_a_copy_follows_a_stream` does test something. On a GPU the order would be a race."""
    gpu = devices.device(devices.visible()[0])
    array, bounce = on_host.asarray(np.zeros((1, 64), np.uint8)), gpu.bounce_buffer()
    bounce[:64] = 1
    producer, runtime = on_host.cuda.Stream(non_blocking=True), on_host.cuda.runtime
    runtime.memcpyAsync(array.data.ptr, bounce.ctypes.data, 64, runtime.memcpyHostToDevice, producer.ptr)
    assert not get(gpu, array.data.ptr, 64).any()
    producer.synchronize()
    assert get(gpu, array.data.ptr, 64).all()
