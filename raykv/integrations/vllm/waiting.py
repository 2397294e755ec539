"""How long a request waits for chunks that another engine computes, and when it asks for them again."""

from __future__ import annotations

import time

PATIENCE = 1.5  # times as long as this engine would compute them: whoever computes them began before
UNMEASURED = 1000.0  # tokens a second: who has computed nothing yet waits too long rather than compute the same
ASKS = 64  # while that takes, beside a few more at its begin; each costs the directory about 0.1 ms
PAUSES_S = (0.005, 0.1)  # between two of them: the first, and the longest
GROWTH = 1.25  # of a pause to the next: what is written already is there soon


class Wait:
    """From now on, for what this engine would compute in some time. It ends whether the chunks come or not."""

    def __init__(self, compute_s: float) -> None:
        """compute_s: seconds that this engine takes to compute what others do."""
        self._pause, self._longest = PAUSES_S[0], min(max(compute_s / ASKS, PAUSES_S[0]), PAUSES_S[1])
        self._end = time.monotonic() + PATIENCE * compute_s
        self._next = time.monotonic() + self._pause

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def is_due(self) -> bool:
        """Whether to ask again now; if so, not before the next pause is over."""
        now = time.monotonic()
        if now < min(self._next, self._end):
            return False
        self._pause = min(GROWTH * self._pause, self._longest)
        self._next = now + self._pause
        return True
