"""A hold ends with a commit, a release or its client, and the directory frees or quarantines its slots."""

import struct

from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import unpack
from helpers.directory.pool import KEYS, PAGE, Pool, blocks

from raykv.directory.kernels import columns
from raykv.protocol.clients import Call, CommitRequest, MatchRequest, ReserveRequest
from raykv.protocol.stores import SweepResult


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
    for _ in range(2):  # the call is executed twice
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
