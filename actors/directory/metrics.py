"""The directory's metrics for Ray's agent, and the totals that outlive a directory."""

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept
from raykv.directory.directory import Directory
from raykv.line.periodic import Periodic
from raykv.metrics.exporter import EXPORT_S, Exporter
from raykv.metrics.metric import CALL_SECONDS
from raykv.metrics.tick_clock import TickClock
from raykv.protocol.calls import CALLS

log = logging.getLogger("raykv")
TOTALS = {  # name of a metric -> name in Directory.totals
    "lookup_blocks_total": "lookups",
    "stored_blocks_total": "stored",
    "refused_blocks_total": "refused",
    "corrupt_blocks_total": "corrupt",
    "evicted_blocks_total": "evicted",
    "done_blocks_total": "done",
    "kept_blocks_total": "kept",
    "preempted_requests_total": "num_cumulative_preemption",
}
GAUGES = {
    "blocks": "keys",
    "leases": "leases",
    "reservations": "reservations",
    "clients": "clients",
    "pinned_blocks": "pinned",
}
MEMORY_EVERY = 2  # slots are counted at every second export, as counting looks at every slot
STEP_SLOTS = 16_384  # slots counted in one step, which takes less than a millisecond
STEP_S = 0.0005  # seconds between two steps of counting a node's slots, so that calls are answered in between
FOLDED = 1024  # number of call times that are added to their buckets together
TIMED_EVERY = 8  # only every eighth call of a frequent method is timed, as timing costs more than counting
SLOT_STATES = ("free", "writing", "ready", "replica", "staging", "quarantined", "dropped", "demoting")


def timed_every(method: str) -> int:
    """Return n if every n-th call of a method is timed."""
    return TIMED_EVERY if CALLS[method].frequent else 1


