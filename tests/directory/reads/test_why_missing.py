"""Why the block after a match is missing, as followers of requests learn it, by example."""

from helpers.directory.pool import KEYS, Pool
from helpers.directory.tiers import heartbeat, only_in_tier, tiered

from raykv.directory.calls.why_missing import ABSENT, AWAY, NO_MEMORY, TIER_AWAY, WRITTEN


def test_the_reason_is_that_of_the_copy_that_is_nearest_to_be_read() -> None:
    pool = Pool(nodes="abc")
    pool.store("a", KEYS[:2])
    hold, got = pool.reserve("b", KEYS[2:3])
    why = pool.directory.why_missing
    assert [why(key) for key in KEYS[2:4]] == [WRITTEN, ABSENT]
    pool.commit("b", hold, got, KEYS[2:3])
    pool.replicate("b", KEYS[1:2])
    pool.tick(4.0, alive="bc")
    assert pool.read("c", KEYS[:1]) == 0 and why(KEYS[0]) == AWAY
    assert pool.read("nobody's", KEYS[1:2]) == 0 and why(KEYS[1]) == NO_MEMORY


def test_a_tier_out_of_reach_is_a_reason() -> None:
    pool = tiered()
    only_in_tier(pool, KEYS[:1])
    assert pool.read("a", KEYS[:1]) == 1
    pool = tiered()
    only_in_tier(pool, KEYS[:1])
    heartbeat(pool, reached=False)
    assert pool.read("a", KEYS[:1]) == 0 and pool.directory.why_missing(KEYS[0]) == TIER_AWAY
