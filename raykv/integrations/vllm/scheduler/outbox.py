"""Sends hints of requests to the pool. A thread waits until workers have had time to store the requests' chunks."""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import NamedTuple

from raykv.client.directory_client import DirectoryClient
from raykv.integrations.vllm.chunks.hints import Hint
from raykv.keys import Keys

log = logging.getLogger("raykv")

PAUSE_S = 0.5  # seconds before each call, as workers may still be storing, and holding, a finished request's chunks
CALLS = 5  # maximum number of calls for the same keys; a call is repeated if it reached fewer blocks than keys


class _Waiting(NamedTuple):
    due: float
    calls: int
    keys: Keys
    hint: Hint


class Outbox:
    """The hints that wait to be sent. The thread starts with the first hint."""

    def __init__(self, directory: DirectoryClient) -> None:
        self._directory = directory
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()  # by `due`
        self._thread: threading.Thread | None = None

    def put(self, keys: Keys, hint: Hint) -> None:
        """Send a hint for the keys after PAUSE_S. hint: determines which call is made."""
        self._queue.put(_Waiting(time.monotonic() + PAUSE_S, CALLS, keys, hint))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raykv-hints", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop sending after the hints that already wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while waiting := self._queue.get():
            time.sleep(max(0.0, waiting.due - time.monotonic()))
            try:
                count = self._send(waiting.keys, waiting.hint)
            except Exception:
                log.exception("a request's hint could not be sent to the pool")
                continue
            if count < len(waiting.keys) and waiting.calls > 1:
                self._queue.put(waiting._replace(due=time.monotonic() + PAUSE_S, calls=waiting.calls - 1))

    def _send(self, keys: Keys, hint: Hint) -> int:
        if hint.done:
            return self._directory.done(keys, hint.again)
        return self._directory.touch(keys, hint.keep_s)
