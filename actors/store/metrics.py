"""Exports a node store's metrics to Ray's agent."""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raykv import cluster
from raykv.actors.store.dashboard_keeper import DashboardKeeper
from raykv.actors.store.demoter import Demoter
from raykv.actors.store.node_memory import NodeMemory
from raykv.line.periodic import Periodic
from raykv.metrics.exporter import EXPORT_S, Exporter
from raykv.protocol.location import host_of

LOOK_S = 60.0  # time between two questions to Ray about which nodes are alive
log = logging.getLogger("raykv")


class StoreMetrics:
    """Exports a store's metrics every EXPORT_S. The head node's store also keeps the Grafana dashboard in place."""

    def __init__(self, pool: str, memories: Sequence[NodeMemory], demoter: Demoter | None) -> None:
        self._pool, self._memories, self._demoter = pool, memories, demoter
        self._exporter, self._started = Exporter(pool), time.time()
        self._look_at = 0.0
        self._dashboard = DashboardKeeper()
        self._loop = Periodic("raykv-metrics", self._step, self._on_error)
        self._loop.start()

    def stop(self) -> None:
        """Stop exporting metrics."""
        self._loop.stop()

    def _step(self) -> float:
        self._dashboard.look()
        export = self._exporter
        export.set("start_time_seconds", self._started, role="store")
        export.total("altered_blocks_total", sum(memory.arena.corrupt for memory in self._memories))
        for kind, count in (dict(self._demoter.external.faults) if self._demoter else {}).items():
            export.total("external_faults_total", count, kind=kind)
        for (peer, transport), (size, seconds, failures) in self._routes().items():
            tags = {"from": peer, "transport": transport}
            export.total("pulled_bytes_total", size, **tags)
            export.total("pull_seconds_total", seconds, **tags)
            export.total("pull_failures_total", failures, **tags)
        export.flush()
        self._forget_gone()
        return self._loop.rest_of(EXPORT_S)

    def _forget_gone(self) -> None:
        """Stop exporting metrics of nodes that have left, and close connections to these nodes."""
        if time.monotonic() < self._look_at or not self._routes():
            return
        self._look_at = time.monotonic() + LOOK_S
        living = cluster.living()
        for memory in self._memories:
            for node_id in memory.transports.forget_others(living):
                self._exporter.forget("from", node_id)

    def _routes(self) -> dict[tuple[str, str], NDArray[np.float64]]:
        """Sum bytes, seconds and failures over all memories of this node, by peer and transport."""
        sums: dict[tuple[str, str], NDArray[np.float64]] = defaultdict(lambda: np.zeros(3))
        for memory in self._memories:
            for peer, transport, route in memory.transports.routes():
                sums[host_of(peer), transport] += (route.bytes, route.seconds, route.failures)
        return sums

    def _on_error(self, error: Exception) -> float:
        log.warning("pool %s: the store's metrics: %r", self._pool, error)
        return EXPORT_S
