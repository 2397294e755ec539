"""Sends hints of requests to the pool. A thread waits until workers have had time to store the requests' chunks."""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import NamedTuple

from raykv.client.directory_client import DirectoryClient
from raykv.integrations.vllm.chunks.hints import SESSIONS, Hint
from raykv.keys import Keys

log = logging.getLogger("raykv")

PAUSE_S = 0.5  # seconds before each call, as workers may still be storing, and holding, a finished request's chunks
CALLS = 5  # maximum number of calls for the same keys; a call is repeated if it reached fewer blocks than keys


class _Waiting(NamedTuple):
    """number: how many hints came before."""

    due: float
    calls: int
    number: int
    keys: Keys
    hint: Hint
    salt: str | None


class Outbox:
    """The hints that wait to be sent. The thread starts with the first hint."""

    def __init__(self, directory: DirectoryClient) -> None:
        self._directory = directory
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()  # by `due`
        self._thread: threading.Thread | None = None
        self._count = 0  # of all hints
        self._gone_on: dict[tuple[str, str | None], int] = {}  # by session and salt: number of hints until it went on

    def put(self, keys: Keys, hint: Hint, salt: str | None = None) -> None:
        """Send a hint for the keys after PAUSE_S. hint: determines which call is made."""
        self._count += 1
        self._queue.put(_Waiting(time.monotonic() + PAUSE_S, CALLS, self._count, keys, hint, salt))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raykv-hints", daemon=True)
            self._thread.start()

    def go_on(self, hint: Hint, salt: str | None) -> None:
        """A session has a new request, which uses its chunks again. Do not send the session's earlier hints."""
        if hint.session is not None and self._count:
            self._gone_on.pop((hint.session, salt), None)
            self._gone_on[hint.session, salt] = self._count
            if len(self._gone_on) > SESSIONS:
                del self._gone_on[next(iter(self._gone_on))]

    def close(self) -> None:
        """Stop sending after the hints that already wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while waiting := self._queue.get():
            time.sleep(max(0.0, waiting.due - time.monotonic()))
            if waiting.number <= self._gone_on.get((waiting.hint.session or "", waiting.salt), 0):
                continue
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
