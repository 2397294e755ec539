"""Tracks whether this node's store answers, and which other nodes send blocks late."""

import threading
import time
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv.cluster import ray_calls
from raykv.config import SUSPECT_AFTER_S
from raykv.protocol.location import is_tier

PING_S = 0.25  # deadline for a store to answer a ping


class Silence:
    """Tracks which nodes were late for one process, and whether its own node's store is silent. Thread-safe.

    A store that does not answer a ping counts as silent until it answers. The process requests nothing from a late node
    for SUSPECT_AFTER_S. In this time the directory notices if the node is down, and then sends no reader to it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # ensures one ping at a time, and guards changes of _until
        self._ping: Any = None  # ping of a store that was late; None once the store has answered
        self._asked = 0.0  # when the ping was sent
        self._until: dict[int, float] = {}  # by index of a late node: when to use the node again. Never mutated

    def ask(self, store: Any) -> None:
        """Ping a store whose answer is about to be late."""
        with self._lock:
            if self._ping is None and ray.is_initialized():
                self._ping, self._asked = store.ping.remote(), time.monotonic()

    def of_store(self, store: Any) -> bool:
        """Whether the store is silent. After ray.shutdown() every store is silent."""
        with self._lock:
            if not ray.is_initialized():
                return True
            if self._ping is None:
                return False
            if ray_calls.wait([self._ping], timeout=0)[0]:
                try:
                    ray_calls.get(self._ping)
                    self._ping = None
                    return False
                except RayError:  # the store is being restarted, or was replaced
                    self._ping = store.ping.remote()
            return time.monotonic() - self._asked > PING_S

    def note_late(self, nodes: NDArray[np.integer[Any]]) -> None:
        """Note the nodes, by index, whose blocks are late. A late external tier is not a fault of its node."""
        now = time.monotonic()
        late = dict.fromkeys(nodes[~is_tier(nodes)].tolist(), now + SUSPECT_AFTER_S)
        with self._lock:
            self._until = {index: until for index, until in self._until.items() if until > now} | late

    @property
    def any_late(self) -> bool:
        """Whether any node was late in the last SUSPECT_AFTER_S."""
        return bool(self._late())

    def of_nodes(self, nodes: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return (n,) bool: whether each node, given by index, was late in the last SUSPECT_AFTER_S."""
        late = self._late()
        return np.isin(nodes, np.array(late, nodes.dtype)) if late else np.zeros(len(nodes), np.bool_)

    def _late(self) -> list[int]:
        now = time.monotonic()
        return [index for index, until in self._until.items() if until > now]
