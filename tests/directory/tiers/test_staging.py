"""A match stages blocks of other nodes in a window, and leaves replicas in free room."""

from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import LOCATION, unpack
from helpers.directory.pool import KEYS, Pool, blocks, staged

from raykv.config import staging_window
from raykv.directory.calls.readers import HELD_UP_S


def beside_a_window_of_three(nodes: str = "ab") -> Pool:
    """Eight blocks of node a. Node b has room for its staging window only."""
    pool = Pool(slots=16, window=3, nodes=nodes)
    pool.store("a", KEYS[:8])
    pool.store("b", KEYS[100:113])
    return pool


def test_the_staging_window_is_a_fiftieth_but_no_less_than_256_mib_nor_more_than_an_eighth() -> None:
    assert staging_window(100 << 30) == (100 << 30) // 50
    assert staging_window(4 << 30) == 256 << 20
    assert staging_window(1 << 30) == 128 << 20


def test_a_match_longer_than_the_window_streams_through_it() -> None:
    pool = beside_a_window_of_three()
    lease, got = pool.match("b", KEYS[:8])
    assert (blocks(got), staged(got)) == (8, 3)
    for first in (3, 6, 0, 5):  # forward, and back again
        more = pool.next_window("b", lease, first)
        assert more.source == got.source[first * LOCATION.size :]
        assert staged(more) == min(3, 8 - first) == pool.count("staging", "b")
    more = pool.next_window("b", lease, 5, 7)
    assert (blocks(more), staged(more)) == (2, 2)
    assert pool.count("staging", "b") <= 3
    pool.release("b", lease)
    assert pool.count("staging", "b") == 0


def test_streaming_passes_over_blocks_that_are_there() -> None:
    pool = Pool(slots=16, window=2, nodes="ab")
    pool.store("b", [KEYS[i] for i in range(1, 9, 2)])
    pool.store("a", KEYS[:9])
    pool.store("b", KEYS[100:111])
    lease, got = pool.match("b", KEYS[:9])
    assert (blocks(got), staged(got)) == (9, 2), "of blocks 0, 2, 4, 6, 8"
    more = pool.next_window("b", lease, 4)
    assert [location[4] > 0 for location in unpack(more.staged)] == [True, False, True, False, False]


def test_the_first_match_of_a_node_is_given_slabs_for_all_that_it_stages() -> None:
    pool = Pool(slots=4, slabs=3, window=5, nodes="ab")
    pool.store("a", KEYS[:7])
    assert pool.directory.stats(pool.now)["nodes"]["b"]["spare_slabs"] == 3
    _, got = pool.match("b", KEYS[:7])
    assert staged(got) == 5, "the window, which is more than a slab"
    assert pool.directory.stats(pool.now)["nodes"]["b"]["spare_slabs"] == 1


def test_a_match_is_as_long_as_what_is_ready_and_gets_staging_when_there_is_some() -> None:
    pool = Pool(slots=16, window=2, nodes="ab")
    pool.store("b", KEYS[:2])
    pool.store("a", KEYS[:6])  # the rest
    first, got = pool.match("b", KEYS[2:6])
    assert (blocks(got), staged(got)) == (4, 2)
    second, got = pool.match("b", [*KEYS[:2], KEYS[5]])
    assert (blocks(got), staged(got)) == (3, 0)
    assert staged(pool.next_window("b", second, 0)) == 0
    third, got = pool.match("b", KEYS[2:6])
    assert staged(got) == 2, "blocks that are being staged already are shared"
    assert pool.directory.stats(pool.now)["leases"] == 3
    for lease in (first, third):
        assert blocks(pool.next_window("b", lease, 4)) == 0
    assert staged(pool.next_window("b", second, 0)) == 1


def test_a_reader_without_memory_hits_nothing() -> None:
    pool = Pool(nodes="a")
    pool.store("a", KEYS[:2])
    assert blocks(pool.match("x", KEYS[:2])[1]) == 0
    assert pool.directory.stats(pool.now)["leases"] == 0


def test_as_many_blocks_are_staged_with_a_match_as_the_reader_wants() -> None:
    pool = Pool(slots=16, window=6, nodes="ab")
    pool.store("a", KEYS[:8])
    for wanted in (0, 2, 6):
        lease, got = pool.match("b", KEYS[:8], stage=wanted)
        assert (blocks(got), staged(got)) == (8, wanted) and pool.count("staging", "b") == wanted
        pool.release("b", lease)
        pool.heartbeat("b")
    assert pool.count("staging", "b") == 0


def test_another_process_streams_by_a_lease() -> None:
    pool = Pool(slots=4, slabs=3, window=4, nodes="ab")
    pool.store("a", KEYS[:8])
    lease, got = pool.match("b", KEYS[:8], stage=0)
    assert pool.directory.stats(pool.now)["nodes"]["b"]["slabs"] == 0
    more = pool.next_window("b", lease, 0, 4, by="worker")
    assert (blocks(more), staged(more), more.source) == (4, 4, got.source[: len(more.source)])
    pool.heartbeat("worker", pulled=more.staged)
    assert staged(pool.next_window("b", lease, 4, 8, by="worker")) == 4
    pool.release("b", lease)
    pool.heartbeat("b")
    assert blocks(pool.next_window("b", lease, 4, 8, by="worker")) == 0
    assert pool.count("staging", "b") == 0
    check_invariants(pool.directory)


