"""Tenants that keep a minimum while another one floods the pool."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import raykv
from helpers.pools import BLOCK, keep, read, store, tokens
from raykv.keys import Keys

PROMPT = 16  # blocks
PROMPTS = 6  # of the tenant with a minimum: 24 MiB of the 112 MiB that the pool has for blocks
MINIMUM = 0.25


def emptied(shared: raykv.KVPool) -> raykv.KVPool:
    """The pool after all its blocks and quotas are removed."""
    for tenant in filter(None, shared.quotas()):
        shared.remove_quota(tenant)
    shared.clear()
    return shared


def cache_of(pool: raykv.KVPool, tenant: str, **more: Any) -> raykv.KVCache:
    return pool.cache(
        model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK, tenant=tenant, **more
    )


def stored(pool: raykv.KVPool, tenant: str) -> list[Keys]:
    """Store a tenant's prompts, and read each once. Returns them."""
    cache = cache_of(pool, tenant)
    prompts = [cache.keys(tokens(seed, PROMPT)) for seed in range(PROMPTS)]
    for keys in prompts:
        keep(cache, keys)
        assert read(cache, keys).matched == PROMPT
    return prompts


@contextmanager
def flood(pool: raykv.KVPool, tenant: str) -> Iterator[Callable[[], int]]:
    """A tenant stores at full speed, from two threads. Yields how many blocks it has stored so far."""
    cache, done, count = cache_of(pool, tenant), threading.Event(), [0, 0]

    def write(thread: int) -> None:
        seed = 1000 + thread
        while not done.is_set():
            count[thread] += store(cache, cache.keys(tokens(seed, PROMPT)))
            seed += 2

    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(write, thread) for thread in range(2)]
        try:
            yield lambda: sum(count)
        finally:
            done.set()
    for writer in writers:
        writer.result()
