"""What requests say of their sessions: which of their chunks are asked for no more, or later than others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

log = logging.getLogger("raykv")

SESSION, DONE = "raykv_session", "raykv_done"  # keys in a request's kv_transfer_params
AGAIN = "again"
SESSIONS = 10_000  # known at a time


class Hint(NamedTuple):
    """session: its name. done: after this request nobody asks for its chunks soon; again: but later."""

    session: str | None = None
    done: bool = False
    again: bool = False


NO_HINT = Hint()


def hint_of(params: Mapping[str, Any] | None) -> Hint:
    """Of a request's kv_transfer_params. A bad hint is none: the request goes on, and the log says why."""
    session, done = (params or {}).get(SESSION), (params or {}).get(DONE, False)
    if not isinstance(session, str | None) or (done not in (True, False, AGAIN)):
        log.warning("%s=%r, %s=%r: give a string, and true, false or %r", SESSION, session, DONE, done, AGAIN)
        return NO_HINT
    return Hint(session, bool(done), done == AGAIN)


class Sessions:
    """From which token on each session's chunks are its own: its first request here did not find them."""

    def __init__(self) -> None:
        self._starts: dict[str, int] = {}

    def start(self, hint: Hint, found: int) -> int:
        """For a request that found so many tokens."""
        if hint.session is None:
            return found
        if len(self._starts) >= SESSIONS and hint.session not in self._starts:
            del self._starts[next(iter(self._starts))]
        return self._starts.setdefault(hint.session, found)

    def end(self, hint: Hint) -> None:
        """The session is over if the hint says so."""
        if hint.session is not None and hint.done and not hint.again:
            self._starts.pop(hint.session, None)
