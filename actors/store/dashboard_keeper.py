"""Keeps the Grafana dashboard in the folder from which Ray provisions Grafana. Ray empties this folder at its start."""

import logging
import time

import ray

from raykv import cluster
from raykv.metrics import dashboard_files

log = logging.getLogger("raykv")
LOOK_S = 60.0  # time between two checks whether the dashboard's files exist


class DashboardKeeper:
    """On Ray's head node, writes the dashboard's files at the first look, and again when files are missing."""

    def __init__(self) -> None:
        self._due = 0.0  # time.monotonic() of the next look
        self._on_head: bool | None = None  # None until known; it never changes afterwards
        self._written = False

    def look(self) -> None:
        """Write missing files, at most once a minute. An error is logged, and the next look tries again."""
        if self._on_head is False or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_S
        try:
            self._on_head = self._on_head or _on_head()
            there = dashboard_files.provisioned()
            missing = not all((there / name).exists() for name in dashboard_files.NAMES)
            if self._on_head and there.is_dir() and (missing or not self._written):
                dashboard_files.write(there)
                self._written = True
        except Exception as error:  # Ray failed, or the folder belongs to another user
            log.info("the Grafana dashboard could not be written: %r", error)


def _on_head() -> bool:
    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and cluster.is_head(node) for node in ray.nodes())
