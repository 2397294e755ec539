"""A GPU has a name, a capacity and page-locked memory, and fails with a clear error."""

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest
from helpers.arena.gpus import forget, table_of

from raykv.arena.gpu import cuda
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import BOUNCE_BYTES, Device
from raykv.errors import CapacityError, DeviceError

MIB = 1 << 20


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
    assert devices.device(devices.visible()[0]).capacity(1.0) == 64 * MIB  # the other GPU's memory is unchanged
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
    """CuPy ends the UUID at a zero byte."""
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
