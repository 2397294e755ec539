"""`raykv bench gpu` on the stand-in for CuPy: all its steps work, though the figures mean nothing there."""

from pathlib import Path

import pytest
from helpers.arena.gpus import ON_HOST
from helpers.faces.command_line import command, last_json

COPIES = {
    *("store", "load", "memory_store", "memory_load", "pages_memory_store", "pages_memory_load"),
    *("down", "up", "ipc_store", "ipc_load", "nccl_self"),
}


@pytest.mark.full
def test_each_copy_is_measured_beside_the_copy_by_hand() -> None:
    before = set(Path("/dev/shm").iterdir())
    done = command(
        "bench", "gpu", "--json", PYTHONPATH=ON_HOST, CUPY_ON_HOST_BYTES=str(2 << 30), CUDA_VISIBLE_DEVICES="0"
    )
    figures = last_json(done)
    assert {name.removesuffix("_of_hand") for name in figures if name.endswith("_of_hand")} == COPIES
    assert all(figures[f"{copy}_gbps"] > 0 and figures[f"{copy}_hand_gbps"] > 0 for copy in COPIES)
    assert figures["nccl_two_gbps"] > 0
    assert not [file for file in set(Path("/dev/shm").iterdir()) - before if "bench-gpu" in file.name]
