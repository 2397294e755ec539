"""A GPU's memory and copies, on a stand-in for CuPy; with `-m gpu`, on a GPU."""

import ctypes
import mmap
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.arena.gpus import Bytes, elsewhere, forget, get, noise, put, table_of
from helpers.project.torch_or_skip import torch_or_skip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raykv.arena import buffers
from raykv.arena.gpu import copy_kernel, cuda
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import BOUNCE_BYTES, Device
from raykv.errors import CapacityError, DeviceError
from raykv.keys import CacheId, check

MIB = 1 << 20
one_by_one = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def host_memory(gpu: Device) -> Iterator[Bytes]:
    """Host memory that the GPU reaches."""
    memory = np.frombuffer(mmap.mmap(-1, MIB), np.uint8)
    gpu.register(memory.ctypes.data, MIB)
    yield memory
    gpu.unregister(memory.ctypes.data)


LENGTHS = st.one_of(
    st.integers(0, 70), st.integers(0, 3 * copy_kernel.UNIT), st.sampled_from([copy_kernel.UNIT, 16, 4096])
)


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Pieces as offsets to, offsets from and lengths; none of the destinations overlap. All fit into a MiB."""
    pieces, to, of = [], 0, 0
    for length in draw(st.lists(LENGTHS, max_size=8)):
        to, of = to + draw(st.integers(0, 17)), of + draw(st.integers(0, 17))
        pieces.append((to, of, length))
        to, of = to + length, of + length
    return draw(st.permutations(pieces))


def moved(pieces: list[tuple[int, int, int]], onto: Bytes, source: Bytes) -> Bytes:
    """The oracle."""
    expected = onto.copy()
    for to, of, length in pieces:
        expected[to : to + length] = source[of : of + length]
    return expected


@one_by_one
@given(layouts())
def test_every_byte_lands_where_the_table_says(
    gpu: Device, host_memory: Bytes, pieces: list[tuple[int, int, int]]
) -> None:
    """Into a GPU's memory and out of it again, every byte lands where the table says, and none beside."""
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
    """More than the memory that tables go by has room for at first."""
    region, n = gpu.allocate(MIB), 50_000
    host_memory[:] = noise(MIB)
    order = np.random.default_rng(1).permutation(n)
    table = np.stack([region.address + 16 * np.arange(n), host_memory.ctypes.data + 16 * order, np.full(n, 16)], 1)
    gpu.copy(table)
    assert (get(gpu, region.address, 16 * n).reshape(n, 16) == host_memory[: 16 * n].reshape(n, 16)[order]).all()
    region.close()


def test_a_big_table_that_cannot_be_allocated(on_host: Any) -> None:
    """The copy fails; others, whose tables fit what there is, do not."""
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
    gpu.copy(table_of((1, 2, 0)))  # addresses of nothing are not looked at


@given(st.lists(st.integers(0, 5 * copy_kernel.UNIT), min_size=1, max_size=30))
def test_units_cover_each_piece_once(lengths: list[int]) -> None:
    """Every unit is of one piece, in order, and those of a piece cover its bytes."""
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
    """The kernel's own source as C++, its threads one after another, which it cannot tell: they share nothing."""
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
    """It writes every byte once, and none beside."""
    source, to = noise(MIB), np.zeros(MIB, np.uint8)
    pieces = copy_kernel.with_units(table_of(*((to.ctypes.data + a, source.ctypes.data + b, c) for a, b, c in layout)))
    if len(pieces):
        table = ctypes.c_void_p(pieces.ctypes.data)
        written = compiled.launch(blocks, threads, table, ctypes.c_longlong(len(pieces)))
        assert written == pieces[:, 2].sum()
    assert (to == moved(layout, np.zeros(MIB, np.uint8), source)).all()


def test_a_copy_follows_a_stream(cupy: Any, gpu: Device, host_memory: Bytes) -> None:
    """A copy sees what the stream it comes after had to write, though nobody waited for that stream."""
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
    """So that `test_a_copy_follows_a_stream` means something; on a GPU that is a race."""
    gpu = devices.device(devices.visible()[0])
    array, bounce = on_host.asarray(np.zeros((1, 64), np.uint8)), gpu.bounce_buffer()
    bounce[:64] = 1
    producer, runtime = on_host.cuda.Stream(non_blocking=True), on_host.cuda.runtime
    runtime.memcpyAsync(array.data.ptr, bounce.ctypes.data, 64, runtime.memcpyHostToDevice, producer.ptr)
    assert not get(gpu, array.data.ptr, 64).any()
    producer.synchronize()
    assert get(gpu, array.data.ptr, 64).all()


