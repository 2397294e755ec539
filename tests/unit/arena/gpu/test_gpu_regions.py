"""Other processes open a region of a GPU's memory while the region lives."""

from typing import Any

import pytest
from helpers.arena.gpus import elsewhere, get, noise, put, table_of

from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import Device
from raykv.errors import DeviceError

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
    assert get(gpu, region.address, 100).tolist() == [255] * 100  # a region that is open stays usable
    region.close()


def test_regions_of_bad_size_or_handle_are_refused(gpu: Device) -> None:
    with pytest.raises(ValueError, match="size=0"):
        gpu.allocate(0)
    with pytest.raises(ValueError, match="3 bytes"):
        gpu.open(b"abc", 1)
