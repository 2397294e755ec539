"""A prompt that one engine has stored, for another engine."""

from collections.abc import Callable

import numpy as np
import ray
from helpers.pools import a_cache, eventually, other_node, payload, settled, store, tokens, worker

import raykv


def test_an_engine_of_another_node_reads_what_the_first_one_stored(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()  # two nodes of 64 MiB; this thread is on the first
    cache = a_cache(pool)
    keys = cache.keys(tokens(seed=1, blocks=10))
    there = worker(pool, other_node(pool))
    assert ray.get(there.store.remote(keys)) == 10
    out = np.zeros((10, cache.block_bytes), np.uint8)
    with cache.match(keys) as match:
        assert match.nodes == [other_node(pool)] and match.read(out) == 10
    assert (out == payload(keys, cache.block_bytes)).all()
    assert store(cache, keys) == 0, "the pool has them"
    eventually(lambda: settled(pool))  # nothing is held any more
