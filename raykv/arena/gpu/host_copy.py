"""Copies between a GPU and host memory: directly if the host memory is page-locked, else through bounce buffers."""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.arena import checksum
from raykv.arena.checksum import Copies
from raykv.arena.gpu.copy_kernel import Way
from raykv.arena.gpu.device import BOUNCE_BYTES, device
from raykv.errors import DeviceError


def copy(gpu: str, table: Copies, registered: bool, to_gpu: bool, after: Sequence[Any] = ()) -> None:
    """Do copies between a GPU and host memory.

    table: as in `raykv.arena.block_copy`. registered: whether GPUs can reach the host memory. after: CUDA events that
    must end first. Raises DeviceError if the GPU fails.
    """
    way: Way = "to_gpu" if to_gpu else "to_host"

    def far(copies: Copies) -> None:
        device(gpu).copy(copies, after, way)

    if registered:
        far(table)
        return
    begin, end = (checksum.copy, far) if to_gpu else (far, checksum.copy)
    parts = list(batches(table.reshape(-1, 3)))
    buffers = [device(gpu).bounce_buffer() for _ in parts[:2]]  # kept here, as `steps` has only their addresses
    steps = [_through(buffers[number % 2], part) for number, part in enumerate(parts)]
    if len(steps) == 1:
        begin(steps[0][0])
        end(steps[0][1])
        return
    with ThreadPoolExecutor(1, "raykv-bounce") as thread:  # one buffer is filled while the other is emptied
        emptied: list[Future[None]] = []
        for into, out in steps:
            begin(into)
            if emptied:
                emptied.pop().result()
            try:
                emptied.append(thread.submit(end, out))
            except RuntimeError:  # no thread can be started
                end(out)
        for last in emptied:
            last.result()


def _through(buffer: NDArray[np.uint8], batch: Copies) -> tuple[Copies, Copies]:
    """Return the same copies through a buffer: (copies into the buffer, copies out of the buffer).

    batch: an item of `batches`.
    """
    target, source, length = batch
    between = buffer.ctypes.data + np.cumsum(length) - length
    return np.stack([between, source, length], axis=1), np.stack([target, between, length], axis=1)


def batches(table: Copies) -> Iterator[Copies]:
    """Yield the same copies in batches of at most BOUNCE_BYTES, as (3, n) arrays of targets, sources and lengths."""
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
    """Unregister slabs of `length` bytes before their memory is freed. first: address of slab 0.

    registered: for each slab's number, the GPU that registered the slab, or None if CUDA refused.
    """
    for number, gpu in registered.items():
        if gpu is not None:
            with contextlib.suppress(DeviceError):  # a lost GPU can't reach the slab anyway
                device(gpu).unregister(first + number * length)
