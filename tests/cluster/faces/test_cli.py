"""The `raykv` command, as a user runs it, on a cluster of its own or the session's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.faces.command_line import command, last_json
from helpers.faces.terminal import in_terminal
from helpers.project.pages import ROOT

import raykv


@pytest.mark.promise
def test_start_status_clear_and_stop_from_a_shell(cluster: Any) -> None:
    name = f"cli{os.getpid()}"
    size = ("--cpu-memory", "32MiB", "--deadline", "7.5")
    started = last_json(command("start", "--name", name, *size, "--json", address=cluster.address))
    assert [node["state"] for node in started["nodes"].values()] == ["alive", "alive"]
    try:
        pool = raykv.attach(name)
        assert pool.session.directory.deadline == 7.5
        cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4096)
        keys = cache.keys(np.arange(160))
        assert cache.store(keys, np.ones((10, 4096), np.uint8)) == 10
        assert last_json(command("status", "--name", name, "--json", address=cluster.address))["keys"] == 10
        table = command("status", "--name", name, address=cluster.address)
        assert not table.stderr, "neither Ray's lines nor ours"
        assert table.returncode == 0 and "10 blocks and 0 copies" in table.stdout and "alive" in table.stdout
        again = last_json(command("start", "--name", name, *size, "--json", address=cluster.address))
        assert again["keys"] == 10, "start is idempotent"
        told = in_terminal(100, "clear", "--name", name, address=cluster.address, typed="n\n", code=1)
        assert "10 blocks forgotten" not in told and pool.stats()["keys"] == 10, "a terminal is asked first"
        told = in_terminal(100, "stop", "--name", name, address=cluster.address, typed="n\n", code=1)
        assert pool.stats()["keys"] == 10
        assert last_json(command("clear", "--name", name, "--json", address=cluster.address)) == {"cleared": 10}
        pool.close()
    finally:
        stopped = command("stop", "--name", name, address=cluster.address)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout == f"pool {name} ended: it had 0 blocks in 64 MiB of memory on 2 nodes\n"
    gone = command("status", "--name", name, address=cluster.address)
    assert gone.returncode == 1 and f"raykv start --name {name}" in gone.stderr and "Traceback" not in gone.stderr
    assert not list(Path("/dev/shm").glob(f"raykv-{name}-*"))


def test_start_on_a_terminal_shows_a_pool_that_has_its_memory(cluster: Any) -> None:
    name = f"cli{os.getpid()}-grown"
    try:
        told = in_terminal(200, "start", "--name", name, "--cpu-memory", "512MiB", address=cluster.address)
    finally:
        command("stop", "--name", name, address=cluster.address)
    assert told.count("0% of 512 MiB") == 2 and "preparing the rest" not in told


def test_mistakes_in_a_shell_get_one_line_that_says_what_to_do(cluster: Any, tmp_path: Path) -> None:
    huge = command("start", "--name", "huge", "--cpu-memory", "900TiB", address=cluster.address)
    assert huge.returncode == 1 and "are free" in huge.stderr and "Traceback" not in huge.stderr
    assert "fraction such as 0.3" in command("start", "--cpu-memory", "lots").stderr
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o644)
    loose = command("start", "--name", "loose", "--secret-file", str(secret), address=cluster.address)
    assert loose.returncode == 1 and "chmod 600" in loose.stderr


def test_bench_directory() -> None:
    figures = last_json(command("bench", "directory", "--entries", "200000", "--json"))
    assert figures["bytes_per_entry"] > 0


def test_the_cost_of_metrics_is_measured() -> None:
    """`benchmarks/metrics_cost.py` times a server by names that only the server has."""
    program = [sys.executable, str(ROOT / "benchmarks" / "metrics_cost.py"), "--entries", "200000"]
    found = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert 0 < found["plain_us"] < found["export_ms"] * 1e3


def test_bench_scale() -> None:
    """Two nodes, whose directory is killed once."""
    sizes = ("--nodes", "2", "--entries", "20000", "--seconds", "1", "--take-over", "2")
    figures = last_json(command("bench", "scale", *sizes, "--json"))
    (row,) = figures["results"]
    assert row["calls_per_s"] > 100 and 0 < row["busy"] < 1 and row["hits"] == 0.5 and row["errors"] == 0
    assert figures["largest_nodes"] in (0, 2)
    assert figures["take_over"]["first_match_s"] > 0 and figures["take_over"]["all_joined_s"] > 0


def test_bench_trace_with_external_tiers(tmp_path: Path) -> None:
    """Prompts of 10 blocks, asked for in turn. Memory holds half of them, and tiers hold all."""
    trace = tmp_path / "trace.jsonl"
    requests = [list(range(10 * i, 10 * i + 10)) for i in range(40)] * 3
    trace.write_text("".join(json.dumps({"hash_ids": ids, "input_length": 5120}) + "\n" for ids in requests))
    sizes = ("--nodes", "2", "--capacity", "200", "--external", "480")
    (row,) = last_json(command("bench", "trace", str(trace), *sizes, "--json"))["results"]
    assert row["pool"] == row["exact_lru"] == 0.0
    assert row["exact_lru_external"] == row["pool_shared_tier"] == row["pool_own_tiers"] == 66.67
    refused = command("bench", "trace", str(trace), "--nodes", "2", "--capacity", "200", "--external", "1")
    assert refused.returncode == 1 and "every node needs a block" in refused.stderr


def test_bench_local_by_blocks_and_their_size() -> None:
    figures = last_json(command("bench", "local", "--blocks", "1,4", "--block-bytes", "512KiB", "--json"))
    assert [(row["blocks"], row["block_bytes"]) for row in figures["results"]] == [(1, 512 << 10), (4, 512 << 10)]
    floors = {"store_memcpy1_gbps", "store_memcpy_gbps", "memcpy1_gbps", "memcpy_gbps"}
    for row in figures["results"]:
        assert all(row[name] > 0 for name in ("store_e2e_gbps", "read_e2e_gbps", *floors))
        assert row["store_of_memcpy1"] == pytest.approx(row["store_e2e_gbps"] / row["store_memcpy1_gbps"])
        assert row["read_of_memcpy"] == pytest.approx(row["read_e2e_gbps"] / row["memcpy_gbps"])
    assert figures["match_us_p50"] > figures["socket_us_p50"] > 0
    assert figures["match_keys_per_s"] > 0 and figures["actor_match_keys_per_s"] > 0


@pytest.mark.parametrize(
    "sizes", [("--blocks", "0"), ("--blocks", "65"), ("--block-bytes", "0.5"), ("--blocks", "few")]
)
def test_bench_local_refuses_other_sizes(sizes: tuple[str, str]) -> None:
    refused = command("bench", "local", *sizes)
    assert refused.returncode == 1 and "Error: " in refused.stderr and "Traceback" not in refused.stderr


def test_bench_tiers(tmp_path: Path) -> None:
    figures = last_json(command("bench", "tiers", "--directory", str(tmp_path), "--json"))
    assert figures["file_store_ratio"] > 0 and figures["file_load_ratio"] > 0
    assert "left out" in figures["redis"] if "redis" in figures else figures["redis_load_ratio"] > 0
    assert not list(tmp_path.iterdir())
