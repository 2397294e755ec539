"""Copies between a GPU and this process's memory, which is pinned or is not."""

from collections.abc import Iterator

import numpy as np

from raykv import native
from raykv.device import BOUNCE_BYTES, device
from raykv.native import Copies


def copy(gpu: str, table: Copies, pinned: bool, to_gpu: bool, after: int | None) -> None:
    """Do copies, (blocks, parts, 3) as in `tiles`, between a GPU and host memory, which may be `pinned`.

    after: handle of a CUDA stream whose work is to be done first. DeviceError where the GPU fails.
    """
    if pinned:
        device(gpu).copy(table, after)
        return
    bounce = device(gpu).bounce()
    for to, of, length in batches(table.reshape(-1, 3)):
        at = bounce.ctypes.data + np.cumsum(length) - length
        if to_gpu:
            native.copy(np.stack([at, of, length], axis=1))
            device(gpu).copy(np.stack([to, at, length], axis=1), after)
        else:
            device(gpu).copy(np.stack([at, of, length], axis=1), after)
            native.copy(np.stack([to, at, length], axis=1))


def batches(table: Copies) -> Iterator[Copies]:
    """(3, n) columns of the same copies, cut so that each batch has at most BOUNCE_BYTES."""
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


def unpin(first: int, length: int, pins: dict[int, str]) -> None:
    """Memory is about to go, of which those ranges of `length` bytes from address `first` on are pinned."""
    for number, gpu in pins.items():
        if gpu:
            device(gpu).unpin(first + number * length, length)
