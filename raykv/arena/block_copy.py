"""Copies between slots and callers' memory, with or without a checksum, over a few threads.

A block has one or more parts that lie one after the other in its slot. In paged memory each layer has a part.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from raykv.arena import checksum
from raykv.arena.buffers import Rows

Copies = NDArray[np.int64]  # (blocks, parts, 3): target address, source address, bytes
T = TypeVar("T")

SEGMENT = 2 << 20  # bytes; without checksums, longer parts of blocks are copied in pieces of this size
SPLIT = 8 << 20  # minimum total bytes for which several threads share the copies
SHARE = 16 << 20  # bytes that a GPU copies before a thread hashes them
THREADS = min(4, len(os.sched_getaffinity(0)))

_executor: ThreadPoolExecutor | None = None
_mutex = threading.Lock()  # guards `_executor`; no other lock is taken meanwhile


def copies(rows: Rows, slots: NDArray[np.int64], out: bool) -> Copies:
    """Return the table of copies between rows and their slots' addresses. out: copy from the slots to the rows."""
    ends = np.cumsum(rows.lengths)
    table = np.empty((*rows.addresses.shape, 3), np.int64)
    table[..., 0 if out else 1] = rows.addresses
    table[..., 1 if out else 0] = slots[:, None] + (ends - rows.lengths)
    table[..., 2] = rows.lengths
    return table


def copy(table: Copies) -> None:
    """Do the copies. Nobody may change or free the memory before this returns."""
    if _is_small(table):
        checksum.copy(table.reshape(-1, 3))
    else:
        _run(partial(checksum.copy, stream=True), _segments(table))


def copy_summed(table: Copies) -> list[int]:
    """Like `copy`. Returns the xxh3_64 of each copied block."""
    if _is_small(table):
        return checksum.copy_summed(table)
    streamed = partial(checksum.copy_summed, stream=True)
    return [total for (total,) in _run(streamed, [table[i : i + 1] for i in range(len(table))])]


def sums(addresses: NDArray[np.int64], size: int) -> list[int]:
    """Return the xxh3_64 of `size` bytes at each address."""
    table = np.stack([addresses, addresses, np.full_like(addresses, size)], axis=1)
    return copy_summed(table[:, None])


def sums_behind(fetch: Callable[[slice], None], addresses: NDArray[np.int64], size: int) -> list[int]:
    """Like `sums`, but `fetch` brings the bytes in shares. A share is hashed while `fetch` brings the next shares."""
    step = max(1, SHARE // size)
    table = np.stack([addresses, addresses, np.full_like(addresses, size)], axis=1)[:, None]
    shares = [table[first : first + step] for first in range(0, len(table), step)]
    hashing: list[Future[list[int]]] = []
    try:
        for number, share in enumerate(shares):
            fetch(slice(number * step, number * step + step))
            hashing.append(_threads().submit(checksum.copy_summed, share, stream=True))
        last_first = [  # this thread hashes the last shares, unless another thread has begun them
            checksum.copy_summed(share, stream=True) if future.cancel() else future.result()
            for share, future in zip(reversed(shares), reversed(hashing), strict=True)
        ]
    finally:
        wait([future for future in hashing if not future.cancel()])  # before the caller releases its locks
    return [total for part in reversed(last_first) for total in part]


def sums_of(rows: Rows) -> list[int]:
    """Return the xxh3_64 of each row."""
    lengths = np.broadcast_to(rows.lengths, rows.addresses.shape)
    return copy_summed(np.stack([rows.addresses, rows.addresses, lengths], axis=2))


def _is_small(table: Copies) -> bool:
    """Whether the copies are too small to share between threads."""
    return bool(table[..., 2].sum() < SPLIT)


def _segments(table: Copies) -> list[NDArray[np.int64]]:
    """Return the same copies in shares for threads: whole blocks, or pieces of SEGMENT bytes if a part is longer."""
    if not table.size or table[0, :, 2].max() <= SEGMENT:
        return list(table)
    return [
        np.array([[target + done, source + done, min(SEGMENT, length - done)]], np.int64)
        for target, source, length in table.reshape(-1, 3).tolist()
        for done in range(0, length, SEGMENT)
    ]


def _run(function: Callable[..., T], items: list[NDArray[np.int64]]) -> list[T]:
    """Call `function` for every item in several threads. Returns the results."""
    threads = min(THREADS, len(items))
    if threads <= 1:
        return [function(item) for item in items]
    results: list[T | None] = [None] * len(items)
    numbers = iter(range(len(items)))

    def share() -> None:
        for i in numbers:  # a thread takes the next item when it is free, so a thread on a slow core takes fewer items
            results[i] = function(items[i])

    helpers: list[Future[None]] = []
    try:
        helpers += [_threads().submit(share) for _ in range(threads - 1)]
        share()
    finally:
        for _ in numbers:  # after an exception no thread starts another item
            pass
        helpers = [helper for helper in helpers if not helper.cancel()]
        wait(helpers)  # no thread may still copy when the caller releases its locks
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
    _executor, _mutex = None, threading.Lock()  # a forked child has none of its parent's threads


os.register_at_fork(after_in_child=_after_fork)
