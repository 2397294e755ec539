"""A node of a running pool gets more memory, or less."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.client.sizes import SIZE, as_started, has, node_of, taken
from helpers.pools import (
    BLOCK,
    MIB,
    PATIENCE_S,
    a_cache,
    eventually,
    holds,
    keep,
    locations,
    other_node,
    payload,
    read,
    served,
    shm_files,
    store,
    tokens,
)

import raykv
from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept


@pytest.fixture(scope="module")
def shared(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=SIZE)


@pytest.fixture
def pool(shared: raykv.KVPool) -> raykv.KVPool:
    return as_started(shared)


def test_a_node_is_given_less_memory_and_more(pool: raykv.KVPool) -> None:
    cache = a_cache(pool)
    prompts = [cache.keys(tokens(i, 16)) for i in range(12)]
    for keys in prompts:
        keep(cache, keys)
    hot = prompts[3]
    assert holds(cache, hot)
    before = taken(pool)

    assert pool.resize(pool.node_id, 24 * MIB + 1) == 24 * MIB == has(pool), "whole slabs"
    assert before - taken(pool) > SIZE - 24 * MIB and taken(pool) < 26 * MIB
    assert node_of(pool)["limit"] == 6 and has(pool, other_node(pool)) == SIZE
    assert read(cache, hot)[:3] == (16, 16, 0), "what was used last stays"
    assert not any(read(cache, keys).wrong for keys in prompts)
    more = [cache.keys(tokens(100 + i, 16)) for i in range(8)]
    for keys in more:
        keep(cache, keys)
        assert set(locations(pool, cache, keys)["slab"]) <= set(range(16))

    total = 3 * SIZE // 2
    assert pool.resize(pool.node_id, total) == total == has(pool), "more than it was started with"
    assert taken(pool) > total and holds(cache, more[-1])
    for keys in prompts * 2:
        keep(cache, keys)
    assert all(holds(cache, keys) for keys in prompts)
    assert node_of(pool)["bytes_used"] > 24 * MIB


def test_a_slab_with_a_lease_stays_until_the_lease_ends(pool: raykv.KVPool) -> None:
    cache = a_cache(pool)
    prompts = [cache.keys(tokens(i, 16)) for i in range(14)]
    for keys in prompts:
        keep(cache, keys)
    leased = prompts[-6:]
    matches = [cache.match(keys) for keys in leased]
    assert [match.num_blocks for match in matches] == [16] * 6
    begun = time.monotonic()
    left = pool.resize(pool.node_id, 8 * MIB, deadline=3.0)
    assert 16 * MIB <= left == has(pool) < SIZE and time.monotonic() - begun > 2.0
    assert node_of(pool)["limit"] == 2 and node_of(pool)["state"] == "alive"
    for match, keys in zip(matches, leased, strict=True):
        out = np.zeros((16, BLOCK), np.uint8)
        assert match.read(out, verify=True) == 16
        assert np.array_equal(out, payload(keys, BLOCK))
        match.release()
    eventually(lambda: has(pool) == 8 * MIB)
    eventually(lambda: taken(pool) < 9 * MIB)
    assert not any(read(cache, keys).wrong for keys in prompts)


def test_of_several_resizes_at_once_one_is_in_force(pool: raykv.KVPool) -> None:
    got: dict[int, int] = {}

    def resize(size: int) -> None:
        got[size] = pool.resize(pool.node_id, size)

    sizes = [16 * MIB, 128 * MIB, 40 * MIB]
    threads = [threading.Thread(target=resize, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 3 and (last := has(pool)) in sizes
    assert got[last] == last
    asked = internal_kv.get(pool.name, Kept.MEMORY, pool.node_id)
    assert asked and json.loads(asked) == last


@pytest.mark.parametrize("cpu_memory", [1 << 45, 1.0])
def test_resize_refuses_more_than_there_is(pool: raykv.KVPool, cpu_memory: float) -> None:
    before = internal_kv.get(pool.name, Kept.MEMORY, pool.node_id)
    with pytest.raises(raykv.CapacityError, match=r"asked for .* GiB.*are free.*Lower cpu_memory") as caught:
        pool.resize(pool.node_id, cpu_memory)
    assert "Traceback" not in str(caught.value)
    assert has(pool) == SIZE and node_of(pool)["limit"] == 16
    assert internal_kv.get(pool.name, Kept.MEMORY, pool.node_id) == before


def test_resize_refuses_bad_arguments(pool: raykv.KVPool) -> None:
    for cpu_memory in (0, 0.0, -1, 1.5, True, 1 << 20, "1MiB", "much"):
        with pytest.raises(ValueError, match="cpu_memory="):
            pool.resize(pool.node_id, cpu_memory)
    with pytest.raises(ValueError, match="'nowhere' is not a living node"):
        pool.resize("nowhere", SIZE)
    with pytest.raises(ValueError, match="less than a slab of this pool: give 4194304 bytes") as caught:
        pool.resize(pool.node_id, 1e-6)
    assert "Traceback" not in str(caught.value)
    assert has(pool) == SIZE


def test_with_an_external_tier_a_smaller_node_loses_no_block(
    start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    """A leaving node can be resized too, and a new pool does not inherit the size."""
    pool = start(external=f"file://{tmp_path}?capacity=1GiB", secret=b"s")
    cache = a_cache(pool)
    prompts = [cache.keys(tokens(i, 16)) for i in range(10)]
    for keys in prompts:
        keep(cache, keys)
    eventually(lambda: pool.stats()["tiers"].get(pool.node_id, {}).get("state") == "up")
    assert pool.stats()["tiers"][pool.node_id]["blocks"] < 160, "some are in memory only"
    assert pool.resize(pool.node_id, 8 * MIB) == 8 * MIB == has(pool)
    for keys in prompts:
        eventually(lambda keys=keys: holds(cache, keys))  # type: ignore[misc]
    assert pool.stats()["external_hits"] > 0
    hold = threading.Thread(target=pool.drain, args=(pool.node_id, 5.0))
    hold.start()
    assert pool.resize(pool.node_id, 24 * MIB) == 24 * MIB
    hold.join()
    assert pool.resize(pool.node_id, 16 * MIB) == 16 * MIB == has(pool)
    assert node_of(pool)["state"] == "leaving"
    pool.stop()
    assert internal_kv.get(pool.name, Kept.MEMORY, pool.node_id) is None


def test_a_node_is_resized_while_its_memory_is_still_being_offered(cluster: Any) -> None:
    name = f"t{os.getpid()}-young"
    pool = raykv.start(raykv.PoolConfig(name=name, cpu_memory=512 * MIB, deadline=PATIENCE_S))
    try:
        assert pool.resize(pool.node_id, 64 * MIB) == 64 * MIB
        eventually(lambda: has(pool) == 64 * MIB and served(pool, 2))
        cache = a_cache(pool)
        keys = cache.keys(tokens(1, 100))
        assert store(cache, keys) == 100 and read(cache, keys)[:3] == (100, 100, 0)
        assert taken(pool) < 70 * MIB
    finally:
        pool.stop()
    assert not shm_files(name)
