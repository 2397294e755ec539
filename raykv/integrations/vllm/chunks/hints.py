"""Hints of requests about their chunks: whether the chunks will be needed again, and how long to keep them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from raykv.config import KEEP_MOST_S
from raykv.integrations.vllm.chunks.tail import LOAD_LIMIT

log = logging.getLogger("raykv")

SESSION, DONE, KEEP = "raykv_session", "raykv_done", "raykv_keep_s"  # keys in a request's kv_transfer_params
ENVELOPE = "kv_hint"  # key in kv_transfer_params for an envelope, which Dynamo's router writes for vLLM before 0.31
AGAIN = "again"
ACTIONS: dict[str, bool | str] = {"kv.deref@1.0": True, "kv.demote@1.0": AGAIN}  # actions, as values of `DONE`
SESSIONS = 10_000  # maximum number of sessions that are remembered
NAME_CHARS = 256


class Hint(NamedTuple):
    """A request's hint. session: the session's name. done: no request will need the chunks soon after this request.

    again: a request will need the chunks later; set only together with `done`. keep_s: seconds for which chunks are
    kept after the request; 0: as long as other chunks. limited: whether the request limits how many tokens it loads.
    """

    session: str | None = None
    done: bool = False
    again: bool = False
    keep_s: float = 0.0
    limited: bool = False


NO_HINT = Hint()


def hint_of(params: Mapping[str, Any] | None, session: Any = None, envelope: Any = None) -> Hint:
    """Return the hint in a request's kv_transfer_params. An invalid hint is ignored, and the log says why.

    session: vLLM's name of the session, used if a request has no `SESSION`. envelope: vLLM's KvHintsEnvelope (see
    vllm/v1/kv_hints/protocol.py), used if a request has no `DONE`.
    """
    params = params or {}
    name, done, keep_s = params.get(SESSION), params.get(DONE, False), params.get(KEEP, 0)
    named = name is None or (isinstance(name, str) and len(name) <= NAME_CHARS)
    timed = isinstance(keep_s, int | float) and not isinstance(keep_s, bool) and 0 <= keep_s <= KEEP_MOST_S
    if not named or not timed or not (isinstance(done, bool) or (isinstance(done, str) and done == AGAIN)):
        _warn(*(f"{given!r:.80}" for given in (name, done, keep_s)))
        return NO_HINT
    if DONE not in params:
        names = {given for given in (name, session) if isinstance(given, str)}
        done = _done_by(params.get(ENVELOPE) if envelope is None else envelope, names)
    if name is None and isinstance(session, str) and len(session) <= NAME_CHARS:
        name = session
    return Hint(name, bool(done), done == AGAIN, float(keep_s), LOAD_LIMIT in params)


def _done_by(envelope: Any, names: set[str]) -> bool | str:
    """Return the hint in an envelope, as a value of `DONE`. Actions that raykv does not know are ignored.

    names: names of the request's session. Actions for other sessions are ignored too, as their keys are unknown here.
    """
    actions = _part(envelope, "actions")
    for action in actions if isinstance(actions, list) else ():
        told = ACTIONS.get(f"{_part(action, 'action_type')}@{_part(action, 'action_version')}", False)
        payload = _part(action, "payload")
        session = _part(payload, "session_id")
        of_request = session is None or (isinstance(session, str) and session in names)
        if told and (payload is None or isinstance(payload, Mapping)) and of_request:
            return told
    return False


def _part(of: Any, name: str) -> Any:
    """Return a field of one of vLLM's structures, or of its JSON form."""
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


@functools.lru_cache(SESSIONS)  # warns only once of each invalid hint
def _warn(session: str, done: str, keep_s: str) -> None:
    log.warning(
        "%s=%s, %s=%s, %s=%s: give a string of at most %d characters; true, false or %r; seconds from 0 to %d",
        *(SESSION, session, DONE, done, KEEP, keep_s, NAME_CHARS, AGAIN, KEEP_MOST_S),
    )


class Sessions:
    """Each session's first own token. Earlier tokens were cached when the session's first request asked the pool."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str | None, str | None], int] = {}

    def begin(self, hint: Hint, salt: str | None, found: int) -> None:
        """Note that a request has asked the pool. Only the first request of a session counts.

        found: number of leading tokens that the engine's own cache or the pool had.
        """
        if hint.session is not None:
            start = self._starts.pop((hint.session, salt), found)
            if len(self._starts) >= SESSIONS:
                del self._starts[next(iter(self._starts))]
            self._starts[hint.session, salt] = start

    def hinted(self, hint: Hint, salt: str | None, found: int | None) -> int | None:
        """Return the first token that a finished request's hint is about, or None without a hint.

        found: number of tokens that the request found; None if it looked up nothing. Forgets a session that is over.
        """
        if not hint.done:
            return 0 if hint.keep_s else None
        name = hint.session, salt
        start = self._starts.get(name) if hint.again else self._starts.pop(name, None)
        return found if start is None else start
