"""The directory's rules about eviction, staging, placement, leases and reservations, by example."""

import struct
from collections import OrderedDict
from random import Random

import numpy as np
import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import LOCATION, unpack
from helpers.directory.pool import KEYS, PAGE, Pool, blocks, staged
from helpers.directory.world.documents import DOCUMENTS

from raykv.directory.calls.readers import HELD_UP_S
from raykv.directory.kernels import columns
from raykv.directory.state.allocator import staging_window
from raykv.protocol.clients import Call, CommitRequest, MatchRequest, ReserveRequest
from raykv.protocol.stores import SweepResult

# ---------------------------------------------------------------------- locate_prefix


def test_locate_prefix_counts_every_copy_of_the_ready_prefix() -> None:
    pool = Pool(slots=8, window=2, nodes="ab")
    pool.store("a", KEYS[:3])
    pool.replicate("b", KEYS[:2])
    pool.store("b", KEYS[3:5])
    pool.store("a", KEYS[6:7])  # behind a gap
    hold, got = pool.reserve("a", KEYS[5:6])  # which is being written
    before = pool.directory.stats(pool.now)
    assert pool.directory.locate_prefix(b"".join(KEYS[:7])) == {"a": 3, "b": 4}
    assert pool.directory.locate_prefix(b"".join(KEYS[100:])) == pool.directory.locate_prefix(b"") == {}
    assert pool.directory.stats(pool.now) == before
    pool.commit("a", hold, got, KEYS[5:6])
    assert pool.directory.locate_prefix(b"".join(KEYS[:7])) == {"a": 5, "b": 4}
    pool.tick(4, alive="b")  # a is suspect: its rows are not offered
    assert pool.directory.locate_prefix(b"".join(KEYS[:7])) == {"b": 2}


def test_locate_prefix_does_not_touch_blocks() -> None:
    pool = Pool(slots=8, window=1)
    pool.store("a", KEYS[:4])
    pool.store("a", KEYS[100:103])
    pool.directory.locate_prefix(b"".join(KEYS[:4]))
    pool.store("a", KEYS[103:105])
    assert pool.has(KEYS[:4]) == [True, True, False, False]


# ---------------------------------------------------------------------- stored


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


# ---------------------------------------------------------------------- eviction


def test_a_match_touches_its_blocks_last_to_first_so_children_go_before_parents() -> None:
    pool = Pool(slots=8, window=1)  # 7 blocks fit beside the window
    pool.store("a", KEYS[:7])
    pool.store("a", KEYS[100:102])
    assert pool.has(KEYS[:7]) == [True] * 5 + [False] * 2
    assert pool.read("a", KEYS[:7]) == 5
    pool.store("a", KEYS[102:106])
    assert pool.has(KEYS[:7]) == [True] * 3 + [False] * 4


def test_leased_blocks_are_not_evicted_and_released_ones_are() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    lease, _ = pool.match("a", KEYS[:7])
    _, got = pool.reserve("a", KEYS[100:103])
    assert got.covered == 0 and not got.locations
    pool.release("a", lease)
    assert pool.store("a", KEYS[110:112]) == ["a", "a"]
    assert pool.has(KEYS[:7]) == [True] * 5 + [False] * 2


def test_with_locality_1_the_cluster_is_one_lru() -> None:
    for seed in range(5):
        rng = Random(seed)
        pool = Pool(slots=16, window=2, nodes="abc", locality=1.0)
        lru: OrderedDict[bytes, None] = OrderedDict()
        documents = [keys for size in DOCUMENTS for keys in DOCUMENTS[size]]
        for _ in range(400):
            keys = rng.choice(documents)[: rng.randint(1, 12)]
            node = rng.choice("abc")
            left = list(keys)  # a call grants no more than its window
            while left:
                hold, got = pool.reserve(node, keys)
                pool.commit(node, hold, got, keys)
                left = keys[got.covered :]
                assert got.covered
            new = [key for key in keys if key not in lru]
            for key in reversed(keys):
                if key in lru:
                    lru.move_to_end(key)
            for _ in range(len(lru) + len(new) - 3 * 14):
                lru.popitem(last=False)
            for key in reversed(keys):
                lru[key] = None
                lru.move_to_end(key)
            assert pool.keys() == set(lru)


