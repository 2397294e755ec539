"""Demoted blocks are still in their external tier after pools, node stores and Ray have restarted."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.pools import PATIENCE_S, eventually, holds, shm_files, store, tokens
from helpers.tiers.redis_server import redis_server
from helpers.tiers.sqlite import SqliteTier

import raykv
from raykv.bench.testbed import local_cluster

MIB = 1 << 20
CPU = 64 * MIB  # memory of each of two nodes
BLOCK_BYTES = 256 << 10
PROMPTS, BLOCKS = 24, 64
PACE_S = 0.3
LATE_S = 240.0  # a file tier takes three times as long while engines run beside it


def main(phase: str, *urls: str) -> None:
    """Store or read the same prompts in a pool for each tier, in a Ray cluster of this process."""
    raykv.register_tier("sqlite", SqliteTier)
    settings: dict[str, Any] = {"cpu_memory": CPU, "secret": b"s", "deadline": PATIENCE_S}
    configs = [raykv.PoolConfig(name=name_of(url), external=url, **settings) for url in urls]
    with local_cluster(2), ThreadPoolExecutor(len(urls)) as threads:
        pools = list(threads.map(raykv.start, configs))
        try:
            for pool in pools:
                cache = pool.cache(
                    model="m",
                    dtype="uint8",
                    layout="rows",
                    block_tokens=16,
                    block_bytes=BLOCK_BYTES,
                    recompute_tokens_per_s=20.0,
                )
                prompts = [cache.keys(tokens(i, BLOCKS)) for i in range(PROMPTS)]
                (store_all if phase == "store" else read_all)(pool, cache, prompts)
        finally:
            list(threads.map(raykv.KVPool.stop, pools))
        assert not any(shm_files(pool.name) for pool in pools)


def name_of(url: str) -> str:
    return f"restart-{os.getppid()}-{url.partition(':')[0]}"


def store_all(pool: raykv.KVPool, cache: raykv.KVCache, prompts: list[raykv.Keys]) -> None:
    """Store at a pace that demotion can follow, and store again what was evicted before it was demoted.

    Blocks in the tier are stored again too, and count as followed. So only the first round skips the full pause.
    """

    def followed() -> bool:
        """Whether few enough blocks are only in memory, so that more can be stored without loss."""
        only_in_memory: int = pool.stats()["keys"] - total(pool, "blocks")
        return only_in_memory <= 2 * CPU // BLOCK_BYTES * 5 // 8

    def all_stored(again: bool = True) -> bool:
        for keys in prompts:
            store(cache, keys)
            end = time.monotonic() + PACE_S
            while (again or not followed()) and time.monotonic() < end:
                time.sleep(0.02)
        return bool(pool.stats()["keys"] == PROMPTS * BLOCKS)

    if not all_stored(again=False):
        eventually(all_stored, LATE_S)


def read_all(pool: raykv.KVPool, cache: raykv.KVCache, prompts: list[raykv.Keys]) -> None:
    eventually(lambda: total(pool, "blocks") == PROMPTS * BLOCKS)
    for keys in prompts:
        eventually(lambda keys=keys: holds(cache, keys))  # type: ignore[misc]
    assert pool.stats()["stored"] == 0


def total(pool: raykv.KVPool, what: str) -> int:
    return sum(tier[what] for tier in pool.stats().get("tiers", {}).values())


@pytest.mark.promise
@pytest.mark.timeout(4 * LATE_S)
def test_three_times_the_memory_is_there_after_a_restart_of_everything(tmp_path: Path) -> None:
    """Each node has a tier of files of its own."""
    assert PROMPTS * BLOCKS * BLOCK_BYTES == 3 * 2 * CPU
    store_and_read(f"file://{tmp_path}/files?capacity={4 * CPU}")


@pytest.mark.timeout(4 * LATE_S)
def test_tiers_that_nodes_share_are_there_after_a_restart_of_everything(tmp_path: Path) -> None:
    """The tiers are redis and SqliteTier."""
    with redis_server(tmp_path) as server:
        redis = f"redis://127.0.0.1:{server.port}/0?capacity={8 * CPU}"
        store_and_read(redis, f"sqlite://{tmp_path}/blocks?capacity={8 * CPU}")


def store_and_read(*urls: str) -> None:
    for phase in ("store", "read"):
        command = [sys.executable, __file__, phase, *urls]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * LATE_S)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


if __name__ == "__main__":
    main(*sys.argv[1:])
