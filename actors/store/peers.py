"""The stores of other nodes by index in locations. This module needs no Ray."""

import threading
from collections.abc import Callable

from raykv.transports.base import Peer


class Peers:
    """Remembers the store of each index, until a new directory assigns other indices. Thread-safe."""

    def __init__(self, look_up: Callable[[int], Peer]) -> None:
        """look_up: asks the directory for a store. Its errors are passed on to the caller."""
        self._look_up = look_up
        self._lock = threading.Lock()  # guards _peers and _cleared; not held while the directory is asked
        self._peers: dict[int, Peer] = {}
        self._cleared = 0  # how often all stores were forgotten

    def get(self, index: int) -> Peer:
        """Return the store with this index in locations."""
        with self._lock:
            known, cleared = self._peers.get(index), self._cleared
        if known:
            return known
        peer = self._look_up(index)
        with self._lock:
            if cleared == self._cleared:  # otherwise the answer may come from an earlier directory
                self._peers[index] = peer
        return peer

    def forget(self, index: int) -> None:
        """Forget a store that did not answer, so that it is looked up again."""
        with self._lock:
            self._peers.pop(index, None)

    def forget_all(self) -> None:
        """Forget all stores, because a new directory is in charge and assigns other indices."""
        with self._lock:
            self._peers.clear()
            self._cleared += 1
