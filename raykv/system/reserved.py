"""Arrays that grow in place: their addresses are reserved, and memory is taken as it is first written to."""

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAP_NORESERVE = 0x4000  # of Linux; mmap has it from Python 3.13 on
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE


def zeros(length: int, least: int, dtype: DTypeLike) -> NDArray[Any]:
    """`length` zeros, or fewer where the system refuses so many addresses. OSError where it refuses even `least`.

    They are in huge pages where the system grants these.
    """
    while True:
        try:
            memory = mmap.mmap(-1, length * np.dtype(dtype).itemsize, flags=FLAGS)
            break
        except OSError:
            if length == least:
                raise
            length = max(least, length // 2)
    with contextlib.suppress(OSError):  # without huge pages it is only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)