def test_replicas_that_a_reader_has_passed_do_not_keep_its_window_full() -> None:
    pool = beside_a_window_of_three()
    pool.replicate("b", KEYS[:3])
    lease, got = pool.match("b", KEYS[:8])
    here, there = pool.directory.nodes["b"].index, pool.directory.nodes["a"].index
    assert [location[0] for location in unpack(got.source)] == 3 * [here] + 5 * [there] and staged(got) == 0
    more = pool.next_window("b", lease, 0)
    assert staged(more) == 0 and not more.passed
    more = pool.next_window("b", lease, 3)
    assert staged(more) == 3 and [location[0] for location in unpack(more.passed)] == 3 * [there]
    assert not pool.next_window("b", lease, 3).passed
    assert pool.next_window("b", lease, 3, again=True).passed == more.passed, "the answer was lost"
    more = pool.next_window("b", lease, 0)
    assert staged(more) == 3 and [location[0] for location in unpack(more.source)] == 8 * [there], "read again"
    pool.release("b", lease)
    check_invariants(pool.directory)


def test_a_reader_does_not_wait_for_what_it_holds_behind() -> None:
    pool = beside_a_window_of_three("abc")
    first, got = pool.match("b", KEYS[5:8])
    assert staged(got) == 3
    second, got = pool.match("b", KEYS[:8])
    assert (blocks(got), staged(got)) == (8, 0), "another reader has the window"
    lease, got = pool.match("b", KEYS[5:8])
    third = unpack(got.staged)
    assert staged(got) == 3 and staged(pool.next_window("b", second, 0)) == 0
    pool.release("b", first)
    pool.heartbeat("b", pulled=got.staged)
    assert pool.count("replica", "b") == 3 and staged(pool.next_window("b", second, 0)) == 0, f"{third} is held"
    pool.release("b", lease)
    more = pool.next_window("b", second, 0)
    assert [location[4] > 0 for location in unpack(more.staged)] == 3 * [True] + 5 * [False]
    pool.release("b", second)
    check_invariants(pool.directory)


def test_a_reader_that_others_hold_up_gets_the_slots_of_the_oldest_blocks() -> None:
    """Each of two readers may hold slots that the other one waits for."""
    pool = beside_a_window_of_three()
    pool.replicate("b", KEYS[:3])
    holder, lease = pool.match("b", KEYS[:3])[0], pool.match("b", KEYS[:8], stage=0)[0]
    for wait in (0.0, HELD_UP_S / 2):
        pool.now += wait
        assert staged(pool.next_window("b", lease, 3, 5)) == 0 and pool.count("ready", "b") == 13
    pool.now += HELD_UP_S
    more = pool.next_window("b", lease, 3, 5)
    assert staged(more) == 2 and pool.count("ready", "b") == 11 and pool.count("replica", "b") == 3
    assert blocks(pool.match("b", KEYS[100:113])[1]) == 11, "no parent went before its children"
    pool.heartbeat("b", pulled=more.staged)
    assert staged(pool.next_window("b", lease, 5, 8)) == 2, "what it has passed is free for it"
    for each in (holder, lease):
        pool.release("b", each)
    pool.heartbeat("b")
    check_invariants(pool.directory)


def test_replicas_that_a_long_match_finds_do_not_keep_its_window_full() -> None:
    pool = beside_a_window_of_three()
    pool.replicate("b", KEYS[5:8])
    lease, got = pool.match("b", KEYS[:8], stage=0)
    assert {location[0] for location in unpack(got.source)} == {pool.directory.nodes["a"].index}
    assert staged(pool.next_window("b", lease, 5)) == 3 and pool.count("replica", "b") == 3, (
        "they are read nevertheless"
    )
    assert staged(pool.next_window("b", lease, 0, 3)) == 3 and pool.count("replica", "b") == 0
    pool.release("b", lease)
    lease, got = pool.match("b", KEYS[:8])
    assert staged(got) == 3 and blocks(got) == 8


def test_pulled_blocks_stay_as_replicas_in_free_room_only_and_are_evicted_first() -> None:
    pool = Pool(slots=8, window=2, nodes="ab")
    pool.store("a", KEYS[:4])
    pool.replicate("b", KEYS[:2])
    assert (pool.count("replica", "b"), pool.count("ready", "b"), pool.count("staging", "b")) == (2, 0, 0)
    assert pool.store("b", KEYS[100:106]) == ["b"] * 6
    assert pool.count("replica", "b") == 2, "there was free room"
    pool.replicate("b", KEYS[2:4])
    assert pool.count("ready", "b") == 6, "a replica displaces no sole copy"
    assert pool.has(KEYS[:4]) == [True] * 4
    lease, got = pool.match("b", KEYS[2:4])
    assert got.staged == b"", "the replicas are read where they are"
    pool.release("b", lease)


def test_staging_slots_into_which_nothing_was_pulled_are_freed() -> None:
    pool = Pool(nodes="ab")
    pool.store("a", KEYS[:2])
    assert pool.read("b", KEYS[:1]) == 1
    assert pool.count("free", "b") == 8
