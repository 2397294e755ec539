"""Counts bytes across threads."""

import threading


class Taken:
    """Bytes taken by what is in a tier, as far as this process knows."""

    def __init__(self) -> None:
        self.bytes = 0
        self._mutex = threading.Lock()

    def add(self, change: int) -> None:
        with self._mutex:
            self.bytes += change
