"""A reservation places blocks on the writer's node, on a node with room, or in place of old blocks."""

import numpy as np
import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import unpack
from helpers.directory.pool import KEYS, Pool


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
    pool.store("a", KEYS[10:17])  # ticks 8 to 14: b's coldest block is then idle for 13 ticks, a's for 6
    for _ in range(reads):  # after the reads, 67 and 60 ticks
        pool.read("b", KEYS[:6])
    assert pool.store("a", KEYS[20:21]) == [victim]


def test_reserve_holds_stored_keys_before_it_evicts() -> None:
    pool = Pool(slots=8)
    pool.store("a", KEYS[:7])
    hold, got = pool.reserve("a", [*KEYS[100:103], *KEYS[:7]])  # the oldest blocks are those of its own later keys
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
