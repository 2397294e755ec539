"""A node of a running pool gets more memory, or less."""

from collections.abc import Callable
from typing import Any

import pytest
import ray
from helpers.client.sizes import SIZE, as_started, has, taken
from helpers.faces.command_line import command, last_json
from helpers.pools import (
    MIB,
    a_cache,
    come_back,
    eventually,
    holds,
    keep,
    kill,
    load,
    other_node,
    served,
    settled,
    tokens,
    worker,
)

import raykv


@pytest.fixture(scope="module")
def shared(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=SIZE)


@pytest.fixture
def pool(shared: raykv.KVPool) -> raykv.KVPool:
    return as_started(shared)


@pytest.mark.promise
def test_a_resize_under_load_gives_no_wrong_block(pool: raykv.KVPool) -> None:
    nodes = (pool.node_id, other_node(pool))
    workers = [worker(pool, node_id) for node_id in nodes for _ in range(2)]
    with load(workers, prompts=12, blocks=24):
        for sizes in ((16, 96), (80, 12), (SIZE // MIB, SIZE // MIB)):
            for node_id, size in zip(nodes, sizes, strict=True):
                assert pool.resize(node_id, size * MIB) == size * MIB
    faults = [ray.get(there.faults.remote()) for there in workers]
    eventually(lambda: settled(pool))
    assert pool.stats()["corrupt"] == 0, faults
    keys = a_cache(pool).keys(tokens(99, 20))
    keep(a_cache(pool), keys)
    come_back(a_cache(pool), [keys], workers)  # again and again: a staging window may be used up


def test_a_new_size_survives_restarts_of_store_and_directory(pool: raykv.KVPool) -> None:
    cache = a_cache(pool)
    assert pool.resize(pool.node_id, 16 * MIB) == 16 * MIB
    far = other_node(pool)
    assert pool.resize(far, 96 * MIB) == 96 * MIB
    prompts = [cache.keys(tokens(i, 12)) for i in range(3)]
    for keys in prompts:
        keep(cache, keys)
    for parts in ((pool.node_id,), ("directory",), (far, "directory")):
        kill(pool, *parts)
        eventually(lambda: served(pool, 2))
        assert (has(pool), has(pool, far)) == (16 * MIB, 96 * MIB), parts
        for keys in prompts:
            eventually(lambda keys=keys: holds(cache, keys))  # type: ignore[misc]
    assert taken(pool) < 18 * MIB
    assert pool.resize(pool.node_id, SIZE) == SIZE, "what was given back can be had again"


def test_a_node_is_resized_from_a_shell(pool: raykv.KVPool, cluster: Any) -> None:
    args = ("resize", pool.node_id, "--name", pool.name)
    done = command(*args, "--cpu-memory", "32MiB", "--json", address=cluster.address)
    assert last_json(done) == {"bytes": 32 * MIB} and has(pool) == 32 * MIB
    huge = command(*args, "--cpu-memory", "900TiB", address=cluster.address)
    assert huge.returncode == 1 and "are free" in huge.stderr and "Traceback" not in huge.stderr
    assert command(*args, address=cluster.address).returncode == 2 and has(pool) == 32 * MIB
