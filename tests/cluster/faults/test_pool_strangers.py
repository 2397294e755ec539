"""Files of others in an external tier that a pool uses: they cost no block, and are left alone."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.pools import eventually, holds, keep, kill, node_store, tokens
from helpers.tiers.redis_server import redis_server

import raykv
from raykv.tiers.base import path_of

MIB = 1 << 20
BLOCKS, PROMPTS = 16, 20  # of 32 KiB: 10 MiB
Start = Callable[..., raykv.KVPool]


def a_cache(pool: raykv.KVPool) -> raykv.KVCache:
    return pool.cache(
        model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=32 << 10, recompute_tokens_per_s=20.0
    )


def tiers(pool: raykv.KVPool) -> list[dict[str, Any]]:
    return list(pool.stats().get("tiers", {}).values())


def strangers(pool: raykv.KVPool) -> int:
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    found = ray.get([node_store(pool, node_id).stats.remote() for node_id in nodes])
    return sum(stats.get("tier_strangers", 0) for stats in found)


def test_files_of_others_evict_no_block_at_a_restart(start: Start, tmp_path: Path) -> None:
    """Sparse files of many sizes, newer than all blocks: larger than any block, or than the tier."""
    settings = {"cpu_memory": 64 * MIB, "external": f"file://{tmp_path}?capacity=32MiB", "secret": b"s"}
    pool = start(**settings)
    cache = a_cache(pool)
    kept = [cache.keys(tokens(seed, BLOCKS)) for seed in range(PROMPTS)]
    for keys in kept:
        keep(cache, keys)
    pool.stop()
    sizes = [1 << 40, 900 * MIB, 33 * MIB, *(4096 * pages for pages in range(2, 40))]
    others = [tmp_path / folder / path_of(bytes([number + 1]) * 16) for folder in "01" for number in range(len(sizes))]
    for path, size in zip(others, sizes * 2, strict=True):
        path.touch()
        os.truncate(path, size)
    again = start(name=pool.name, **settings)
    cache = a_cache(again)
    eventually(lambda: [tier["state"] for tier in tiers(again)] == ["up", "up"])
    assert sum(tier["blocks"] for tier in tiers(again)) == PROMPTS * BLOCKS
    for keys in kept:
        eventually(lambda keys=keys: holds(cache, keys))  # type: ignore[misc]
    assert again.stats()["stored"] == 0 and strangers(again) == len(others)
    assert [path.stat().st_size for path in others] == sizes * 2


def test_a_list_in_the_key_space_keeps_no_redis_from_being_listed(start: Start, tmp_path: Path) -> None:
    redis = pytest.importorskip("redis")
    with redis_server(tmp_path) as server, redis.Redis(port=server.port) as client:
        pool = start(cpu_memory=64 * MIB, external=server.url(), secret=b"s", write="through")
        cache = a_cache(pool)
        kept = [cache.keys(tokens(seed, BLOCKS)) for seed in range(2)]
        for keys in kept:
            keep(cache, keys)
        eventually(lambda: [tier["blocks"] for tier in tiers(pool)] == [2 * BLOCKS])
        others = [f"raykv:{pool.name}:{bytes(15 * [7] + [number]).hex()}" for number in range(3)]
        client.rpush(others[0], "a", "list")
        client.set(others[1], bytes(64 + (32 << 10)))
        client.hset(others[2], "a", "hash")
        kill(pool, "directory")
        eventually(lambda: [tier["state"] for tier in tiers(pool)] == ["up"])
        assert tiers(pool)[0]["blocks"] == 2 * BLOCKS and strangers(pool) == 1
        for keys in kept:
            eventually(lambda keys=keys: holds(cache, keys))  # type: ignore[misc]
        assert client.exists(*others) == len(others)
        pool.stop()
        assert client.exists(*others) == len(others)
