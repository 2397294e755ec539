"""Counts by kind. Several threads raise them."""

import threading
from collections import Counter


class Counts(Counter[str]):
    """Raise these by `add` only: `counts[kind] += 1` may lose another thread's addition."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, kind: str, more: int = 1) -> None:
        """Raise a count."""
        with self._lock:
            self[kind] += more
