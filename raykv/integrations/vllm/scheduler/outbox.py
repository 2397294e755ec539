"""Sends hints of requests to the pool. A thread waits until workers have had time to store the requests' chunks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from queue import SimpleQueue
from typing import NamedTuple

from raykv.client.directory_client import DirectoryClient
from raykv.integrations.vllm.chunks.hints import SESSIONS, Hint
from raykv.keys import Keys

log = logging.getLogger("raykv")

PAUSE_S = 0.5  # seconds before each call, as workers may still be storing, and holding, a finished request's chunks
# A call that missed blocks is repeated. Maximum number of calls for a hint with a session, and for any other hint
CALLS, CALLS_NAMELESS = 5, 2


class _Waiting(NamedTuple):
    """Keys of a hint that waits to be sent. number: number of the hint. calls: number of calls so far."""

    due: float
    number: int
    keys: Keys
    hint: Hint
    salt: str | None
    calls: int = 0


class _Session(NamedTuple):
    """A session. said: number of its last hint. asked: number of the newest hint when it last looked up chunks."""

    said: int = 0
    asked: int = 0


class Outbox:
    """The hints that wait to be sent. The thread starts with the first hint."""

    def __init__(self, directory: DirectoryClient) -> None:
        self._directory = directory
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()  # ordered by `due`
        self._thread: threading.Thread | None = None
        self._number = 0  # number of the last hint
        self._sessions: dict[tuple[str | None, str | None], _Session] = {}  # by session and salt

    def put(self, parts: Iterable[Keys], hint: Hint, salt: str | None = None) -> None:
        """Send a request's hint after PAUSE_S. hint: determines which call is made."""
        self._number += 1
        self._set(hint, salt, said=self._number)
        for keys in parts:
            self._queue.put(_Waiting(time.monotonic() + PAUSE_S, self._number, keys, hint, salt))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raykv-hints", daemon=True)
            self._thread.start()

    def asked(self, hint: Hint, salt: str | None) -> None:
        """Note that a session looks up chunks again. Its earlier hints with `done` are not sent any more."""
        if self._number:
            self._set(hint, salt, asked=self._number)

    def close(self) -> None:
        """Stop sending after the hints that already wait."""
        self._queue.put(None)

    def _set(self, hint: Hint, salt: str | None, **numbers: int) -> None:
        if hint.session is not None:
            session = self._sessions.pop((hint.session, salt), _Session())
            self._sessions[hint.session, salt] = session._replace(**numbers)
            if len(self._sessions) > SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def _run(self) -> None:
        while waiting := self._queue.get():
            time.sleep(max(0.0, waiting.due - time.monotonic()))
            if self._is_void(waiting):
                continue
            try:
                count = self._send(waiting.keys, waiting.hint)
            except Exception:
                log.exception("a request's hint could not be sent to the pool")
                continue
            calls = waiting.calls + 1
            if count < len(waiting.keys) and calls < (CALLS_NAMELESS if waiting.hint.session is None else CALLS):
                self._queue.put(waiting._replace(due=time.monotonic() + PAUSE_S, calls=calls))

    def _is_void(self, waiting: _Waiting) -> bool:
        """Whether to drop a call.

        A repeat is dropped if the session has a newer hint or look-up. A call for a hint with `done` is dropped if the
        session has a newer look-up.
        """
        session = self._sessions.get((waiting.hint.session, waiting.salt), _Session())
        is_repeat = waiting.calls > 0
        return (is_repeat and waiting.number < session.said) or (
            (is_repeat or waiting.hint.done) and waiting.number <= session.asked
        )

    def _send(self, keys: Keys, hint: Hint) -> int:
        if hint.done:
            return self._directory.done(keys, hint.again)
        return self._directory.touch(keys, hint.keep_s)
