"""No count of several threads is lost."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from raykv.system.counts import Counts

THREADS, KINDS = 4, 5_000


@pytest.mark.usefixtures("switching")
def test_no_thread_loses_what_another_counts() -> None:
    counts, together = Counts(), threading.Barrier(THREADS)

    def count(thread: int) -> None:
        together.wait()
        for kind in range(KINDS):  # the first count of a kind asks Counter for a zero
            counts.add(f"{kind}", 1 + thread)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(count, range(THREADS)))
    assert dict(counts) == {f"{kind}": sum(range(1, 1 + THREADS)) for kind in range(KINDS)}
