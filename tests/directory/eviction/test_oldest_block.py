"""Which block goes when a node is full."""

from helpers.directory.pool import KEYS, Pool


def test_the_block_that_nobody_used_for_longest_goes_first() -> None:
    pool = Pool(slots=8, window=1)  # room for seven blocks, and a slot to read blocks of other nodes into
    for key in KEYS[:7]:
        pool.store("a", [key])
    lease, _ = pool.match("a", KEYS[:1])
    pool.release("a", lease)
    pool.store("a", KEYS[7:8])
    assert pool.has(KEYS[:8]) == [True, False, True, True, True, True, True, True]
