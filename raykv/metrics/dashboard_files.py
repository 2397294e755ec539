"""The Grafana dashboard and the alert rules as files, in the folder from which Ray provisions Grafana."""

import json
import os
from pathlib import Path
from typing import Any

from raykv.metrics import dashboard

FOLDER = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"  # the variable for the folder from which Ray provisions Grafana
NAMES = (dashboard.DASHBOARD, dashboard.RULES)


def provisioned() -> Path:
    """Return the folder from which Ray provisions Grafana, if Ray's dashboard runs here.

    This process must be in a cluster. Ray wipes the folder when it starts.
    """
    from ray._private.worker import global_worker

    node: Any = global_worker.node
    return Path(os.environ.get(FOLDER) or Path(node.get_session_dir_path(), "metrics", "grafana", "dashboards"))


def write(folder: Path) -> list[Path]:
    """Write both files into an existing folder. Returns their paths. Readers never see half a file. Raises OSError."""
    contents = (dashboard.dashboard(), dashboard.rules())
    for name, content in zip(NAMES, contents, strict=True):  # JSON is valid YAML
        unfinished = folder / f".{name}.{os.getpid()}"
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.rename(folder / name)
    return [folder / name for name in NAMES]
