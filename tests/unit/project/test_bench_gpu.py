"""What has to be asked of a GPU, on the stand-in for CuPy: all steps work, though the figures mean nothing there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.arena.gpus import ON_HOST
from helpers.faces.command_line import command, last_json

COPIES = {
    *("store", "load", "memory_store", "memory_load", "pages_memory_store", "pages_memory_load"),
    *("down", "up", "ipc_store", "ipc_load", "nccl_self"),
}
ROOT = Path(__file__).parents[3]
TWO_GIB = {"CUPY_ON_HOST_BYTES": str(2 << 30), "CUDA_VISIBLE_DEVICES": "0"}


def on_host(*command: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """A program with Python's arguments, with the stand-in for CuPy before all else."""
    path = os.pathsep.join([ON_HOST, str(ROOT), str(ROOT / "tests"), *sys.path])
    environment = {**os.environ, **TWO_GIB, "PYTHONPATH": path, "CUPY_ON_HOST_WORLD": f"bench-{os.getpid()}"} | more
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.full
def test_a_stage_that_fails_does_not_stop_the_next() -> None:
    """A capture needs torch with CUDA. The tests marked `gpu` take the stand-in for a GPU."""
    done = on_host("benchmarks/gpu/first.py", "capture", "arena", "costs", CUDA_VISIBLE_DEVICES="0,1")
    stages = ("== capture: 1,", "== arena: 0,", "== costs: 0,")
    assert all(stage in done.stdout for stage in stages), done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 1 and done.stdout.endswith("failed: capture\n")
    costs = done.stdout.partition("== costs")[2]
    assert all(
        word in costs for word in ("context: 1 MiB", "huge pages: ", "pages of 4 KiB: ", "pair: ", "[False, True]")
    ), costs


def test_an_unknown_stage_is_refused() -> None:
    done = on_host("benchmarks/gpu/first.py", "captures")
    assert done.returncode == 1 and done.stderr.startswith("no stage captures: give some of arena, pool, copies, ")


@pytest.mark.full
def test_copies_that_are_slower_than_by_hand_fail_the_stage() -> None:
    done = on_host("benchmarks/gpu/copies.py")
    slow = done.stdout.rpartition("of by hand: ")[2].strip()
    assert "of by hand: " in done.stdout and done.returncode == (slow != "none"), done.stdout + done.stderr[-4000:]
    assert float(done.stdout.partition("NCCL between two processes: ")[2].split()[0]) > 0


@pytest.mark.full
def test_a_worker_without_vllm() -> None:
    """It stores and loads pages of three sizes, from the node's memory and from a GPU tier."""
    done = on_host("tests/helpers/arena/gpu_worker.py")
    assert done.returncode == 0 and done.stdout.count("right=True") == 6, done.stdout + done.stderr[-4000:]


@pytest.mark.full
def test_each_copy_is_measured_beside_the_copy_by_hand() -> None:
    before = set(Path("/dev/shm").iterdir())
    done = command("bench", "gpu", "--json", address=None, folder=None, PYTHONPATH=ON_HOST, **TWO_GIB)
    figures = last_json(done)
    assert {name.removesuffix("_of_hand") for name in figures if name.endswith("_of_hand")} == COPIES
    assert all(figures[f"{copy}_gbps"] > 0 and figures[f"{copy}_hand_gbps"] > 0 for copy in COPIES)
    assert not [file for file in set(Path("/dev/shm").iterdir()) - before if "bench-gpu" in file.name]
