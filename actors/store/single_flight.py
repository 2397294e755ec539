"""Ensures that work which several callers request at the same time is done only once. This module needs no Ray."""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from raykv.protocol.transfers import FAILED


class SingleFlight:
    """Does work on items once for all callers that ask at the same time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _flights
        self._flights: dict[Hashable, Future[int]] = {}  # by item: its future verdict

    def do(
        self, items: Sequence[Hashable], work: Callable[[list[int]], NDArray[np.uint8]], seconds: float
    ) -> NDArray[np.uint8]:
        """Do `work` on the items that nobody else works on, and wait for the other items.

        work: takes indices of `items`, returns a verdict for each.
        seconds: maximum wait for other callers after this caller's own work. Items that take longer get FAILED.
        Returns (n,) uint8 verdicts. Passes on errors of `work`; callers that wait for its items then get FAILED.
        """
        mine, flights = self._claim(items)
        verdicts = np.full(len(items), FAILED, np.uint8)
        try:
            if mine:
                verdicts[mine] = work(mine)
        finally:
            self._finish(items, mine, verdicts)
        end = time.monotonic() + seconds
        for i in set(range(len(items))) - set(mine):
            try:
                verdicts[i] = flights[i].result(max(0.0, end - time.monotonic()))
            except TimeoutError:
                break
        return verdicts

    def _claim(self, items: Sequence[Hashable]) -> tuple[list[int], list[Future[int]]]:
        """Claim the items that nobody works on yet. Returns (their indices, the future of every item)."""
        mine = []
        with self._lock:
            for i, item in enumerate(items):
                if item not in self._flights:
                    self._flights[item] = Future()
                    mine.append(i)
            return mine, [self._flights[item] for item in items]

    def _finish(self, items: Sequence[Hashable], mine: list[int], verdicts: NDArray[np.uint8]) -> None:
        with self._lock:
            for i in mine:
                self._flights.pop(items[i]).set_result(int(verdicts[i]))