def test_no_parent_is_evicted_before_its_children() -> None:
    for nodes, locality in (("a", 1.5), ("abc", 1.0)):
        rng = Random(3)
        pool = Pool(slots=16, window=2, nodes=nodes, locality=locality)
        documents = [keys for size in DOCUMENTS for keys in DOCUMENTS[size]]
        for _ in range(400):
            keys, node = rng.choice(documents)[: rng.randint(1, 12)], rng.choice(nodes)
            if rng.random() < 0.5:
                pool.read(node, keys)
            else:
                pool.store(node, keys)
            there = pool.keys()
            for document in documents:
                found = [key in there for key in document]
                assert found == sorted(found, reverse=True)


# ---------------------------------------------------------------------- staging and replicas


def test_the_staging_window_is_a_fiftieth_but_no_less_than_256_mib_nor_more_than_an_eighth() -> None:
    assert staging_window(100 << 30) == (100 << 30) // 50
    assert staging_window(4 << 30) == 256 << 20
    assert staging_window(1 << 30) == 128 << 20


def test_a_match_longer_than_the_window_streams_through_it() -> None:
    pool = Pool(slots=16, window=3, nodes="ab")
    pool.store("a", KEYS[:8])
    pool.store("b", KEYS[100:113])
    lease, got = pool.match("b", KEYS[:8])
    assert (blocks(got), staged(got)) == (8, 3)
    for first in (3, 6, 0, 5):  # and again
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
    pool = Pool(slots=16, window=3, nodes="ab")
    pool.store("a", KEYS[:8])
    pool.store("b", KEYS[100:113])
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
    pool = Pool(slots=16, window=3, nodes="abc")
    pool.store("a", KEYS[:8])
    pool.store("b", KEYS[100:113])
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
    """Two readers may each hold what the other one waits for."""
    pool = Pool(slots=16, window=3, nodes="ab")
    pool.store("a", KEYS[:8])
    pool.store("b", KEYS[100:113])
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
    pool = Pool(slots=16, window=3, nodes="ab")
    pool.store("a", KEYS[:8])
    pool.store("b", KEYS[100:113])
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


# ---------------------------------------------------------------------- placement


def test_a_block_is_stored_on_its_writers_node_then_on_any_with_room_then_evicts() -> None:
    pool = Pool(slots=8, window=4, nodes="ab")
    assert pool.store("a", KEYS[:4]) == ["a"] * 4
    assert pool.store("a", KEYS[4:8]) == ["b"] * 4
    assert pool.store("a", KEYS[8:10]) == ["a"] * 2
    assert pool.has(KEYS[:10]) == [True] * 2 + [False] * 2 + [True] * 6


@pytest.mark.parametrize(("locality", "reads", "victim"), [(1.0, 9, "b"), (1.5, 9, "a"), (1.5, 0, "b"), (2.5, 0, "a")])
def test_another_node_evicts_only_blocks_idle_locality_times_as_long(locality: float, reads: int, victim: str) -> None:
    pool = Pool(slots=8, window=1, nodes="ab", locality=locality)
    pool.store("b", KEYS[:7])  # ticks 1 to 7
    pool.store("a", KEYS[10:17])  # 8 to 14: b's coldest is idle 13 ticks, a's own 6
    for _ in range(reads):  # and after these 67 and 60
        pool.read("b", KEYS[:6])
    assert pool.store("a", KEYS[20:21]) == [victim]


def test_reserve_holds_stored_keys_before_it_evicts() -> None:
    pool = Pool(slots=8)
    pool.store("a", KEYS[:7])
    hold, got = pool.reserve("a", [*KEYS[100:103], *KEYS[:7]])  # its own later keys are the oldest
    assert got.covered == 0 and all(pool.has(KEYS[:7]))
    pool.release("a", hold)
    assert pool.store("a", [*KEYS[:5], *KEYS[100:102]]) == ["a", "a"]
    assert pool.has(KEYS[:7]) == [True] * 5 + [False] * 2


