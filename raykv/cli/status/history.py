"""What happened in a pool in the last minute: rates between one look and the next."""

from collections import deque
from collections.abc import Sequence

from raykv.cli.status.overview import Overview

LOOKS = 60  # that are kept: of a minute
BARS = "▁▂▃▄▅▆▇█"
Rates = deque[float | None]  # oldest first; None: not known


class History:
    """Of the latest LOOKS looks: the share of blocks asked for that were found, and blocks pulled and evicted a second.

    pulled_by: the last pulled a second, by node id, of nodes whose store answered twice.
    """

    def __init__(self) -> None:
        self.hit_rate: Rates = deque(maxlen=LOOKS)
        self.pulled: Rates = deque(maxlen=LOOKS)
        self.evicted: Rates = deque(maxlen=LOOKS)
        self.pulled_by: dict[str, float] = {}
        self._last: tuple[Overview, float] | None = None

    def add(self, overview: Overview, now: float) -> None:
        """now: seconds, of any monotonic clock."""
        if self._last is not None:
            before, then = self._last
            self._add_counts(before, overview, now - then)
            self.pulled_by = _pulled(before, overview, now - then)
            self.pulled.append(sum(self.pulled_by.values()) if self.pulled_by else None)
        self._last = overview, now

    def _add_counts(self, before: Overview, after: Overview, seconds: float) -> None:
        """Nothing is known of counts across two directories: each begins at 0."""
        old, new = before.counts, after.counts
        same = bool(old and new) and old["epoch"] == new["epoch"]
        asked = new["lookups"] - old["lookups"] if same else 0
        self.hit_rate.append((new["hits"] - old["hits"]) / asked if asked else None)
        self.evicted.append(max(0, new["evicted"] - old["evicted"]) / seconds if same else None)


def _pulled(before: Overview, after: Overview, seconds: float) -> dict[str, float]:
    """Blocks a second, by node id. A store that restarted counts from 0."""
    rates = {}
    for node_id, member in after.members.items():
        old = before.members[node_id].pulled if node_id in before.members else None
        if old is not None and member.pulled is not None:
            rates[node_id] = (member.pulled - old if member.pulled >= old else member.pulled) / seconds
    return rates


def sparkline(values: Sequence[float | None], width: int, top: float = 0.0) -> str:
    """The latest `width` values as bars, the newest on the right; a blank for None.

    top: the least value that has the highest bar.
    """
    shown = list(values)[-width:]
    highest = max([top, *(value for value in shown if value is not None)])
    scale = (len(BARS) - 1) / highest if highest else 0.0
    return "".join(" " if value is None else BARS[round(value * scale)] for value in shown).rjust(width)
