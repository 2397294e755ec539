"""The `raykv` command, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def command(
    *args: str, address: str | None = None, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `raykv`. address: of the Ray cluster. folder: where to run, by default here; Ray's workers import from it."""
    env = (
        {**os.environ, "RAY_ADDRESS": address}
        if address
        else {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    )
    return subprocess.run(
        [sys.executable, "-m", "raykv.cli", *args],
        capture_output=True,
        text=True,
        env={**env, **environment},
        timeout=280,
        cwd=folder,
    )


def last_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
