"""Look-ups count copies and find stored keys, and touch no block."""

from helpers.directory.pool import KEYS, Pool


def test_locate_prefix_counts_every_copy_of_the_ready_prefix() -> None:
    pool = Pool(slots=8, window=2, nodes="ab")
    pool.store("a", KEYS[:3])
    pool.replicate("b", KEYS[:2])
    pool.store("b", KEYS[3:5])
    pool.store("a", KEYS[6:7])  # after a gap
    hold, got = pool.reserve("a", KEYS[5:6])  # KEYS[5] is being written
    before = pool.directory.stats(pool.now)
    assert pool.directory.locate_prefix(b"".join(KEYS[:7])) == (5, {"a": 3, "b": 4})
    assert pool.directory.locate_prefix(b"".join(KEYS[100:])) == pool.directory.locate_prefix(b"") == (0, {})
    assert pool.directory.stats(pool.now) == before
    pool.commit("a", hold, got, KEYS[5:6])
    assert pool.directory.locate_prefix(b"".join(KEYS[:7])) == (7, {"a": 5, "b": 4})
    pool.tick(4, alive="b")  # a is suspect: its rows are not offered
    assert pool.directory.locate_prefix(b"".join(KEYS[:7])) == (2, {"b": 2})


def test_locate_prefix_does_not_touch_blocks() -> None:
    pool = Pool(slots=8, window=1)
    pool.store("a", KEYS[:4])
    pool.store("a", KEYS[100:103])
    pool.directory.locate_prefix(b"".join(KEYS[:4]))
    pool.store("a", KEYS[103:105])
    assert pool.has(KEYS[:4]) == [True, True, False, False]


def test_stored_is_what_some_row_has_whether_its_node_answers_or_not() -> None:
    pool = Pool(slots=8, window=2, nodes="ab")
    pool.store("a", KEYS[:2])
    pool.store("b", KEYS[4:5])
    pool.reserve("a", KEYS[5:6])  # which is being written
    pool.tick(4, alive="b")  # a is suspect: its rows are not offered
    assert list(pool.directory.stored(b"".join(KEYS[:7])).found) == [1, 1, 0, 0, 1, 0, 0]
    pool.directory.remove_node("a", pool.now)
    assert list(pool.directory.stored(b"".join(KEYS[:7])).found) == [0, 0, 0, 0, 1, 0, 0]


def test_stored_says_nothing_while_a_node_joins() -> None:
    pool = Pool(slots=8, window=2, nodes="ab")
    pool.store("b", KEYS[:1])
    pool.join("c")
    assert pool.directory.stored(KEYS[0]).found == b""
    pool.adopt("c")
    assert pool.directory.stored(KEYS[0]).found == b"\1"


def test_stored_does_not_touch_blocks() -> None:
    pool = Pool(slots=8, window=1)
    pool.store("a", KEYS[:4])
    pool.store("a", KEYS[100:103])
    before = pool.directory.stats(pool.now)
    pool.directory.stored(b"".join(KEYS[:4]))
    assert pool.directory.stats(pool.now) == before
    pool.store("a", KEYS[103:105])
    assert pool.has(KEYS[:4]) == [True, True, False, False]
