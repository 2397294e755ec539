"""The floor (baseline) of every copy: numpy copies the same bytes with one or several threads."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

Blocks = list[NDArray[np.uint8]]


class Memcpy:
    """Copies blocks with `threads` threads. A single thread is the caller's thread."""

    def __init__(self, threads: int) -> None:
        self._shares = threads
        self._threads = ThreadPoolExecutor(threads)

    def seconds(self, to: Blocks, of: Blocks) -> float:
        """Copy blocks. Each thread copies a share of the blocks. Returns the seconds that this took."""
        shares = [list(zip(to, of, strict=True))[i :: self._shares] for i in range(self._shares)]
        begin = time.perf_counter()
        if len(shares) == 1:
            _copy(shares[0])
        else:
            for done in [self._threads.submit(_copy, share) for share in shares]:
                done.result()
        return time.perf_counter() - begin


def _copy(pairs: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> None:
    for to, of in pairs:
        np.copyto(to, of)
