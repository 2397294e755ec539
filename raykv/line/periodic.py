"""A daemon thread that repeats a step: heartbeats, demotion, resizing, watching."""

import threading
import time
from collections.abc import Callable

from raykv.line.bell import Bell
from raykv.line.wire import Stream

Pause = float | None  # seconds; None: until `wake`


class Periodic:
    """Repeats a step, with pauses, until `stop`. An error in a step does not end the repetition.

    One thread runs the steps. Any thread may call the methods.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Pause],
        on_error: Callable[[Exception], Pause],
        connection: Callable[[], Stream | None] = lambda: None,
    ) -> None:
        """name: name of the thread. step: returns the pause after a step. on_error: takes an error, returns a pause.

        connection: returns a connection whose end ends the pause, or None.
        """
        self._step, self._on_error, self._connection = step, on_error, connection
        self._began = 0.0
        self._bell, self._stopped = Bell(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which runs the first step at once."""
        self._thread.start()

    def wake(self) -> None:
        """Run the next step now, or as soon as the current step ends."""
        self._bell.ring()

    def stop(self) -> None:
        """Run no further step. The current step continues; `join` waits for its end."""
        self._stopped.set()
        self._bell.ring()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the last step has ended, for at most `seconds`."""
        self._thread.join(seconds)

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`, or until `stop`."""
        self._stopped.wait(seconds)

    def rest_of(self, period: float) -> float:
        """Return the seconds that remain of a period that began with this step.

        With this pause, steps begin one period apart.
        """
        return max(0.0, period - (time.monotonic() - self._began))

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._began = time.monotonic()
            try:
                pause = self._step()
            except Exception as error:
                pause = self._on_error(error)
            self._bell.wait(pause, self._connection())
