"""Arenas on a GPU and in memory, and blocks in them."""

import contextlib
import os

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from helpers.arena import worker as w
from helpers.arena.gpus import Bytes, noise
from helpers.arena.worker import GEN, PRINT, SLAB, key_of, locations
from raykv.arena import header
from raykv.arena.arena import Arena
from raykv.arena.gpu.device import Device
from raykv.arena.gpu_arena import GpuArena

POOL = f"test-gpu-{os.getpid()}"
SIZE = 10_001
SIZES = [1, 4095, 4097, SIZE, 300_001]
Locations = NDArray[np.void]


def gpu_arena(gpu: Device, pool: str = POOL) -> GpuArena:
    arena = GpuArena.open_new(pool, PRINT, gpu, SLAB, 3)
    assert arena.raise_epoch(w.EPOCH)
    return arena


def memory_arena(name: str = "host") -> Arena:
    """An arena of three slabs, two of them offered, with epoch 1."""
    path = f"/dev/shm/raykv-{POOL}-{name}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    arena = Arena.create(path, PRINT, SLAB, 3)
    assert arena.offer_next() and arena.offer_next()
    assert arena.raise_epoch(w.EPOCH)
    return arena


def some(count: int, size: int = SIZE) -> tuple[Locations, Bytes, Bytes]:
    """(grants in slab 1, keys, blocks)."""
    at = locations([2, 0, 3, 1][:count], range(2, 2 + count), size=size, slab=1)
    return at, np.concatenate([key_of(i) for i in range(count)]), noise(count * size).reshape(count, size)


def granted(at: Locations, slab: int = 0, gen: int = 100) -> Locations:
    """The same grants with another slab and other generations."""
    to = at.copy()
    to["slab"], to["gen"] = slab, GEN + gen + np.arange(len(at))
    return to


def has(arena: Arena, at: Locations, keys: Bytes, blocks: Bytes, verify: bool = True) -> bool:
    out = np.zeros_like(blocks)
    ok = arena.read(at, keys, out, verify=verify)
    assert (out[ok] == blocks[ok]).all(), "a read gave other bytes"
    return bool(ok.all())


def sums_of(blocks: Bytes) -> list[int]:
    return [xxh3_64_intdigest(block.tobytes()) for block in blocks]


def header_of(arena: Arena, slot: int, slab: int = 1) -> header.Words:
    first = arena._shape[1] + (slab * (SLAB // 4096) + slot) * header.HEADER_WORDS
    return arena._memory[0][first : first + header.HEADER_WORDS]
