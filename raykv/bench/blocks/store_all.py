"""Stores the blocks that a bench needs before it begins, on a machine that may be busy."""

import time

import numpy as np
from numpy.typing import NDArray

from raykv.client.cache import KVCache
from raykv.keys import Keys

LATE_S = 0.2  # seconds to wait after a late answer, until the client finds the directory again
TRIES = 20


def store_all(cache: KVCache, keys: Keys, blocks: NDArray[np.uint8]) -> None:
    """Repeat a store until all blocks are stored. The directory may first have to reassign slabs of another size."""
    for _ in range(TRIES):
        cache.store(keys, blocks, wait=True)
        with cache.match(keys) as match:
            if match.num_blocks == len(keys):
                return
        time.sleep(LATE_S)
    raise AssertionError(f"{match.num_blocks} of {len(keys)} blocks are stored: {cache.session.directory.faults}")
