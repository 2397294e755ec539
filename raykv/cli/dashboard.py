"""`raykv dashboard`: a Grafana dashboard and alert rules, as files."""

import os
from pathlib import Path

from raykv.cli import shell
from raykv.metrics import dashboard_files


def write(folder: str | None) -> list[Path]:
    """Write both files. Returns their paths. folder: None: the folder that Ray provisions Grafana from.

    Raises ValueError if that folder of Ray's does not exist.
    """
    if folder is not None:
        there = Path(folder)
        there.mkdir(parents=True, exist_ok=True)
        return dashboard_files.write(there)
    if not os.environ.get(dashboard_files.FOLDER):
        shell.join("default")
    there = dashboard_files.provisioned()
    if not there.is_dir():
        raise ValueError(
            f"Ray provisions Grafana from {there}, which is not there: start the cluster's head with its dashboard "
            f"(pip install 'ray[default]') and run this on the head, or give --out FOLDER"
        )
    return dashboard_files.write(there)
