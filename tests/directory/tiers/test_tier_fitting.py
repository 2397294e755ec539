"""Old blocks in a tier: the store leaves out exactly those for which the directory has no slots."""

import numpy as np
import pytest
from helpers.directory.pool import Pool
from helpers.directory.tiers import in_external_tier, tier

from raykv.actors.store.demoter import fitting
from raykv.protocol.tiers import ExistingBlocks, TierReport

CAPACITY = 128 << 20
SIZES = np.array([100 << 10, 300 << 10, 1 << 20, 3 << 20])


@pytest.mark.parametrize("seed", range(6))
def test_the_directory_finds_a_slot_for_every_block_that_fits(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.choice(SIZES[: 1 + seed % len(SIZES)], 3000).astype(np.int64)
    fits = np.array(fitting(sizes.tolist(), CAPACITY))
    assert fits[-10:].all() and not fits.all(), "the newest stay"
    keys, sizes = random.integers(0, 256, (len(sizes), 16), np.uint8)[fits], sizes[fits]
    pool = Pool()
    pool.directory.tier_heartbeat("a", TierReport(CAPACITY, False, True, b""), pool.now)
    first = 0
    while first < len(keys):
        last = first + int(random.integers(1, 50))
        blocks = ExistingBlocks(keys[first:last].tobytes(), sizes[first:last].tobytes(), last >= len(keys))
        pool.directory.report_existing("a", blocks, pool.now)
        first = last
    assert tier(pool)["blocks"] == len(keys) and all(in_external_tier(pool, [key.tobytes() for key in keys]))
    assert not pool.demote("a").to_delete
