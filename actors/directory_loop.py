"""Periodic steps that need the directory: every store's heartbeats and demotion."""

import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from raykv import registry
from raykv.system.periodic import Pause, Periodic

log = logging.getLogger("raykv")


class DirectoryLoop(Periodic):
    """Takes steps with a handle of the directory in charge. After an error it looks for the directory anew."""

    def __init__(
        self, pool: str, name: str, step: Callable[[Any], Pause], on_error: Callable[[Exception], Pause]
    ) -> None:
        """name: the thread's. step, on_error: see Periodic; a step is given the actor's handle."""
        super().__init__(name, self._with_directory, self._forget_directory)
        self._pool, self._name, self._ask, self._failed = pool, name, step, on_error
        self._directory: Any = None

    def _with_directory(self) -> Pause:
        self._directory = self._directory or registry.find_directory(self._pool)
        return self._ask(self._directory)

    def _forget_directory(self, error: Exception) -> Pause:
        self._directory = None
        if is_absence(error):
            log.debug("pool %s: %s: %r", self._pool, self._name, error)
        else:  # a bug, or a device that failed: the next step may succeed
            log.error("pool %s: %s: %r", self._pool, self._name, error, exc_info=error)
        return self._failed(error)


def is_absence(error: Exception) -> bool:
    """Whether an error says no more than that the directory is dead, restarting or replaced."""
    return isinstance(error, (RayError, ValueError))