READER = """
import sys
import numpy as np
from raykv.arena.gpu.device import device, visible
uuid, handle, size = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
gpu = device(uuid)
region, bounce = gpu.open(handle, size), gpu.bounce_buffer()
gpu.copy(np.array([[bounce.ctypes.data, region.address, size]]))
bounce[:size] ^= 255
gpu.copy(np.array([[region.address, bounce.ctypes.data, size]]))
region.close()
"""


def test_another_process_opens_a_region(gpu: Device) -> None:
    region, data = gpu.allocate(10_001), noise(10_001)
    put(gpu, region.address, data)
    done = elsewhere(READER, gpu.uuid, region.handle.hex(), "10001")
    assert done.returncode == 0, done.stderr
    assert (get(gpu, region.address, 10_001) == data ^ 255).all()
    region.close()


def test_open_of_a_region_that_was_freed(on_host: Any) -> None:
    gpu = devices.device(devices.visible()[0])
    region = gpu.allocate(100)
    region.close()
    region.close()
    done = elsewhere(READER, gpu.uuid, region.handle.hex(), "100")
    assert done.returncode and f"DeviceError: {gpu.uuid}: cudaErrorInvalidValue" in done.stderr
    with pytest.raises(DeviceError):
        gpu.copy(table_of((region.address, region.address, 100)))


def test_a_region_whose_process_died(on_host: Any) -> None:
    gpu = devices.device(devices.visible()[0])
    owner = (
        "import sys; from raykv.arena.gpu.device import device; print(device(sys.argv[1]).allocate(100).handle.hex())"
    )
    handle = bytes.fromhex(elsewhere(owner, gpu.uuid).stdout)
    assert len(handle) == devices.HANDLE_BYTES
    with pytest.raises(DeviceError):
        gpu.open(handle, 100)


def test_a_region_that_was_closed(on_host: Any) -> None:
    gpu = devices.device(devices.visible()[0])
    region = gpu.allocate(100)
    late = "gpu.copy(np.array([[region.address, bounce.ctypes.data, size]]))"
    done = elsewhere(READER + late, gpu.uuid, region.handle.hex(), "100")
    assert done.returncode and "cudaErrorIllegalAddress" in done.stderr
    assert get(gpu, region.address, 100).tolist() == [255] * 100  # it had been reached before that
    region.close()


def test_regions_of_bad_size_or_handle_are_refused(gpu: Device) -> None:
    with pytest.raises(ValueError, match="size=0"):
        gpu.allocate(0)
    with pytest.raises(ValueError, match="3 bytes"):
        gpu.open(b"abc", 1)


def test_a_capacity_beyond_free_gpu_memory_is_refused(on_host: Any) -> None:
    gpu = devices.device(devices.visible()[1])
    assert gpu.capacity(0.25) == 16 * MIB and gpu.capacity(5 * MIB) == 5 * MIB
    gpu.allocate(40 * MIB)
    assert gpu.capacity(24 * MIB) == 24 * MIB
    asked = rf"{gpu.uuid}: asked for 32 MiB \({32 * MIB} bytes\) of GPU memory, 24 of 64 MiB are free: lower gpu_memory"
    with pytest.raises(CapacityError, match=asked + ".*gpu_memory_utilization"):
        gpu.capacity(0.5)
    with pytest.raises(CapacityError, match=asked):
        gpu.allocate(32 * MIB)
    assert devices.device(devices.visible()[0]).capacity(1.0) == 64 * MIB  # the other GPU has as much as before
    assert gpu.capacity(16 * MIB, beside=8 * MIB) == 16 * MIB
    with pytest.raises(CapacityError, match=r"asked for 25 MiB .* of GPU memory, 9 MiB of it for NCCL, 24 of 64 MiB"):
        gpu.capacity(16 * MIB, beside=9 * MIB)


@pytest.mark.parametrize("given", [0, -1, 0.0, 1.5, True, "half"])
def test_sizes_that_are_none_are_refused(gpu: Device, given: Any) -> None:
    with pytest.raises(ValueError, match="gpu_memory="):
        gpu.capacity(given)


