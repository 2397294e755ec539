"""Copies between slots and callers' memory, with or without a checksum, over a few threads."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

Bytes = NDArray[np.uint8]
Job = tuple[Bytes, list[Bytes]]  # a slot's payload, and the pieces of memory it goes to or comes from
T = TypeVar("T")

TILE = 512 << 10  # stays in a core's cache between copy and checksum; at half of it the calls begin to cost
SEGMENT = 2 << 20  # what a thread takes at a time of a plain copy
SPLIT = 8 << 20  # copies from here on are shared between threads
THREADS = min(4, len(os.sched_getaffinity(0)))

_executor: ThreadPoolExecutor | None = None
_mutex = threading.Lock()


def read(jobs: Sequence[Job]) -> None:
    """Copy slots out to their pieces."""
    _run(_copy, [pair for slot, pieces in jobs for pair in _pairs(slot, pieces, SEGMENT)], jobs)


def read_summed(jobs: Sequence[Job]) -> list[int]:
    """Copy slots out to their pieces; xxh3_64 of what arrived, by job."""
    return _run(_read_summed, jobs, jobs)


def write_summed(jobs: Sequence[Job]) -> list[int]:
    """Copy pieces into their slots; xxh3_64 of what arrived, by job."""
    return _run(_write_summed, jobs, jobs)


def _copy(pair: tuple[Bytes, Bytes]) -> None:
    np.copyto(pair[1], pair[0])


def _read_summed(job: Job) -> int:
    total = xxh3_64()
    for source, piece in _pairs(*job, TILE):
        np.copyto(piece, source)
        total.update(piece.data)
    return total.intdigest()


def _write_summed(job: Job) -> int:
    total = xxh3_64()
    for target, piece in _pairs(*job, TILE):
        np.copyto(target, piece)
        total.update(target.data)
    return total.intdigest()


def _pairs(slot: Bytes, pieces: list[Bytes], size: int) -> Iterator[tuple[Bytes, Bytes]]:
    """(part of the slot, part of a piece), at most `size` bytes each."""
    if len(pieces) == 1 and len(slot) <= size:
        yield slot, pieces[0]
        return
    at = 0
    for piece in pieces:
        length = len(piece)
        if length <= size:
            yield slot[at : at + length], piece
        else:
            for start in range(0, length, size):
                stop = min(start + size, length)
                yield slot[at + start : at + stop], piece[start:stop]
        at += length


def _run(function: Callable[..., T], items: Sequence[object], jobs: Sequence[Job]) -> list[T]:
    """`function` of every item, over several threads if the jobs are big enough to gain by it."""
    threads = min(THREADS, len(items)) if sum(len(slot) for slot, _ in jobs) >= SPLIT else 1
    if threads <= 1:
        return [function(item) for item in items]
    results: list[T | None] = [None] * len(items)
    numbers = iter(range(len(items)))

    def share() -> None:
        for i in numbers:  # each thread takes the next item: a slow core takes fewer
            results[i] = function(items[i])

    helpers: list[Future[None]] = []
    try:
        helpers += [_threads().submit(share) for _ in range(threads - 1)]
        share()
    finally:
        for _ in numbers:  # after an exception: nobody starts another item,
            pass
        helpers = [helper for helper in helpers if not helper.cancel()]
        wait(helpers)  # and nobody is still copying when the caller drops its locks
    for helper in helpers:
        helper.result()
    return results  # type: ignore[return-value]


def _threads() -> ThreadPoolExecutor:
    global _executor
    with _mutex:
        if _executor is None:
            _executor = ThreadPoolExecutor(max(1, THREADS - 1), thread_name_prefix="raykv-copy")
        return _executor


def _after_fork() -> None:
    global _executor, _mutex
    _executor, _mutex = None, threading.Lock()  # a child has none of its parent's threads


os.register_at_fork(after_in_child=_after_fork)
