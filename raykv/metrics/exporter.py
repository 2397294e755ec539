"""Passes the figures of one process to Ray's metrics agent."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from raykv.metrics.metric import METRICS, PREFIX, SECONDS

EXPORT_S = 5.0  # interval between two exports; Ray forgets a gauge that was not set for 20 s
OBSERVED_MAX = 10_000  # maximum number of a histogram's values between two flushes
LABELS_MAX = 50  # maximum number of values of each kind in a process: users choose the values, and each costs storage
OTHER = "other"  # the tag's value once LABELS_MAX is reached

T = TypeVar("T")
Tags = tuple[tuple[str, str], ...]
Series = tuple[str, Tags]  # name, tags


class Exporter:
    """Collects figures until `flush`, since each call of Ray's metrics costs as much as a match. Thread-safe."""

    def __init__(self, pool: str) -> None:
        self._pool, self._node = pool, ""
        self._lock = threading.Lock()  # guards the fields below
        self._added: dict[Series, float] = defaultdict(float)
        self._set: dict[Series, float] = {}
        self._observed: dict[Series, list[float]] = {}
        self._totals: dict[Series, float] = {}  # by counter, the highest value that `total` was given
        self._labels: dict[str, set[str]] = {}  # different values so far, by kind
        self._metrics: dict[str, Any] = {}  # Ray's metrics; only the thread that flushes uses them

    def label(self, kind: str, value: str) -> str:
        """Return the value of a tag that users choose, or OTHER if its kind has too many different values."""
        known = self._labels.setdefault(kind, set())
        if value not in known:
            if len(known) >= LABELS_MAX:
                return OTHER
            known.add(value)
        return value

    def add(self, name: str, value: float, **tags: str) -> None:
        """Increase a counter."""
        self.add_each([((name, tuple(tags.items())), value)])

    def add_each(self, values: Iterable[tuple[Series, float]]) -> None:
        """Increase several counters at once."""
        with self._lock:
            for series, value in values:
                if value > 0:  # Ray refuses other values
                    self._added[series] += value

    def total(self, name: str, value: float, **tags: str) -> None:
        """Increase a counter by the growth of its total since the last call. Ignores a total that did not grow."""
        series = name, tuple(tags.items())
        with self._lock:
            new = value - self._totals.get(series, 0.0)
            if new > 0:
                self._totals[series] = value
                self._added[series] += new

    def set(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._set[name, tuple(tags.items())] = value

    def observe(self, name: str, value: float, **tags: str) -> None:
        """Add a value to its histogram."""
        with self._lock:
            values = self._observed.setdefault((name, tuple(tags.items())), [])
            if len(values) < OBSERVED_MAX:
                values.append(value)

    @property
    def waits(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._added or self._set or self._observed)

    def flush(self) -> None:
        """Pass the figures since the last flush to Ray. One thread of a process calls this.

        Raises Ray's first error. The next flush again passes figures that Ray did not accept.
        """
        with self._lock:
            added, self._added = self._added, defaultdict(float)
            gauges, self._set = self._set, {}
            observed, self._observed = self._observed, {}
        errors = [
            *self._hand_over(added, lambda metric, value, tags: metric.inc(value, tags)),
            *self._hand_over(gauges, lambda metric, value, tags: metric.set(value, tags)),
            *self._hand_over(observed, _observe_all),
        ]
        if errors:
            self._put_back(added, gauges, observed)
            raise errors[0]

    def _hand_over(self, figures: dict[Series, T], give: Callable[[Any, T, dict[str, str]], None]) -> list[Exception]:
        """Pass figures to Ray's metrics. Figures that Ray did not accept stay in the dict."""
        errors: list[Exception] = []
        for (name, tags), value in list(figures.items()):
            try:
                give(self._metric(name), value, self._tags(name, tags))
                del figures[name, tags]
            except Exception as error:
                errors.append(error)
        return errors

    def _put_back(
        self, added: dict[Series, float], gauges: dict[Series, float], observed: dict[Series, list[float]]
    ) -> None:
        with self._lock:
            for series, value in added.items():
                self._added[series] += value
            self._set = gauges | self._set
            for series, values in observed.items():
                self._observed[series] = [*values, *self._observed.get(series, ())][:OBSERVED_MAX]

    def forget(self, tag: str, value: str) -> None:
        """Forget totals with this tag. Call this when the totals will not be given any more."""
        with self._lock:
            self._totals = {series: total for series, total in self._totals.items() if (tag, value) not in series[1]}

    def _tags(self, name: str, tags: Tags) -> dict[str, str]:
        """Add the pool to tags, and this process's node if the metric has a node. Returns the tags as a dict."""
        return {"pool": self._pool, **({"node": self._node} if "node" in METRICS[name].tags else {}), **dict(tags)}

    def _metric(self, name: str) -> Any:
        if name not in self._metrics:
            from ray._private.worker import global_worker
            from ray.util import metrics

            # ray.get_runtime_context() would start a Ray cluster in a process that has just left its own
            self._node = self._node or global_worker.current_node_id.hex()
            kind, _, text, tags = METRICS[name]
            keys = ("pool", *tags)
            if kind == "histogram":
                made: Any = metrics.Histogram(PREFIX + name, text, boundaries=list(SECONDS), tag_keys=keys)
            else:
                made = {"counter": metrics.Counter, "gauge": metrics.Gauge}[kind](PREFIX + name, text, tag_keys=keys)
            self._metrics[name] = made
        return self._metrics[name]


def _observe_all(metric: Any, values: list[float], tags: dict[str, str]) -> None:
    while values:
        metric.observe(values[-1], tags)
        values.pop()