def test_a_key_that_comes_twice_in_a_batch_is_granted_once() -> None:
    pool = Pool()
    hold, got = pool.reserve("a", [KEYS[0], KEYS[1], KEYS[0]])
    assert np.frombuffer(got.indices, np.int32).tolist() == [0, 1]
    assert got.covered == 3
    assert pool.commit("a", hold, got, KEYS) == 2
    assert pool.read("a", [KEYS[0], KEYS[0]]) == 2
    check_invariants(pool.directory)


def test_keys_that_another_client_writes_are_left_out() -> None:
    pool = Pool(nodes="ab")
    pool.reserve("a", KEYS[:2])
    _, got = pool.reserve("b", KEYS[:3])
    assert np.frombuffer(got.indices, np.int32).tolist() == [2]
    assert pool.match("b", KEYS[:1])[1].source == b"", "no reader is sent to what is not committed"


def test_a_block_written_elsewhere_is_offered_there() -> None:
    pool = Pool(slots=4, window=2, nodes="ab")
    pool.store("a", KEYS[:2])
    hold, got = pool.reserve("a", KEYS[2:4])
    assert [pool.name(location[0]) for location in unpack(got.locations)] == ["b", "b"]
    assert [pool.name(location[0]) for location in unpack(got.staged)] == ["a", "a"]
    pool.commit("a", hold, got, KEYS[2:4])
    assert (pool.count("staging", "a"), pool.count("ready", "b")) == (0, 2)


# ---------------------------------------------------------------------- commits, holds, clients


def test_commit_is_idempotent() -> None:
    pool = Pool()
    hold, got = pool.reserve("a", KEYS[:2])
    assert [pool.commit("a", hold, got, KEYS) for _ in range(3)] == [2, 2, 2]
    assert pool.directory.counters["stored"] == 2


def test_arrays_of_unequal_length_change_nothing() -> None:
    pool = Pool()
    hold, got = pool.reserve("a", KEYS[:2])
    for locations, keys, written in (
        (got.locations, KEYS[0], b"\1\1"),
        (got.locations, KEYS[0] + KEYS[1], b"\1"),
        (got.locations[:32], KEYS[0] + KEYS[1], b"\1\1"),
    ):
        request = CommitRequest(hold, locations, keys, written)
        assert pool.directory.commit(pool.call("a"), request, pool.now).done == 0
    pool.directory.sweep_result(SweepResult(got.locations, b"\1\1", bytes(16), bytes(16)), pool.now)
    assert pool.count("writing") == 2
    assert pool.commit("a", hold, got, KEYS) == 2


def test_a_failed_write_is_quarantined_and_one_that_was_not_reported_is_freed() -> None:
    pool = Pool()
    hold, got = pool.reserve("a", KEYS[:3])
    pool.commit("a", hold, got._replace(indices=got.indices[:8], locations=got.locations[:64]), KEYS, failed=(1,))
    assert [pool.count(state) for state in ("ready", "quarantined", "free")] == [1, 1, 6]


def test_a_failed_write_in_a_slot_of_another_reservation_is_ignored() -> None:
    pool = Pool(nodes="ab")
    hold, got = pool.reserve("a", KEYS[:1])
    pool.commit("b", hold + 1000, got, KEYS, failed=(0,))
    assert pool.count("writing") == 1
    assert pool.commit("a", hold, got, KEYS) == 1


def test_a_hold_that_is_not_listed_is_freed_unless_the_call_is_older() -> None:
    pool = Pool()
    hold, _ = pool.reserve("a", KEYS[:2])
    pool.directory.client_heartbeat(Call(ord("a"), pool.seq - 1), pool.now)
    assert pool.count("writing") == 2, "a call that was sent earlier could not list it"
    pool.release("a", hold)
    assert pool.count("free") == 8


