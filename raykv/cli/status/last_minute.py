"""A pool's rates in the last minute, computed from the differences between successive looks at the pool."""

from collections import deque
from collections.abc import Sequence

from raykv.ui.overview import Overview

LOOKS = 60  # number of looks to keep, at one look per second
BARS = "▁▂▃▄▅▆▇█"
Rates = deque[float | None]  # oldest first; None if unknown


class LastMinute:
    """Rates between the latest LOOKS looks. hit_rate: share of the requested blocks that were found.

    pulled, evicted: blocks per second. pulled_by: `pulled` by node id, for nodes whose store answered the last two
    looks.
    """

    def __init__(self) -> None:
        self.hit_rate: Rates = deque(maxlen=LOOKS)
        self.pulled: Rates = deque(maxlen=LOOKS)
        self.evicted: Rates = deque(maxlen=LOOKS)
        self.pulled_by: dict[str, float] = {}
        self._last: tuple[Overview, float] | None = None

    def add(self, overview: Overview, now: float) -> None:
        """Add a look. now: seconds of any monotonic clock."""
        if self._last is not None:
            before, then = self._last
            self._add_counts(before, overview, now - then)
            self.pulled_by = _pulled(before, overview, now - then)
            self.pulled.append(sum(self.pulled_by.values()) if self.pulled_by else None)
        self._last = overview, now

    def _add_counts(self, before: Overview, after: Overview, seconds: float) -> None:
        """Add the rates between two looks; None if a new directory took charge, since it starts from older counts."""
        old, new = before.counts, after.counts
        same = bool(old and new) and old["epoch"] == new["epoch"]
        asked = new["lookups"] - old["lookups"] if same else 0
        self.hit_rate.append((new["hits"] - old["hits"]) / asked if asked else None)
        self.evicted.append(max(0, new["evicted"] - old["evicted"]) / seconds if same else None)


def _pulled(before: Overview, after: Overview, seconds: float) -> dict[str, float]:
    """Pulled blocks per second, by node id. The counts of a restarted store start from 0."""
    rates = {}
    for node_id, member in after.members.items():
        old = before.members[node_id].pulled if node_id in before.members else None
        if old is not None and member.pulled is not None:
            rates[node_id] = (member.pulled - old if member.pulled >= old else member.pulled) / seconds
    return rates


def sparkline(values: Sequence[float | None], width: int, top: float = 0.0) -> str:
    """Draw the latest `width` values as bars, the newest on the right. A None is drawn as a blank.

    top: a bar of full height stands for at least this value, so small values have low bars.
    """
    shown = list(values)[-width:]
    highest = max([top, *(value for value in shown if value is not None)])
    scale = (len(BARS) - 1) / highest if highest else 0.0
    return "".join(" " if value is None else BARS[round(value * scale)] for value in shown).rjust(width)
