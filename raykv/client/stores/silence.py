"""Who does not answer: the store of this node, or other nodes, whose blocks come late. Such are not asked again."""

import threading
import time
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv.config import SUSPECT_AFTER_S
from raykv.protocol.location import is_tier

PING_S = 0.25  # for a store to say that it is there


class Silence:
    """What one process knows of those that it pulls from, and of the store that pulls for it. Thread-safe.

    A store that does not answer a ping is silent until it does. Another node that is late is left alone for
    SUSPECT_AFTER_S: if it is silent, the directory knows by then, and sends nobody there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards that there is one ping at a time, and changes of _until
        self._ping: Any = None  # of a store that was late; None once it was answered
        self._asked = 0.0  # when
        self._until: dict[int, float] = {}  # by a late node's index: when it may be asked again. Never changed in place

    def ask(self, store: Any) -> None:
        """A store is about to be late: ask whether it is there."""
        with self._lock:
            if self._ping is None:
                self._ping, self._asked = store.ping.remote(), time.monotonic()

    def of_store(self, store: Any) -> bool:
        """Whether the store is silent."""
        with self._lock:
            if self._ping is None:
                return False
            if ray.wait([self._ping], timeout=0)[0]:
                try:
                    ray.get(self._ping)
                    self._ping = None
                    return False
                except RayError:  # it is being restarted, or has been replaced
                    self._ping = store.ping.remote()
            return time.monotonic() - self._asked > PING_S

    def note_late(self, nodes: NDArray[np.integer[Any]]) -> None:
        """Blocks of other nodes, by their indices, are late. A tier's are not its node's fault."""
        now = time.monotonic()
        late = dict.fromkeys(nodes[~is_tier(nodes)].tolist(), now + SUSPECT_AFTER_S)
        with self._lock:
            self._until = {index: until for index, until in self._until.items() if until > now} | late

    def of_nodes(self, nodes: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """(n,) bool: whether each node, by its index, was late a short while ago."""
        now = time.monotonic()
        late = [index for index, until in self._until.items() if until > now]
        return np.isin(nodes, np.array(late, nodes.dtype)) if late else np.zeros(len(nodes), np.bool_)