def test_an_overlap_is_not_page_locked(on_host: Any) -> None:
    gpu = devices.device(devices.visible()[0])
    memory = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    address = memory.ctypes.data
    gpu.register(address, 4096)
    with pytest.raises(DeviceError, match="cudaErrorHostMemoryAlreadyRegistered"):
        gpu.register(address, 8192)
    gpu.unregister(address)
    gpu.register(address, 8192)
    gpu.unregister(address)
    with pytest.raises(ValueError, match="length=0"):
        gpu.register(address, 0)
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
        gpu.copy(table_of((address, address + 100, 10)))


def test_bounce_buffer(gpu: Device) -> None:
    one, two = gpu.bounce_buffer(), gpu.bounce_buffer()
    assert one.shape == (BOUNCE_BYTES,) and one.dtype == np.uint8 and one.flags.writeable
    one[:], two[:] = 1, 2
    gpu.copy(table_of((one.ctypes.data, two.ctypes.data, BOUNCE_BYTES)))
    assert (one == 2).all()


def test_a_lost_gpu(on_host: Any) -> None:
    gpu = devices.device(devices.visible()[0])
    region, bounce = gpu.allocate(100), gpu.bounce_buffer()
    on_host.cuda.runtime.lose(700)
    lost = pytest.raises(DeviceError, match=f"{gpu.uuid}: cudaErrorIllegalAddress")
    with lost:
        gpu.copy(table_of((region.address, bounce.ctypes.data, 100)))
    with lost:
        gpu.allocate(1)
    with lost:
        gpu.capacity(1)
    with lost:
        region.close()
    assert devices.visible() == []


def test_uuids(cupy: Any) -> None:
    found = devices.visible()
    assert len(set(found)) == len(found) > 0
    assert all(len(uuid) == 40 and uuid.startswith("GPU-") for uuid in found)
    assert devices.device(found[0]) is devices.device(found[0])
    with pytest.raises(ValueError, match=found[0]):
        devices.device("GPU-0")


