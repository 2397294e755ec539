"""Decides which directory of a pool is in charge. A pool has two directories: one serves, and the other stands by.

A takeover needs no supervisor, and does not wait until Ray notices a lost node. A directory that takes charge gets a
new epoch, a number higher than the epochs of all earlier directories. Processes that know the newer epoch refuse the
older directory.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from ray.exceptions import RayError

from raykv.cluster import internal_kv
from raykv.config import HEARTBEAT_S
from raykv.line.directory_line import ERRORS, DirectoryLine
from raykv.line.periodic import Periodic
from raykv.line.pipeline import Pipeline
from raykv.line.wire import Stream
from raykv.protocol.location import Address
from raykv.system import events

log = logging.getLogger("raykv")
SILENT_PINGS = 3  # a directory is lost after this number of unanswered pings in a row; each ping waits HEARTBEAT_S
ENDING_LOOKS = 50  # maximum number of checks whether a process has ended
ENDING_LOOK_S = 0.02  # seconds between two checks whether a process has ended
SILENT_RAY_PINGS = 10  # like SILENT_PINGS, for pings through Ray, which wait behind all other calls


class Succession:
    """A thread in each directory. While its directory stands by, the thread watches the directory in charge.

    Once its own directory is in charge, the thread checks that no other directory has taken charge.
    """

    def __init__(
        self, pool: str, name: str, prepare: Callable[[], None], take_charge: Callable[[], Address | None]
    ) -> None:
        """name: name of this directory's actor. prepare: does slow work before the directory serves.

        take_charge: makes the directory serve, and returns the address where it listens. It is called again if this
        address could not be written into Ray's internal KV. The second call changes nothing.
        """
        self._pool, self._name, self._prepare, self._take_charge = pool, name, prepare, take_charge
        self._line = DirectoryLine(pool)
        self._pinged, self._silent = 0.0, 0  # time of the last ping, and number of failed pings in a row
        self._watched: Address | None = None  # the address that was pinged
        self._known: Address | None = None  # the address that answered
        self._serves = False
        self._taking = threading.Lock()  # held by `take`, which the supervisor may call too
        self._loop = Periodic("raykv-succession", self._step, self._on_error, self._watched_connection)

    def start(self) -> None:
        """Take charge now if Ray's internal KV names this directory; else stand by."""
        if internal_kv.in_charge(self._pool).name == self._name:
            self.take()
        else:
            events.tell("stand_by")
        self._loop.start()

    def take(self) -> None:
        """Take charge, and record this in Ray's internal KV. Does nothing if another directory takes charge first."""
        with self._taking:
            before = internal_kv.in_charge(self._pool)
            if self._serves:
                self._step_down_if_replaced()
                return
            self._prepare()
            if internal_kv.in_charge(self._pool) == before:
                address, self._known = self._take_charge(), None  # if the next line fails, `_is_lost` notices
                internal_kv.put_in_charge(self._pool, self._name, address)
                self._serves = True

    def _step(self) -> float:
        if self._serves:
            self._step_down_if_replaced()
            return HEARTBEAT_S
        if self._is_lost() and internal_kv.settings(self._pool) is not None:  # else the pool is being stopped
            events.tell("takeover", why="the directory before it does not answer")
            self.take()
        return max(0.0, self._pinged + HEARTBEAT_S - time.monotonic())

    def _watched_connection(self) -> Stream | None:
        """Return the connection to the directory in charge; None while serving. It closes when that directory ends."""
        return None if self._serves else self._line.connection

    def _on_error(self, error: Exception) -> float:
        if not isinstance(error, (RayError, ValueError)):  # both errors are usual if Ray's KV fails or the pool stops
            log.error("pool %s: %s: %r", self._pool, self._name, error, exc_info=error)
        return HEARTBEAT_S

    def _step_down_if_replaced(self) -> None:
        """End this process if another directory is in charge. Ray restarts this process as the successor."""
        if internal_kv.in_charge(self._pool).name != self._name:
            events.tell("stop", why="another directory is in charge")
            os._exit(1)

    def _is_lost(self) -> bool:
        """Whether the directory in charge is gone: its process ended, or it was silent too long."""
        if time.monotonic() >= self._pinged + HEARTBEAT_S:
            self._pinged = time.monotonic()
            if not self._known or self._silent:  # a directory that answers is still in charge
                in_charge = internal_kv.in_charge(self._pool)
                if in_charge.name == self._name:  # an earlier `take` wrote this name, but Ray's answer was lost
                    return True
                self._connect(in_charge.address)
            if self._is_silent():
                return True
        known = self._known
        return known is not None and not self._line.look() and self._has_ended(known)

    def _connect(self, address: Address | None) -> None:
        """Watch the directory in charge, which listens at `address`."""
        if self._line.address is None or self._line.address != address:
            self._line.find()
        if self._line.address != self._watched:  # the directory was restarted, and listens elsewhere
            self._watched, self._silent = self._line.address, 0

    def _is_silent(self) -> bool:
        """Ping the directory in charge. Returns whether it has been silent too long."""
        try:
            self._line.call("ping", seconds=HEARTBEAT_S)
            self._silent, self._known = 0, self._line.address
        except ERRORS:
            self._silent += 1
        return self._silent >= (SILENT_PINGS if self._line.way == "socket" else SILENT_RAY_PINGS)

    def _has_ended(self, address: Address) -> bool:
        """Whether the directory's process has ended: its node answers, but nobody listens at its address."""
        self._known = None  # forget the address, so that the directory is looked up again
        self._line.close()
        for _ in range(ENDING_LOOKS):
            try:
                Pipeline(address).close()
                return False
            except ConnectionRefusedError:
                return internal_kv.in_charge(self._pool).address == address
            except ConnectionError:  # a killed process still listens for a moment after its connections close
                self._loop.sleep(ENDING_LOOK_S)
            except OSError:
                return False
        return False
