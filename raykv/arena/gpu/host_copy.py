"""Copies between a GPU and this process's memory: directly if that is page-locked, else through a bounce buffer."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raykv.arena import checksum
from raykv.arena.checksum import Copies
from raykv.arena.gpu.copy_kernel import Way
from raykv.arena.gpu.device import BOUNCE_BYTES, device
from raykv.errors import DeviceError


def copy(gpu: str, table: Copies, registered: bool, to_gpu: bool, after: Sequence[Any] = ()) -> None:
    """Do copies between a GPU and host memory.

    table: as in `raykv.arena.block_copy`. registered: GPUs reach the host memory. after: CUDA events that must end
    first. DeviceError where the GPU fails.
    """
    way: Way = "to_gpu" if to_gpu else "to_host"
    if registered:
        device(gpu).copy(table, after, way)
        return
    bounce = device(gpu).bounce_buffer()
    for target, source, length in batches(table.reshape(-1, 3)):
        between = bounce.ctypes.data + np.cumsum(length) - length
        if to_gpu:
            checksum.copy(np.stack([between, source, length], axis=1))
            device(gpu).copy(np.stack([target, between, length], axis=1), after, way)
        else:
            device(gpu).copy(np.stack([between, source, length], axis=1), after, way)
            checksum.copy(np.stack([target, between, length], axis=1))


def batches(table: Copies) -> Iterator[Copies]:
    """(3, n) columns (target, source, length) of the same copies, cut into batches of at most BOUNCE_BYTES."""
    counts = -(-table[:, 2] // BOUNCE_BYTES)
    pieces = np.repeat(table, counts, axis=0)
    skipped = (np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)) * BOUNCE_BYTES
    pieces[:, 0] += skipped
    pieces[:, 1] += skipped
    pieces[:, 2] = np.minimum(pieces[:, 2] - skipped, BOUNCE_BYTES)
    first = 0
    while first < len(pieces):
        size = np.cumsum(pieces[first:, 2])
        stop = first + int(np.searchsorted(size, BOUNCE_BYTES, side="right"))
        yield pieces[first:stop].T
        first = stop


def unregister(first: int, length: int, registered: dict[int, str | None]) -> None:
    """Unregister slabs of `length` bytes before their memory goes. first: address of slab 0.

    registered: by number of the slab, the GPU that registered it. None: CUDA refused.
    """
    for number, gpu in registered.items():
        if gpu is not None:
            with contextlib.suppress(DeviceError):  # a lost GPU reaches nothing
                device(gpu).unregister(first + number * length)
