"""Four engines on two nodes keep a pool full, and a process of each kind is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 60.0


@pytest.mark.cluster
def test_everything_is_killed_once_under_load() -> None:
    """The test has a process and a cluster of its own, because it kills a raylet in the end."""
    script = Path(__file__).parents[2] / "helpers" / "cluster" / "stress.py"
    ran = subprocess.run([sys.executable, script, str(SECONDS)], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print(found)
    assert found["wrong"] == 0 and found["errors"] == []
    assert found["stored"] > 1000 and found["read"] > 1000 and found["remote"] > 0 and found["evicted"] > 1000
    assert found["killed"] == ["worker", "node store", "directory", "raylet"]
    assert found["slots"]["free"] + found["slots"]["ready"] + found["slots"]["replica"] == found["slots"]["slots"] > 0
    assert found["leases"] == found["reservations"] == 0
    left = [name for name in os.listdir("/dev/shm") if name.startswith(f"raykv-{found['pool']}-")]
    assert not left