class DirectoryMetrics:
    """Exports a directory's figures every EXPORT_S, once the directory is in charge.

    calls: number of calls by method; the directory's lock guards this dict.
    """

    def __init__(self, pool: str, name: str) -> None:
        """name: name of the directory's actor."""
        self._name = name
        self._pool, self._exporter, self._clock = pool, Exporter(pool), TickClock()
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._times: dict[str, list[float]] = {}  # by method: seconds of calls that are not in _sums yet
        # By method: number of calls in each bucket of CALL_SECONDS, number of longer calls, and seconds of all calls.
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._kept: dict[str, int] = {}
        self._steps, self._started = 0, time.time()

    def called(self, method: str, seconds: float) -> None:
        """Record how long a call took. The caller must hold the directory's lock. Takes a tenth of a microsecond."""
        try:
            times = self._times[method]
        except KeyError:
            times = self._times[method] = []
        times.append(seconds)
        if len(times) == FOLDED:
            self._fold(method)

    def _fold(self, method: str) -> None:
        """Add the times of a method to their buckets. The caller must hold the lock."""
        sums, every = self._sums.setdefault(method, np.zeros(len(CALL_SECONDS) + 2)), timed_every(method)
        times = np.array(self._times[method])
        self._times[method].clear()
        sums[:-1] += every * np.bincount(np.searchsorted(CALL_SECONDS, times), minlength=len(CALL_SECONDS) + 1)
        sums[-1] += every * times.sum()

    def saved(self) -> dict[str, int]:
        """Return the totals of earlier directories."""
        self._kept = json.loads(internal_kv.get(self._pool, Kept.TOTALS) or b"{}")
        return self._kept

    def attach(self, directory: Directory, lock: threading.Lock) -> None:
        """Export this directory's figures. lock: guards the directory; released between two steps of counting slots."""
        self._directory, self._lock = directory, lock

    def start(self) -> None:
        """Start exporting every EXPORT_S."""
        self._loop = Periodic("raykv-metrics", self._step, self._on_error)
        self._loop.start()

    def _step(self) -> float:
        self.export()
        return self._loop.rest_of(EXPORT_S)

    def export(self) -> None:
        """Give the figures to Ray's agent."""
        self._pool_figures()
        self._steps += 1
        for name in self._names() if self._steps % MEMORY_EVERY == 1 else ():
            self._memory_figures(name)
        self._exporter.flush()

    def _on_error(self, error: Exception) -> float:
        log.warning("pool %s: the directory's metrics: %r", self._pool, error)
        return EXPORT_S

    def _names(self) -> list[str]:
        with self._lock:
            return list(self._directory.nodes)

    def _pool_figures(self) -> None:
        export, now = self._exporter, time.monotonic()
        with self._lock:
            directory = self._directory
            totals, gauges, tiers = directory.totals(), directory.gauges(), directory.tier_catalog.fill()
            oldest, tenants, curve = directory.oldest_lease(), directory.quotas.stats(), directory.hit_curve.figures()
            for method in self._times:
                self._fold(method)
            calls, times = dict(self.calls), {method: sums.copy() for method, sums in self._sums.items()}
            self._clock.sample(directory.tick, now)
        self._keep(totals)
        for metric, name in TOTALS.items():
            export.total(metric, totals[name])
        for source, hits in _by_source(totals).items():
            export.total("hit_blocks_total", hits, source=source)
        for multiple, rate in curve.items():
            export.set("hit_rate_by_memory", rate, times=multiple)
        for metric, name in GAUGES.items():
            export.set(metric, gauges[name])
        export.set("oldest_lease_seconds", max(0.0, now - oldest))
        export.set("start_time_seconds", self._started, role="directory")
        export.set("directory_epoch", directory.epoch)
        export.total("directory_cpu_seconds_total", time.process_time())
        for method, count in calls.items():
            export.total("directory_calls_total", count, method=method)
        for method, sums in times.items():
            export.total("directory_call_seconds_total", sums[-1], method=method)
            for bound, count in zip((*CALL_SECONDS, "+Inf"), np.cumsum(sums[:-1]).tolist(), strict=True):
                export.set("directory_call_seconds_bucket", count, method=method, le=str(bound))
        for tenant, quota in tenants.items():
            export.set("tenant_used_bytes", quota["used"], tenant=tenant)
            export.set("tenant_minimum_bytes", quota["minimum_bytes"], tenant=tenant)
            export.set("tenant_maximum_bytes", quota["maximum_bytes"], tenant=tenant)
            export.total("tenant_evicted_blocks_total", quota["evicted"], tenant=tenant)
        for node, tier in tiers.items():
            self._tier_figures(node or "shared", tier)

    def _last(self, steps: Iterator[dict[str, Any] | None]) -> dict[str, Any] | None:
        """Return the last value of `steps`. The lock is held during each step, and released between steps."""
        found = None
        while found is None:
            with self._lock:
                try:
                    found = next(steps)
                except StopIteration:
                    return None
            time.sleep(STEP_S)
        return found

    def _keep(self, totals: dict[str, int]) -> None:
        """Save the totals for the next directory if they have changed and this directory is in charge."""
        if totals != self._kept and internal_kv.in_charge(self._pool).name == self._name:
            internal_kv.put(self._pool, Kept.TOTALS, json.dumps(totals).encode())
            self._kept = totals

    def _tier_figures(self, node: str, tier: dict[str, Any]) -> None:
        export = self._exporter
        export.set("external_capacity_bytes", tier["capacity"], node=node)
        export.set("external_used_bytes", tier["bytes_used"], node=node)
        export.set("external_blocks", tier["blocks"], node=node)
        export.set("external_up", float(tier["state"] == "up"), node=node)
        export.total("demoted_blocks_total", tier["demoted"], node=node)

    def _memory_figures(self, name: str) -> None:
        with self._lock:
            node, now = self._directory.nodes.get(name), time.monotonic()
            steps = self._directory.allocator.stats_in_steps(node, now, STEP_SLOTS) if node else iter(())
            coldest = self._directory.coldest(name)
        stats = self._last(steps)
        if stats is None:
            return
        host, _, gpu = name.partition("/")
        export, tags = self._exporter, {"node": host, "tier": f"gpu {gpu[:12]}" if gpu else "cpu"}
        export.set("memory_capacity_bytes", (stats["slabs"] + stats["spare_slabs"]) * stats["slab_bytes"], **tags)
        export.set("memory_used_bytes", stats["bytes_used"], **tags)
        export.set("memory_alive", float(stats["state"] == "alive"), **tags)
        for state in SLOT_STATES:
            export.set("memory_blocks", stats[state], **tags, state=state)
        if coldest >= 0:
            export.set("coldest_block_age_seconds", self._clock.age(coldest), **tags)


def _by_source(totals: dict[str, int]) -> dict[str, int]:
    """Return the number of hits for each place where blocks are found: "gpu", "node", "external" and "memory".

    A block that a reader on a GPU finds in the memory of its own node counts as "memory".
    """
    elsewhere = {"gpu": "gpu_hits", "node": "remote_hits", "external": "external_hits"}
    found = {source: totals[name] for source, name in elsewhere.items()}
    return {**found, "memory": totals["hits"] - sum(found.values())}
