"""A node store that is killed, and what is there when Ray has started it again."""

from collections.abc import Callable

from helpers.pools import a_cache, eventually, holds, keep, kill, settled, tokens

import raykv


def test_blocks_outlive_the_store_that_had_them(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    cache = a_cache(pool)
    keys = cache.keys(tokens(seed=1, blocks=10))
    keep(cache, keys)
    kill(pool, pool.node_id)  # SIGKILL; returns when there is another
    eventually(lambda: holds(cache, keys))
    eventually(lambda: settled(pool))
