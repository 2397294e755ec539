"""Counts by kind, which several threads may increment."""

import threading
from collections import Counter


class Counts(Counter[str]):
    """Counts that must be incremented by `add`: `counts[kind] += 1` may lose another thread's increment."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, kind: str, more: int = 1) -> None:
        """Increment a count."""
        with self._lock:
            self[kind] += more
