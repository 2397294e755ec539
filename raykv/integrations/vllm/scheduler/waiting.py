"""How long a request waits for chunks that another engine computes, and when it asks again."""

from __future__ import annotations

import time
from typing import Any

PATIENCE = 1.5  # default wait, as a multiple of this engine's computing time: the other engine has a lead
MOST = 1e6  # maximum `patience`; a dead engine is noticed long before
UNMEASURED = 1000.0  # assumed tokens per second before a measurement; low, as waiting is better than computing twice
ASKS = 64  # approximate number of questions in this engine's computing time; each costs the directory about 0.1 ms
PAUSES_S = (0.005, 0.1)  # first and longest pause between two questions for chunks that other engines compute
GROWTH = 1.25  # factor between two pauses; the first pauses are short, as the chunks may already be being written


class Wait:
    """A wait that begins now, and ends even if no chunk arrives."""

    def __init__(self, compute_s: float, patience: float) -> None:
        """compute_s: seconds that this engine would take to compute the chunks.

        patience: duration of the wait, as a multiple of compute_s.
        """
        self._pause, self._longest = PAUSES_S[0], min(max(compute_s / ASKS, PAUSES_S[0]), PAUSES_S[1])
        self._end = time.monotonic() + patience * compute_s
        self._next = time.monotonic() + self._pause

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def is_due(self) -> bool:
        """Whether to ask again now. If so, the next pause begins."""
        now = time.monotonic()
        if now < min(self._next, self._end):
            return False
        self._pause = min(GROWTH * self._pause, self._longest)
        self._next = now + self._pause
        return True


def patience_of(extra_config: dict[str, Any]) -> float:
    """Return `patience` of the configuration, or PATIENCE. Raises ValueError unless it is a number from 0 to MOST."""
    given = extra_config.get("patience", PATIENCE)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= MOST:
        raise ValueError(
            f"kv_connector_extra_config has patience={given!r}: give how many times as long as computing a prefix a "
            f"request waits for an engine that computes it, such as {PATIENCE}; 0: it never waits; {MOST:.0f}: the most"
        )
    return float(given)
