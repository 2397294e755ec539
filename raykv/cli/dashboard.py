"""`raykv dashboard`: a Grafana dashboard and alert rules, as files."""

import json
import os
from pathlib import Path
from typing import Any

from raykv.metrics import dashboard

FOLDER = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"  # where Ray has Grafana look, if it is set


def write(folder: str | None) -> list[Path]:
    """Write both files. Returns their paths. folder: default: where Ray provisions Grafana from.

    Raises ValueError where there is no such folder.
    """
    there = Path(folder or os.environ.get(FOLDER) or _of_session())
    if folder is None and not there.is_dir():
        raise ValueError(
            f"Ray provisions Grafana from {there}, which is not there: start the cluster's head with its dashboard "
            f"(pip install 'ray[default]') and run this on the head, or give --out FOLDER"
        )
    there.mkdir(parents=True, exist_ok=True)
    contents = {dashboard.DASHBOARD: dashboard.dashboard(), dashboard.RULES: dashboard.rules()}
    for name, content in contents.items():  # the rules are YAML, as all JSON is
        (there / name).write_text(json.dumps(content, indent=2) + "\n")
    return [there / name for name in contents]


def _of_session() -> Path:
    """Ray wipes this folder when it starts."""
    from ray._private.worker import global_worker

    from raykv.cli import shell

    shell.join("default")
    node: Any = global_worker.node
    return Path(node.get_session_dir_path(), "metrics", "grafana", "dashboards")
