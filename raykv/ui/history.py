"""A pool's history since its page was first served: sums that never decrease, and events."""

import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from raykv.ui.changes import Event, changes
from raykv.ui.overview import Overview, fault_text, hit_sources

SAMPLES = 1500  # maximum number of samples
EVENTS = 500
COUNTED = ("stored", "evicted", "refused")
Sums = dict[str, float]


class History:
    """Samples of counts, and the latest EVENTS events. Older samples are further apart. Thread-safe.

    A sample is a time and the sums up to this time. The difference of two samples is what was counted between them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._samples: list[tuple[float, Sums]] = []
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._sums: Counter[str] = Counter()
        self._counted: dict[tuple[str, str], int] = {}  # latest count by (counter's owner, what it counts)
        self._latest: Overview | None = None
        self._epoch: int | None = None  # epoch of the last directory that answered

    def add(self, overview: Overview, now: float) -> None:
        """Add a look. now: Unix time, in seconds."""
        with self._lock:
            for who, what, count in _counts(overview):
                before = self._counted.get((who, what), 0)
                # A restarted store counts from 0. A new directory continues from counts that are a few seconds old.
                new = count - before if count >= before else 0 if who == "directory" else count
                self._counted[who, what] = count
                self._sums[what] += new
            known, self._epoch = self._epoch, overview.counts.get("epoch", self._epoch)
            took_over = known is not None and self._epoch is not None and self._epoch > known
            self._events.extend(changes(self._latest, overview, took_over, now))
            self._samples.append((now, dict(self._sums)))
            if len(self._samples) > SAMPLES:
                self._samples = [*self._samples[: SAMPLES // 2 : 2], *self._samples[SAMPLES // 2 :]]
            self._latest = overview

    def since(self, after: float) -> dict[str, Any]:
        """Return samples and events later than `after` (Unix time), for JSON. now: `for_page` of the latest `Overview`.

        samples: lists of equal length: `t` and each sum, which is None before its first count. events: see `Event`.
        faults: text for each sum that counts faults.
        """
        with self._lock:
            samples = [sample for sample in self._samples if sample[0] > after]
            names = sorted(self._sums)
            return {
                "now": None if self._latest is None else self._latest.for_page(),
                "seen": self._samples[-1][0] if self._samples else None,
                "samples": {
                    "t": [round(at, 3) for at, _ in samples],
                    **{name: [sums.get(name) for _, sums in samples] for name in names},
                },
                "faults": {name: fault_text(name[6:]) for name in names if name.startswith("fault:")},
                "events": [event._asdict() for event in self._events if event.t > after],
            }


def _counts(overview: Overview) -> Iterator[tuple[str, str, int]]:
    """Yield (counter's owner, what it counts, count) for all counts that are known now."""
    if counts := overview.counts:
        yield "directory", "asked", counts["lookups"]
        yield "directory", "fault:corrupt", counts["corrupt"]
        yield from (("directory", name, counts[name]) for name in COUNTED)
        yield from (("directory", f"hit:{source}", count) for source, count in hit_sources(counts).items())
    for node_id, member in overview.members.items():
        yield from ((node_id, f"fault:{kind}", count) for kind, count in member.faults.items())
    for route in overview.transports:
        who = f"{route['reader']} from {route['from']}"
        yield from ((f"{who} by {name}", f"bytes:{name}", count) for name, count in route["bytes"].items())
        yield from ((f"{who} by {name}", f"fault:transport_{name}", count) for name, count in route["failed"].items())
