"""Blocks over TCP, with Ray: a store that is stopped, killed or can't be reached."""

import os
import signal
from collections.abc import Callable

import numpy as np
import pytest
import ray
from helpers.pools import (
    BLOCK,
    a_cache,
    eventually,
    keep,
    kill,
    node_store,
    other_node,
    pid,
    settled,
    suspend,
    tokens,
    worker,
)

import raykv
import raykv.client.leases.stream


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module()


def test_reads_find_the_new_port_of_a_restarted_store(pool: raykv.KVPool) -> None:
    cache = a_cache(pool)
    there = worker(pool, other_node(pool))
    for seed in (2, 3):
        keys = cache.keys(tokens(seed, 20))
        keep(cache, keys)
        eventually(lambda keys=keys: ray.get(there.holds.remote(keys)))  # type: ignore[misc]
        kill(pool, pool.node_id)
    eventually(lambda: settled(pool))


def test_reads_from_a_stopped_store_miss_until_it_goes_on(start: Callable[..., raykv.KVPool]) -> None:
    """The store's connections stay open, and the kernel accepts new ones for it."""
    pool = start()
    cache = a_cache(pool)
    there = worker(pool, other_node(pool))
    prompts = [cache.keys(tokens(seed, 20)) for seed in (1, 2)]
    for keys in prompts:
        keep(cache, keys)
    eventually(lambda: ray.get(there.holds.remote(prompts[0])))
    stopped = pid(node_store(pool, pool.node_id))
    suspend(stopped)
    try:
        assert ray.get(there.read.remote(prompts[1]))[:3] == (20, 0, 0)
    finally:
        os.kill(stopped, signal.SIGCONT)
    eventually(lambda: ray.get(there.holds.remote(prompts[1])))
    eventually(lambda: settled(pool))


def test_a_read_ends_with_the_first_piece_that_does_not_arrive(
    start: Callable[..., raykv.KVPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.client.leases.stream, "PIECE_BYTES", 5 * BLOCK)
    pool = start()
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 30))
    assert ray.get(worker(pool, other_node(pool)).store.remote(keys)) == 30
    for stopped in (pool.node_id, other_node(pool)):
        process = pid(node_store(pool, stopped))
        pool.session.directory.faults.clear()
        with cache.match(keys) as match:
            os.kill(process, signal.SIGSTOP)
            try:
                assert match.num_blocks == 30 and match.read(np.zeros((30, BLOCK), np.uint8)) == 0
            finally:
                os.kill(process, signal.SIGCONT)
        faults = pool.session.directory.faults["pull"]
        assert faults <= raykv.client.leases.stream.PIECES_AHEAD, "of six pieces two were asked for"
        eventually(lambda: settled(pool))