def test_an_id_that_is_used_again_ends_its_hold() -> None:
    pool = Pool()
    pool.store("a", KEYS[:2])
    call = pool.call("a")
    for _ in range(2):  # a call that was executed twice
        pool.directory.match(call, MatchRequest(77, "a", b"".join(KEYS[:2]), PAGE, 2), pool.now)
        pool.directory.reserve(call, ReserveRequest(78, "a", b"".join(KEYS[:4]), 0, PAGE), pool.now)
    check_invariants(pool.directory)
    assert pool.count("writing") == 2
    pool.directory.disconnect(ord("a"), pool.now)
    assert [pool.count(state) for state in ("ready", "free")] == [2, 6]
    assert not pool.directory.c.rows["holds"].any()


def test_a_client_that_leaves_in_order_leaves_free_slots() -> None:
    pool = Pool(nodes="ab")
    pool.store("b", KEYS[:2])
    pool.reserve("a", KEYS[10:12])
    pool.match("a", KEYS[:2])
    pool.directory.disconnect(ord("a"), pool.now)
    assert pool.count("free", "a") == 8


def test_slots_of_a_writer_that_vanishes_are_quarantined_until_a_sweep() -> None:
    pool = Pool(slots=8)
    keys = KEYS[:3]
    hold, got = pool.reserve("a", keys)
    pool.tick(11.0)
    assert pool.count("quarantined") == 3
    assert pool.commit("a", hold, got, keys) == 0, "too late"
    answer = pool.directory.heartbeat("a", 1, pool.now)
    assert answer
    locations = unpack(answer.sweep)
    assert sorted(location[5] for location in locations) == sorted(location[5] for location in unpack(got.locations))
    gens = struct.pack("<3Q", *(location[5] for location in locations))
    by_gen = {location[5]: key for location, key in zip(unpack(got.locations), keys, strict=True)}
    found = b"".join(by_gen[location[5]] for location in locations)
    pool.directory.sweep_result(SweepResult(answer.sweep, bytes([0, 1, 2]), found, gens), pool.now)
    assert [pool.count(state) for state in ("quarantined", "free", "ready")] == [1, 6, 1]
    assert pool.has([by_gen[locations[2][5]]]) == [True]
    pool.directory.sweep_result(SweepResult(answer.sweep, bytes([1, 1, 1]), found, gens), pool.now)
    assert [pool.count(state) for state in ("quarantined", "free", "ready")] == [0, 7, 1]


def test_staging_slots_of_a_client_that_vanishes_are_quarantined_unless_shared() -> None:
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[:2])
    pool.match("b", KEYS[:2])
    pool.directory.match(Call(99, 1), MatchRequest(5, "b", KEYS[0], PAGE, 1), pool.now)
    for _ in range(11):
        pool.tick(1.0)
        pool.directory.client_heartbeat(Call(99, 2, struct.pack("<Q", 5)), pool.now)
    assert (pool.count("staging", "b"), pool.count("quarantined", "b")) == (1, 1)


def test_a_cleared_slot_whose_writer_vanishes_is_quarantined() -> None:
    pool = Pool()
    pool.reserve("a", KEYS[:2])
    pool.directory.clear(pool.now)
    assert pool.count("dropped") == 2
    pool.tick(11.0)
    assert (pool.count("dropped"), pool.count("quarantined")) == (0, 2), "the writer may still write"


def test_a_corrupt_block_is_forgotten_and_its_replica_serves() -> None:
    pool = Pool(nodes="ab")
    pool.store("a", KEYS[:1])
    pool.replicate("b", KEYS[:1])
    lease, got = pool.match("a", KEYS[:1])
    pool.heartbeat("a", corrupt=got.source)
    assert pool.count("dropped", "a") == 1, "the slot is still being read"
    assert (pool.count("ready", "b"), pool.count("replica", "b")) == (1, 0)
    pool.release("a", lease)
    assert pool.count("free", "a") == 8


def test_a_row_is_held_no_more_often_than_it_can_count() -> None:
    pool = Pool()
    pool.store("a", KEYS[:1])
    lease, got = pool.match("a", KEYS[:1] * 70_000)
    assert blocks(got) == columns.HOLDS_MAX
    pool.release("a", lease)
    assert pool.read("a", KEYS[:1]) == 1
    check_invariants(pool.directory)