def test_a_uuid_with_a_zero(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy ends it there."""
    whole = bytes(range(16))[::-1]

    class Driver:
        def cuDeviceGetUuid_v2(self, buffer: Any, ordinal: int) -> int:
            assert ordinal == 1
            buffer[:] = whole
            return 0

    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": Driver()}.__getitem__)
    monkeypatch.setattr(on_host.cuda.runtime, "getDeviceProperties", lambda device: {"uuid": whole[:15]})
    assert cuda.uuid(1) == "GPU-0f0e0d0c-0b0a-0908-0706-050403020100"


def test_gpus_hidden_by_cuda_visible_devices_are_refused(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = devices.visible()
    cuda.uuid.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.visible() == [second]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.visible() == []
    with pytest.raises(ValueError, match="no GPU"):
        devices.device(second)


def test_without_cupy_no_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert devices.visible() == []
    with pytest.raises(ImportError, match="pip install 'cupy-cuda13x>=14'"):
        cuda.cupy()


def test_rows_on_a_gpu(cupy: Any, gpu: Device) -> None:
    layers = [cupy.asarray(noise(40, seed).reshape(4, 10)) for seed in range(2)]
    found = buffers.paged(layers, [3, 1], 2, 20, writable=True)
    assert found.device == gpu.uuid and found[:1].device == gpu.uuid and found[:1].after == found.after
    assert found.addresses.tolist() == [[layer.data.ptr + 10 * i for layer in layers] for i in (3, 1)]
    to = gpu.bounce_buffer()
    gpu.copy(np.stack([to.ctypes.data + 10 * np.arange(4), found.addresses.ravel(), np.full(4, 10)], 1), found.after)
    assert (to[:40].reshape(2, 20) == np.hstack([layer.get() for layer in layers])[[3, 1]]).all()
    assert buffers.dense("out", layers[0], 3, 10).device == gpu.uuid
    assert buffers.rows_of([layers[0], np.zeros((0, 10), np.uint8)]).device == gpu.uuid  # there is nothing to reach
    assert buffers.rows_of([np.zeros((2, 2), np.uint8)]).device is None


def test_rows_of_the_wrong_kind(cupy: Any) -> None:
    with pytest.raises(ValueError, match=r"blocks: float32 of shape \(2, 8\)"):
        buffers.dense("blocks", cupy.zeros((2, 8), np.float32), 2, 8)
    with pytest.raises(ValueError, match=r"paged is on GPU-.* and host memory"):
        buffers.paged([cupy.zeros((2, 8), np.uint8), np.zeros((2, 8), np.uint8)], [0], 1, 16)
    with pytest.raises(ValueError, match="keys: a ndarray"):
        check(cupy.zeros((2, 16), np.uint8), CacheId("m", 16, 8, b""))


def test_rows_on_two_gpus(on_host: Any) -> None:
    here = on_host.zeros((2, 8), np.uint8)
    with on_host.cuda.Device(1):
        there = on_host.zeros((2, 8), np.uint8)
    assert buffers.rows_of([there]).device == devices.visible()[1]
    with pytest.raises(ValueError, match=" and ".join(devices.visible())):
        buffers.rows_of([here, there])


class Foreign:
    """Another library's array over the same memory, which tells of a stream or does not."""

    def __init__(self, array: Any, **stream: int | None) -> None:
        self._array = array
        interface = {name: value for name, value in array.__cuda_array_interface__.items() if name != "stream"}
        self.__cuda_array_interface__ = {**interface, **stream}


def streams_of(rows: buffers.Rows, on_host: Any) -> set[int]:
    """That copies of them come after."""
    return {on_host.cuda.runtime._events[event.ptr][0] for event in rows.after}


def test_streams_of_rows(on_host: Any) -> None:
    array = on_host.zeros((2, 8), np.uint8)
    assert streams_of(buffers.rows_of([array]), on_host) == {1}
    with on_host.cuda.Stream(non_blocking=True) as stream:
        assert streams_of(buffers.rows_of([array, array]), on_host) == {stream.ptr}
    other, silent = Foreign(array, stream=stream.ptr), Foreign(array, stream=None)
    assert streams_of(buffers.rows_of([Foreign(array)]), on_host) == {1}  # may have used the default stream
    assert buffers.rows_of([silent]).after == ()
    assert streams_of(buffers.rows_of([silent, other]), on_host) == {stream.ptr}


@pytest.mark.parametrize("handles", [[2], ["own", 1]])
def test_several_streams_are_waited_for(on_host: Any, handles: list[Any]) -> None:
    """By the copy, as far as they had come when the rows were made; 2 is each thread's own default stream."""
    gpu = devices.device(devices.visible()[0])
    array, bounce = on_host.zeros((2, 8), np.uint8), gpu.bounce_buffer()
    streams = [on_host.cuda.Stream().ptr if handle == "own" else handle for handle in handles]
    bounce[:16] = range(1, 17)
    copy = on_host.cuda.runtime.memcpyAsync
    for i, stream in enumerate(streams):
        copy(array.data.ptr + 8 * i, bounce.ctypes.data, 8, 1, stream)
    rows = buffers.rows_of([Foreign(array, stream=stream) for stream in streams])
    for i, stream in enumerate(streams):
        copy(array.data.ptr + 8 * i, bounce.ctypes.data + 8, 8, 1, stream)
    gpu.copy(table_of((bounce.ctypes.data + 100, array.data.ptr, 16)), rows.after, "to_host")
    assert bounce[100:116].reshape(2, 8)[: len(streams)].tolist() == [list(range(1, 9))] * len(streams)


def test_rows_of_torch(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor's interface says no stream: its device's current one counts."""
    torch_or_skip()
    import torch

    array = on_host.zeros((2, 8), np.uint8)

    class Tensor(torch.Tensor):
        is_cuda, device = True, torch.device("cuda", 0)
        __cuda_array_interface__ = Foreign(array).__cuda_array_interface__

    tensor = torch.zeros((2, 8), dtype=torch.uint8).as_subclass(Tensor)
    for handle, stream in ((0, 1), (77, 77)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, at=handle: type("Stream", (), {"cuda_stream": at}))
        rows = buffers.rows_of([tensor])
        assert streams_of(rows, on_host) == {stream} and rows.addresses[0, 0] == array.data.ptr
    assert buffers.rows_of([torch.zeros((2, 8), dtype=torch.uint8)]).device is None
    with pytest.raises(ValueError, match=r"memory: on meta.*\.cpu\(\)"):
        buffers.rows_of([torch.zeros((2, 8), dtype=torch.uint8, device="meta")])
