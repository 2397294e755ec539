"""The pool puts its Grafana dashboard beside Ray's own."""

import shutil
from collections.abc import Callable
from pathlib import Path

from helpers.pools import eventually
from ray._private.worker import global_worker

import raykv
from raykv.metrics import dashboard_files


def test_the_store_of_the_head_writes_it_where_ray_provisions_grafana_from(start: Callable[..., raykv.KVPool]) -> None:
    assert global_worker.node
    metrics = Path(global_worker.node.get_session_dir_path(), "metrics")
    assert dashboard_files.provisioned() == metrics / "grafana" / "dashboards"
    there = metrics.exists()
    dashboard_files.provisioned().mkdir(parents=True, exist_ok=True)  # Ray's dashboard, not running here, would do it
    try:
        start()
        eventually(lambda: all((dashboard_files.provisioned() / name).exists() for name in dashboard_files.NAMES))
    finally:
        if not there:
            shutil.rmtree(metrics)
