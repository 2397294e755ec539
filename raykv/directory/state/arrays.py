"""Types of the arrays in a directory's state, and conversions from the keys in a message."""

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raykv.protocol.location import KEY_BYTES

KeyArray = NDArray[np.uint64]  # (n, 2): the 16 bytes of each key
RowArray = NDArray[np.int64]  # numbers of rows, or their generations; -1: no row
MAP_NORESERVE = 0x4000  # Linux's flag, which Python's mmap module defines from 3.13 on
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE


def key_array(keys: bytes) -> KeyArray:
    """Convert keys to an (n, 2) uint64 array. ValueError for an incomplete key."""
    return np.frombuffer(keys, np.uint64).reshape(-1, 2)


def split_keys(keys: bytes) -> list[bytes]:
    """Split keys into the 16 bytes of each key. ValueError for an incomplete key."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no keys of {KEY_BYTES}")
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def zeros(length: int, least: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of `length` zeros, or fewer if the system refuses to reserve that many addresses.

    OSError if the system refuses even `least` zeros. Only addresses are reserved: a part takes memory when it is first
    written to. So the part in use can grow in place. The memory is in huge pages if the system grants these.
    """
    while True:
        try:
            memory = mmap.mmap(-1, length * np.dtype(dtype).itemsize, flags=FLAGS)
            break
        except OSError:
            if length == least:
                raise
            length = max(least, length // 2)
    with contextlib.suppress(OSError):  # without huge pages the array is only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)
