"""A bell that wakes a resting thread. The end of a connection wakes the thread too."""

import os
import select

from raykv.line.wire import Stream


class Bell:
    """One thread waits for the bell; any thread may ring it."""

    def __init__(self) -> None:
        self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """End the wait. If nobody waits now, end the next wait."""
        os.eventfd_write(self._rung, 1)

    def wait(self, seconds: float | None, connection: Stream | None = None) -> bool:
        """Wait for a ring, for at most `seconds` (None: without limit). Returns whether the bell rang.

        connection: the end of this connection ends the wait too. Arriving bytes stay unread and do not end the wait.
        """
        poll = select.poll()
        poll.register(self._rung, select.POLLIN)
        if connection is not None and connection.fileno() >= 0:  # it was not closed meanwhile
            poll.register(connection, select.POLLRDHUP)
        poll.poll(None if seconds is None else seconds * 1e3)
        try:
            return os.eventfd_read(self._rung) > 0
        except BlockingIOError:
            return False

    def __del__(self) -> None:
        os.close(self._rung)
