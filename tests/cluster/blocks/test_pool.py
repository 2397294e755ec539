"""What users see of a pool on two Ray nodes."""

import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import (
    BLOCK,
    Worker,
    a_cache,
    eventually,
    keep,
    kill,
    other_node,
    payload,
    read,
    served,
    settled,
    store,
    tokens,
    worker,
)

import raykv


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    """Nodes of 64 MiB: 16 slabs of 4 MiB, with a staging window of 8 MiB."""
    return start_for_module()


@pytest.fixture(scope="module")
def there(pool: raykv.KVPool) -> Any:
    return worker(pool, other_node(pool))


@pytest.fixture
def cache(pool: raykv.KVPool, request: pytest.FixtureRequest) -> raykv.KVCache:
    pool.clear()
    return pool.cache(model=request.node.name, dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.mark.promise
def test_stored_blocks_are_read_on_the_other_node(
    pool: raykv.KVPool, cache: raykv.KVCache, there: Any, model: str
) -> None:
    here, elsewhere = cache.keys(tokens(1, 10)), cache.keys(tokens(2, 10))
    assert store(cache, here) == 10
    assert ray.get(there.store.remote(elsewhere, model=model)) == 10
    assert read(cache, elsewhere) == (10, 10, 0, [other_node(pool)])
    assert ray.get(there.read.remote(here, model=model)) == (10, 10, 0, [pool.node_id])
    half = cache.keys(np.r_[tokens(1, 10)[:80], tokens(3, 2)])  # a prefix of the prompt, and blocks of its own
    assert ray.get(there.store.remote(half, model=model)) == 2
    found = read(cache, half)
    assert found[:3] == (7, 7, 0) and pool.node_id in found.nodes and other_node(pool) in found.nodes


@pytest.mark.promise
def test_attach_in_a_task_and_a_nested_worker(pool: raykv.KVPool, cache: raykv.KVCache, model: str) -> None:
    keys = cache.keys(tokens(1, 3))
    assert store(cache, keys) == 3

    @ray.remote(num_cpus=0)
    def task(name: str) -> Any:
        attached = raykv.attach(name)
        same = attached.cache(model=model, dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
        assert (same.keys(tokens(1, 3)) == keys).all()
        return Worker(name).read(keys, model=model)[:3]

    assert ray.get(task.remote(pool.name)) == (3, 3, 0)


class Elsewhere(Worker):
    """A process with a cache of equal arguments."""

    def make(self, seed: int, blocks: int) -> raykv.Keys:
        return self.cache().keys(tokens(seed, blocks))

    def reads_by(self, cache: raykv.KVCache, seed: int) -> Any:
        return read(cache, cache.keys(tokens(seed, 4)))[:3]

    def node_of(self, pool: raykv.KVPool) -> tuple[str, str]:
        return pool.name, pool.node_id


def test_equal_arguments_give_equal_caches_in_another_process(pool: raykv.KVPool) -> None:
    mine, there = a_cache(pool), worker(pool, other_node(pool), Elsewhere)
    made = ray.get(there.make.remote(2, 4))
    assert isinstance(made, raykv.Keys) and made.cache == mine.id
    keep(mine, made)
    assert ray.get(there.read.remote(made[:3]))[:3] == (3, 3, 0)


def test_a_pool_and_a_cache_that_are_pickled_attach_where_they_arrive(pool: raykv.KVPool) -> None:
    mine, there = a_cache(pool), worker(pool, other_node(pool), Elsewhere)
    keep(mine, mine.keys(tokens(3, 4)))
    assert ray.get(there.node_of.remote(pool)) == (pool.name, other_node(pool))
    assert ray.get(there.reads_by.remote(mine, 3)) == (4, 4, 0)
    same = pickle.loads(pickle.dumps(mine))
    assert read(same, mine.keys(tokens(3, 4)))[:3] == (4, 4, 0)


def _attach_and_read(pool: raykv.KVPool, results: Any) -> None:
    found = read(a_cache(pool), a_cache(pool).keys(tokens(6, 4)))
    results.put([*found[:3], pool.name])


def test_a_pool_arrives_in_a_spawned_process(pool: raykv.KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(a_cache(pool), a_cache(pool).keys(tokens(6, 4)))
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    child = spawn.Process(target=_attach_and_read, args=(pool, results))
    child.start()
    try:
        assert results.get(timeout=120) == [4, 4, 0, pool.name]
    finally:
        child.join(timeout=60)


def test_fetched_blocks_are_on_this_node(pool: raykv.KVPool, cache: raykv.KVCache, there: Any, model: str) -> None:
    keys = cache.keys(tokens(1, 60))  # 15 MiB; 8 MiB can be staged at a time
    assert store(cache, keys[:10]) == 10 and ray.get(there.store.remote(keys, model=model)) == 50
    with cache.match(keys) as match:
        assert (match.num_blocks, match.fetch()) == (60, 42)
        assert match.nodes == [pool.node_id, other_node(pool)]
        kill(pool, other_node(pool))
        out = np.zeros((60, BLOCK), np.uint8)
        n = match.read(out)
        assert n >= 42 and (out[:n] == payload(keys[:n], BLOCK)).all()
    eventually(lambda: served(pool, 2))


def test_a_pool_full_of_leases_stores_what_fits(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(cpu_memory=16 << 20)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
    there = worker(pool, other_node(pool))
    prompts = [cache.keys(tokens(i, 4)) for i in range(40)]
    for keys in prompts:  # more than the pool has room for
        store(cache, keys)
    mine = []
    for keys in prompts:
        match = cache.match(keys)
        if match.nodes == [pool.node_id]:
            mine.append((keys, match))
        else:
            match.release()
    assert sum(ray.get([there.lease.remote(keys) for keys in prompts])) > 50
    before = pool.stats()
    assert store(cache, cache.keys(tokens(100, 10))) == 0
    assert pool.stats()["refused"] - before["refused"] == 10
    keys, match = mine[0]
    ray.get(there.release.remote(keys))
    match.release()
    eventually(lambda: pool.stats()["leases"] == before["leases"] - 2)
    fits = match.num_blocks
    assert store(cache, cache.keys(tokens(101, 10))) == fits
    after = pool.stats()
    assert after["refused"] - before["refused"] == 20 - fits and after["evicted"] - before["evicted"] == fits
    for _, match in mine[1:]:
        out = np.zeros((match.num_blocks, BLOCK), np.uint8)
        assert match.read(out) == match.num_blocks
        match.release()
    del there
    eventually(lambda: settled(pool))
