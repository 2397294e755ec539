"""Prompts that are longer than the staging window of the reader's node."""

from collections.abc import Callable

import ray

import raykv
from helpers.pools import BLOCK, MIB, eventually, other_node, store, tokens, totals, worker
from raykv.keys import Keys

WINDOW = 16  # blocks: an eighth of 32 MiB
LONG = 10 * WINDOW
PROMPTS = range(1, 4)


def full(start: Callable[..., raykv.KVPool], transport: str) -> tuple[raykv.KVPool, raykv.KVCache, list[Keys]]:
    """(pool, cache, prompts): the other node has all prompts, and this node is full except for its staging window."""
    pool = start(cpu_memory=32 * MIB, transport=transport)
    there = worker(pool, other_node(pool))
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
    pool.resize(other_node(pool), 160 * MIB)
    eventually(lambda: pool.stats()["nodes"][other_node(pool)]["spare_slabs"] * 4 * MIB >= 150 * MIB or None)
    own = cache.keys(tokens(0, 7 * WINDOW))
    assert store(cache, own) == len(own)
    prompts = [cache.keys(tokens(seed, LONG)) for seed in PROMPTS]
    for keys in prompts:
        assert ray.get(there.store.remote(keys)) == LONG
    eventually(lambda: totals(pool)["ready"] == 7 * WINDOW + LONG * len(prompts))
    here = pool.stats()["nodes"][pool.node_id]
    assert (here["ready"], here["free"]) == (7 * WINDOW, WINDOW)
    return pool, cache, prompts
