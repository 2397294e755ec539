"""A pool's history since its page was first served: sums that never fall, and events."""

import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from raykv.ui.changes import Event, changes
from raykv.ui.sight import Sight

SAMPLES = 1500  # to keep
EVENTS = 500
COUNTED = ("stored", "evicted", "refused")
Sums = dict[str, float]


class History:
    """Samples of counts, and the latest EVENTS events. Older samples are further apart. Thread-safe.

    A sample is a time and the sums until then. The difference of two samples' sums is the count between them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._samples: list[tuple[float, Sums]] = []
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._sums: Counter[str] = Counter()
        self._counted: dict[tuple[str, str], int] = {}  # latest count by (counter's owner, what it counts)
        self._latest: Sight | None = None

    def add(self, sight: Sight, now: float) -> None:
        """Add a look. now: Unix time, in seconds."""
        with self._lock:
            for who, what, count in _counts(sight):
                before = self._counted.get((who, what), 0)
                # A restarted store counts from 0. A new directory goes on from counts of a few seconds before.
                new = count - before if count >= before else 0 if who == "directory" else count
                self._counted[who, what] = count
                self._sums[what] += new
            if sight.epoch is None and self._latest is not None:  # keep the epoch of the last directory that answered
                sight = replace(sight, epoch=self._latest.epoch)
            self._events.extend(changes(self._latest, sight, now))
            self._samples.append((now, dict(self._sums)))
            if len(self._samples) > SAMPLES:
                self._samples = [*self._samples[: SAMPLES // 2 : 2], *self._samples[SAMPLES // 2 :]]
            self._latest = sight

    def since(self, after: float) -> dict[str, Any]:
        """For JSON: the latest Sight as `now`, and samples and events later than `after` (Unix time).

        samples: lists of one length: `t`, and each sum, with None before its first count.
        """
        with self._lock:
            samples = [sample for sample in self._samples if sample[0] > after]
            names = sorted(self._sums)
            return {
                "now": None if self._latest is None else asdict(self._latest),
                "seen": self._samples[-1][0] if self._samples else None,
                "samples": {
                    "t": [round(at, 3) for at, _ in samples],
                    **{name: [sums.get(name) for _, sums in samples] for name in names},
                },
                "events": [event._asdict() for event in self._events if event.t > after],
            }


def _counts(sight: Sight) -> Iterator[tuple[str, str, int]]:
    """(counter's owner, what it counts, count). Leaves out counts that are not known now."""
    if sight.counts:
        yield "directory", "asked", sight.counts["lookups"]
        yield "directory", "fault:corrupt", sight.counts["corrupt"]
        yield from (("directory", name, sight.counts[name]) for name in COUNTED)
        yield from (("directory", f"hit:{source}", count) for source, count in sight.hits.items())
    for node in sight.nodes:
        yield from ((node.id, f"fault:{kind}", count) for kind, count in node.faults.items())
    for route in sight.routes:
        who = f"{route.reader} from {route.source}"
        yield from ((f"{who} by {name}", f"bytes:{name}", count) for name, count in route.bytes.items())
        yield from ((f"{who} by {name}", f"fault:transport_{name}", count) for name, count in route.failed.items())
