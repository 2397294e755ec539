"""NIXL between node stores is used, and shown in stats. A peer that dies or stops in mid-read is a miss."""

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import ray
from helpers.pools import (
    WITH_NIXL,
    Reading,
    eventually,
    keep,
    kill,
    node_store,
    other_node,
    pid,
    read,
    settled,
    tokens,
    worker,
)

import raykv

pytestmark = WITH_NIXL

BLOCKS = 100  # 25 MiB


def a_cache(pool: raykv.KVPool) -> raykv.KVCache:
    return pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=256 << 10)


def test_stats_name_the_transport_that_a_pair_of_nodes_uses(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(transport="nixl")
    cache, there = a_cache(pool), other_node(pool)
    reader = worker(pool, there)
    keys = cache.keys(tokens(1, BLOCKS))
    keep(cache, keys)
    assert pool.stats()["transports"] == []
    assert ray.get(reader.read.remote(keys)) == (BLOCKS, BLOCKS, 0, [pool.node_id])
    (lane,) = pool.stats()["transports"]
    assert lane.pop("gbps") > 0
    size = BLOCKS * cache.block_bytes
    assert lane == {"reader": there, "from": pool.node_id, "transport": "nixl", "bytes": {"nixl": size}, "failed": {}}
    back = cache.keys(tokens(2, BLOCKS))  # to read in the other direction
    ray.get(reader.keep.remote(back))
    assert read(cache, back)[:3] == (BLOCKS, BLOCKS, 0)
    assert {lane["transport"] for lane in pool.stats()["transports"]} == {"nixl"}


def test_a_peer_that_is_killed_during_a_read_is_a_miss(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(transport="nixl")
    cache, reader = a_cache(pool), worker(pool, other_node(pool))
    for seed in range(4):
        keys = cache.keys(tokens(seed, BLOCKS))
        keep(cache, keys)
        reading = reader.read.remote(keys)
        time.sleep(random.Random(seed).uniform(0.0, 0.05))
        kill(pool, pool.node_id)
        found: Reading = ray.get(reading)
        assert not found.wrong
        eventually(lambda keys=keys: ray.get(reader.holds.remote(keys)))  # type: ignore[misc]
        pool.clear()
    eventually(lambda: settled(pool))
    eventually(lambda: reads_by_nixl(pool, cache, reader))  # the new process is read by NIXL again


def test_a_peer_that_is_stopped_during_a_read_is_a_miss(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(transport="nixl")
    cache, reader = a_cache(pool), worker(pool, other_node(pool))
    process = pid(node_store(pool, pool.node_id))
    for seed in range(3):
        keys = cache.keys(tokens(seed, BLOCKS))
        keep(cache, keys)
        reading = reader.read.remote(keys)
        time.sleep(random.Random(seed).uniform(0.0, 0.05))
        os.kill(process, signal.SIGSTOP)
        try:
            found: Reading = ray.get(reading)
        finally:
            os.kill(process, signal.SIGCONT)
        assert not found.wrong
        eventually(lambda keys=keys: ray.get(reader.holds.remote(keys)))  # type: ignore[misc]
        pool.clear()
    eventually(lambda: settled(pool))


def reads_by_nixl(pool: raykv.KVPool, cache: raykv.KVCache, reader: Any) -> bool:
    pool.clear()
    keys = cache.keys(tokens(99, BLOCKS))
    keep(cache, keys)
    found: Reading = ray.get(reader.read.remote(keys))
    assert not found.wrong
    return found.read == BLOCKS and {lane["transport"] for lane in pool.stats()["transports"]} == {"nixl"}
