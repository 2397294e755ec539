"""The successor: a pool's directory that stands by.

This module decides on which node the successor runs, and when it is restarted.
"""

import logging
import time
from typing import Any

import ray
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import RayError

from raykv.actors.directory.directory import start_directory

log = logging.getLogger("raykv")
FIRST_LOOK_S = 10.0  # seconds until the first check of the successor, as a pool that has just started is busy
LOOK_S = 5.0  # seconds between two checks of the successor
START_DEADLINE_S = 120.0  # maximum seconds for a successor to start; then another successor is started
MOVE_AFTER_S = 30.0  # minimum seconds between two moves of a successor to another node, as a start takes seconds of CPU


class Successor:
    """Keeps a pool's successor running. Not thread-safe."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._number = 0  # number of the directory that stands by: 1 or 2; 0 before the first look
        self.node_id = ""  # the successor's node, according to its last answer
        self._handle: Any = None  # None until the successor is found
        self._answer: Any = None  # the successor's pending answer to `node_id`
        self._look_at = time.monotonic() + FIRST_LOOK_S
        self._asked = 0.0  # time.monotonic() at the last call of `node_id`
        self._moved, self._given_up = -MOVE_AFTER_S, 0

    def due(self) -> bool:
        """Whether the successor should be checked now. If so, the next check is due in LOOK_S."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_S
        return True

    def stands_by(self, number: int) -> bool:
        """Whether the successor has this number and is running."""
        return self._number == number and self._handle is not None and is_alive(self._handle)

    def look(self, number: int, in_charge: str, others: list[str]) -> Any:
        """Start the successor if it is not running. Returns its handle if the caller should end it: see `_is_bad`.

        number: successor's number. in_charge: node of the directory in charge. others: other nodes for the successor.
        """
        if self._number != number:  # the earlier successor is in charge now: forget its pending answer
            self._number, self._answer, self._handle, self.node_id = number, None, None, ""
        nodes = others or [in_charge]
        if self._handle is None or not is_alive(self._handle):
            self._handle = start_directory(self._pool, number, nodes[self._given_up % len(nodes)])
        if self._is_bad(nodes):
            return self._handle
        if self._answer is None:
            self._answer, self._asked = self._handle.node_id.remote(), time.monotonic()
        return None

    def give_up(self, successor: Any, why: str) -> None:
        """End the successor. The next `look` starts a successor on the next node. successor: the handle to end."""
        log.warning("pool %s: the directory that stands by is started anew: %s", self._pool, why)
        ray.kill(successor)
        self._handle, self._answer, self.node_id = None, None, ""
        self._given_up += 1

    def _is_bad(self, nodes: list[str]) -> bool:
        """Whether the successor has been silent too long, or runs on none of these nodes.

        A successor that moved less than MOVE_AFTER_S ago is not moved again yet. Each answer is evaluated only once.
        """
        if self._answer is None:
            return False
        if not ray.wait([self._answer], timeout=0)[0]:
            return time.monotonic() > self._asked + START_DEADLINE_S
        answer, self._answer = self._answer, None
        try:
            self.node_id = ray.get(answer)
        except RayError:  # it is being restarted
            return False
        if self.node_id in nodes or time.monotonic() < self._moved + MOVE_AFTER_S:
            return False
        self._moved = time.monotonic()
        return True


def is_alive(actor: Any) -> bool:
    """Whether an actor is alive, according to what Ray last told this process. Makes no call."""
    return bool(actor._get_local_state() == ActorTableData.ALIVE)
