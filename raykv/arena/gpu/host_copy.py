"""Copies between a GPU and this process's memory, which is pinned or is not."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import ParamSpec

import numpy as np

from raykv.arena import checksum
from raykv.arena.checksum import Copies
from raykv.arena.gpu.device import BOUNCE_BYTES, device
from raykv.errors import DeviceError

P = ParamSpec("P")


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
            checksum.copy(np.stack([at, of, length], axis=1))
            device(gpu).copy(np.stack([to, at, length], axis=1), after)
        else:
            device(gpu).copy(np.stack([at, of, length], axis=1), after)
            checksum.copy(np.stack([to, at, length], axis=1))


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


def unpin(first: int, length: int, pins: dict[int, tuple[str, bool]]) -> None:
    """Memory is about to go, of which those ranges of `length` bytes from address `first` on are pinned, or refused."""
    for number, (gpu, _) in pins.items():
        with contextlib.suppress(DeviceError):  # a GPU that is lost reaches nothing
            device(gpu).unpin(first + number * length, length)


def when_gone(owner: object, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call it when nobody has `owner` any more: not as the interpreter ends, nor in a forked child, without GPUs."""
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            with contextlib.suppress(DeviceError):  # a GPU that is lost has let go of everything
                function(*args, **kwargs)

    weakref.finalize(owner, call).atexit = False
