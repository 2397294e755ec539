"""Tells the pool which chunks a session is done with. A thread waits until workers had time to store these chunks."""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import NamedTuple

from raykv.client.directory_client import DirectoryClient
from raykv.keys import Keys

log = logging.getLogger("raykv")

PAUSE_S = 0.5  # before each call: workers may still store a finished request's chunks, and hold these chunks meanwhile
CALLS = 5  # most calls for the same keys: a call is repeated if it reached fewer copies than keys


class _Told(NamedTuple):
    due: float
    calls: int
    keys: Keys
    again: bool


class Done:
    """The keys that wait to be told to the pool. The thread starts with the first key."""

    def __init__(self, directory: DirectoryClient) -> None:
        self._directory = directory
        self._queue: SimpleQueue[_Told | None] = SimpleQueue()  # by `due`
        self._thread: threading.Thread | None = None

    def tell(self, keys: Keys, again: bool) -> None:
        """See KVCache.done."""
        self._queue.put(_Told(time.monotonic() + PAUSE_S, CALLS, keys, again))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raykv-done", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Tell no more."""
        self._queue.put(None)

    def _run(self) -> None:
        while told := self._queue.get():
            time.sleep(max(0.0, told.due - time.monotonic()))
            try:
                count = self._directory.done(told.keys, told.again)
            except Exception:
                log.exception("the pool could not be told what a session is done with")
                continue
            if count < len(told.keys) and told.calls > 1:
                self._queue.put(told._replace(due=time.monotonic() + PAUSE_S, calls=told.calls - 1))
