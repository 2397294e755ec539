"""The `raykv` command, as a user runs it."""

import json
import os
import subprocess
import sys
from typing import Any


def command(*args: str, address: str | None = None) -> subprocess.CompletedProcess[str]:
    env = (
        {**os.environ, "RAY_ADDRESS": address}
        if address
        else {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    )
    return subprocess.run(
        [sys.executable, "-m", "raykv.cli", *args], capture_output=True, text=True, env=env, timeout=280
    )


def last_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
