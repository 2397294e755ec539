"""An arena on a GPU takes memory of the GPU and a file in /dev/shm, and gives both back."""

import errno
import os
from typing import Any

import pytest
from helpers.arena.gpu_arenas import POOL, gpu_arena, has, some
from helpers.arena.gpu_rows import on_gpu
from helpers.arena.gpus import elsewhere
from helpers.arena.worker import PRINT, SLAB

from raykv.arena import files
from raykv.arena.files import remove, remove_left_behind
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import Device
from raykv.arena.gpu_arena import GpuArena
from raykv.errors import CapacityError
from raykv.system import file_locks

pytestmark = pytest.mark.usefixtures("nothing_left", "locked")


def test_full_shm(cupy: Any, ours: GpuArena) -> None:
    """A full /dev/shm has no room for the headers."""
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
    """Files of a living store stay. Those of a dead store are taken over or removed."""
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
