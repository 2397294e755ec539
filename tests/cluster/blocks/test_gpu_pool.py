"""A pool with a GPU tier, on a stand-in for CuPy; with `-m gpu`, on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raykv.arena.gpu import device

HERE = Path(__file__).parents[2]
ON_HOST = str(HERE / "helpers" / "arena" / "cupy_on_host")


@pytest.mark.parametrize(
    "ahead",
    [
        pytest.param([ON_HOST], id="on_host"),
        pytest.param([], marks=pytest.mark.gpu, id="gpu"),
    ],
)
def test_engines_memory_and_nodes(ahead: list[str]) -> None:
    if not ahead and not device.visible():
        pytest.skip("no GPU here")
    run(ahead, "all")


def test_a_pool_starts_where_no_gpu_is_usable(tmp_path: Path) -> None:
    """As after an installation without CUDA's headers."""
    lacks = tmp_path / "no headers"
    lacks.touch()
    run([ON_HOST], "without", CUPY_ON_HOST_WITHOUT_HEADERS=str(lacks))


def run(ahead: list[str], what: str, **more: str) -> None:
    """Run the program. ahead: folders to import from first."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*ahead, str(HERE), *sys.path]),
        "CUDA_VISIBLE_DEVICES": "0",
        "CUPY_ON_HOST_BYTES": str(71 << 20),  # two tiers of 24 MiB and seven contexts fit, three tiers do not
        "CUPY_ON_HOST_WORLD": f"world-{os.getpid()}",  # both nodes share the GPUs, as on a real machine
        **more,
    }
    command = [sys.executable, str(HERE / "helpers" / "arena" / "gpu_pool.py"), f"gpu-{os.getpid()}", what]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    print(ran.stdout)
