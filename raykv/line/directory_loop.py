"""Periodic steps that need the directory: the heartbeats and demotions of every store."""

import logging
import time
from collections.abc import Callable

from raykv.line.directory_line import ERRORS, DirectoryLine
from raykv.line.periodic import Pause, Periodic
from raykv.protocol.calls import STORE

log = logging.getLogger("raykv")


class DirectoryLoop(Periodic):
    """Runs steps with a line to the directory in charge. After an error it searches for the directory.

    A single late answer causes no search: a search needs Ray's GCS, which may be down while the directory works.
    """

    def __init__(
        self, pool: str, name: str, step: Callable[[DirectoryLine], Pause], on_error: Callable[[Exception], Pause]
    ) -> None:
        """name: name of the thread. step, on_error: see Periodic."""
        self._pool, self._name, self._ask, self._failed = pool, name, step, on_error
        self._line, self._found = DirectoryLine(pool, STORE), False
        super().__init__(name, self._with_directory, self._forget_directory, lambda: self._line.connection)
        self._late = False  # whether the last call was not answered in time
        self._due = 0.0  # time.monotonic() of the next step

    def wake(self) -> None:
        self._due = 0.0
        super().wake()

    def _with_directory(self) -> Pause:
        if not self._found and not self._line.find():
            raise ValueError(f"pool {self._pool!r} has no directory")
        self._found = True
        if not self._line.look():
            raise ConnectionError("the directory closed the connection")
        if time.monotonic() >= self._due:
            self._due = float("inf")  # a call of `wake` during the step sets 0
            pause = self._ask(self._line)
            self._late = False
            if pause is not None and self._due:
                self._due = time.monotonic() + pause
        return None if self._due == float("inf") else max(0.0, self._due - time.monotonic())

    def _forget_directory(self, error: Exception) -> Pause:
        late_once = isinstance(error, TimeoutError) and not self._late and self._line.way == "socket"
        self._found, self._late, self._due = late_once, late_once, 0.0
        if not late_once:
            self._line.close()
        if is_absence(error):
            log.debug("pool %s: %s: %r", self._pool, self._name, error)
        else:  # a bug, or a device that failed: the next step may succeed
            log.error("pool %s: %s: %r", self._pool, self._name, error, exc_info=error)
        return self._failed(error)


def is_absence(error: Exception) -> bool:
    """Whether an error only means that the directory is dead, restarting or replaced."""
    return isinstance(error, ERRORS)
