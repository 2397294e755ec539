"""A Prometheus of a test's own, which scrapes Ray's endpoints."""

import json
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import ray

from helpers.pools import free_port

START_S = 30.0
Series = dict[str, str]


class Prometheus:
    """Debian's Prometheus. It scrapes the nodes that this process's Ray cluster has at its start."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        config = folder / "prometheus.yml"
        config.write_text(json.dumps(self._config()))  # JSON is YAML
        options = {
            "config.file": config,
            "storage.tsdb.path": folder / "data",
            "web.listen-address": f"127.0.0.1:{self._port}",
        }
        with open(folder / "prometheus.log", "ab") as log:
            command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while not self._is_ready():
            assert self._process.poll() is None and time.monotonic() < end, (folder / "prometheus.log").read_text()
            time.sleep(0.05)

    def _config(self) -> dict[str, Any]:
        targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
        job = {"job_name": "ray", "static_configs": [{"targets": targets}]}
        return {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [job]}

    def _is_ready(self) -> bool:
        try:
            return bool(self._get("-/ready"))
        except OSError:
            return False

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{path}", timeout=10) as answer:
            found: bytes = answer.read()
            return found

    def query(self, expression: str) -> list[tuple[Series, float]]:
        """(labels, value) of every series that an expression has now."""
        answer = json.loads(self._get(f"api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
        return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

    def value(self, expression: str) -> float:
        """The value of an expression with one series; 0 if there is no series."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return found[0][1] if found else 0.0

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
