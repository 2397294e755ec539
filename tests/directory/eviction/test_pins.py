"""Blocks that a client pins, forgets or swaps out, by example."""

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import split
from helpers.directory.pool import KEYS, Pool, blocks
from helpers.directory.tiers import heartbeat, in_external_tier, list_existing, only_in_tier, tiered

from raykv.directory.kernels import columns
from raykv.protocol.stores import Inventory

pytestmark = pytest.mark.usefixtures("small_slabs")


def pin(pool: Pool, keys: list[bytes], node: str = "a") -> int:
    return pool.directory.pin(pool.call(node), b"".join(keys), pool.now).done


def unpin(pool: Pool, keys: list[bytes], node: str = "a") -> None:
    pool.directory.unpin(pool.call(node), b"".join(keys), pool.now)


def forget(pool: Pool, keys: list[bytes], node: str = "a") -> None:
    pool.directory.forget(pool.call(node), b"".join(keys), pool.now)


def preempted(pool: Pool, keys: list[bytes], node: str = "a") -> int:
    return pool.directory.preempted(pool.call(node), b"".join(keys), pool.now).done


def test_a_pinned_block_survives_eviction_until_it_is_unpinned() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    assert pin(pool, [*KEYS[5:7], *KEYS[100:103]]) == 2 and pin(pool, KEYS[5:6]) == 1
    pool.store("a", KEYS[10:15])
    pool.tick(11.0)  # the client that pinned the block is gone
    pool.store("a", KEYS[20:25])
    assert pool.has(KEYS[:7]) == [False] * 5 + [True] * 2
    unpin(pool, KEYS[5:7])
    pool.store("a", KEYS[30:37])
    assert not any(pool.has(KEYS[:7])) and pool.directory.stats(pool.now)["pinned"] == 0
    check_invariants(pool.directory)


def test_a_pin_moves_to_another_copy_when_its_node_dies() -> None:
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[:2])
    pool.replicate("b", KEYS[:1])
    assert pin(pool, KEYS[:2], "b") == 2
    pool.directory.remove_node("a", pool.now)
    assert list(pool.directory.pins) == KEYS[:1]
    check_invariants(pool.directory)
    pool.store("b", KEYS[10:17])
    assert pool.has(KEYS[:1]) == [True]


def test_a_pin_moves_to_the_copy_in_the_tier_when_the_block_is_found_corrupt() -> None:
    pool = tiered(slabs=1)
    pool.store("a", KEYS[:1])
    pool.demote_all("a", whole=True)
    pin(pool, KEYS[:1])
    _, got = pool.match("a", KEYS[:1])
    pool.heartbeat("a", corrupt=got.source)
    assert pool.has(KEYS[:1]) == [False]
    for first in (10, 20):
        pool.store("a", KEYS[first : first + 5])
        pool.demote_all("a", whole=True)
    assert in_external_tier(pool, KEYS[:1]) == [True], "others were evicted there"
    check_invariants(pool.directory)


def test_a_block_that_is_only_in_the_tier_can_be_pinned_there() -> None:
    pool = tiered(slabs=1)
    only_in_tier(pool, KEYS[:4])
    assert pin(pool, KEYS[1:2]) == 1
    got = pool.demote("a", whole=True)
    assert set(split(got.to_delete)) == {KEYS[0], KEYS[2], KEYS[3]} and len(split(got.keys)) == 3


def test_pins_take_half_of_memory() -> None:
    """Even a client that pins all its blocks leaves room for others."""
    pool = Pool(slots=8)
    pool.store("a", KEYS[:7])
    assert pin(pool, KEYS[:3]) == 3 and pin(pool, KEYS[2:7]) == 2
    assert list(pool.directory.pins) == KEYS[:4]
    assert pin(pool, KEYS[:7]) == 4 and pin(pool, KEYS[4:7]) == 0
    assert list(pool.directory.pins) == KEYS[:4], "it is as it was"
    pool.store("a", KEYS[10:20])
    assert pool.has(KEYS[:4]) == [True] * 4 and not any(pool.has(KEYS[4:7]))
    assert sum(pool.has(KEYS[10:20])) == 3
    pool.directory.unpin(pool.call("a"), KEYS[0], pool.now)
    assert pin(pool, KEYS[10:13]) == 1


def test_a_pin_stays_where_a_writer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.directory.calls.clients.PINNED_SHARE", 1.0)
    pool = Pool()
    pool.store("a", KEYS[:7])
    assert pin(pool, KEYS[:6]) == 6
    pool.store("a", KEYS[10:20])
    assert pool.has(KEYS[:6]) == [True] * 6 and len(pool.directory.pins) == 6
    refused = pool.directory.stats(pool.now)["refused"]
    lease, _ = pool.match("a", KEYS[:6])  # a reader holds the blocks, too
    _, got = pool.reserve("a", KEYS[30:33])
    assert (got.covered, len(pool.directory.pins)) == (1, 6)
    assert pool.reserve("a", KEYS[40:43])[1].covered == 0 and len(pool.directory.pins) == 6
    pool.release("a", lease)
    assert pool.reserve("a", KEYS[40:42])[1].covered == 0 and list(pool.directory.pins) == KEYS[:6]
    assert pool.has(KEYS[:6]) == [True] * 6
    assert pool.directory.stats(pool.now)["refused"] == refused + 5


def test_clear_ends_pins() -> None:
    pool = Pool()
    pool.store("a", KEYS[:3])
    pin(pool, KEYS[:3])
    pool.directory.clear(pool.now)
    assert pool.count("free") == 8 and not pool.directory.pins
    check_invariants(pool.directory)


def test_a_pin_ends_with_a_block_that_a_header_vetoes() -> None:
    pool = Pool()
    _, got = pool.reserve("a", KEYS[:1])
    pool.store("a", KEYS[1:2])
    pool.commit("a", 1, got, KEYS[:1])
    pin(pool, KEYS[:1])
    zero = bytes(4)
    pool.adopt("a", Inventory(got.locations, KEYS[9], zero, zero, b""))  # the header has another key
    assert not pool.directory.pins and pool.count("free") == 7
    check_invariants(pool.directory)


def test_every_copy_of_a_forgotten_block_is_freed_at_once() -> None:
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[:3])
    pool.replicate("b", KEYS[:2])
    pin(pool, KEYS[:1])
    forget(pool, [*KEYS[:2], KEYS[0], KEYS[50]])
    assert pool.has(KEYS[:3]) == [False, False, True] and not pool.directory.pins
    assert (pool.count("free", "a"), pool.count("free", "b")) == (7, 8)
    check_invariants(pool.directory)


def test_a_forgotten_block_that_is_leased_is_freed_when_the_lease_ends() -> None:
    pool = Pool()
    pool.store("a", KEYS[:2])
    lease, _ = pool.match("a", KEYS[:2])
    forget(pool, KEYS[:2])
    assert pool.has(KEYS[:2]) == [False, False] and pool.count("dropped") == 2
    assert blocks(pool.match("a", KEYS[:2])[1]) == 0
    pool.release("a", lease)
    assert pool.count("free") == 8


def test_a_block_being_written_is_not_forgotten() -> None:
    pool = Pool()
    hold, got = pool.reserve("a", KEYS[:1])
    forget(pool, KEYS[:1])
    assert pool.commit("a", hold, got, KEYS[:1]) == 1 and pool.has(KEYS[:1]) == [True]


def test_a_forgotten_block_is_deleted_in_the_tier() -> None:
    pool = Pool()
    heartbeat(pool)
    list_existing(pool, KEYS[:2])
    forget(pool, KEYS[:1])
    assert split(pool.demote("a").to_delete) == KEYS[:1] and in_external_tier(pool, KEYS[:2]) == [False, True]


def test_a_swapped_request_stays_until_it_is_forgotten() -> None:
    pool = Pool()
    pool.store("a", KEYS[:5])
    assert preempted(pool, KEYS[:5]) == 5
    pool.store("a", KEYS[10:17])
    assert all(pool.has(KEYS[:5])) and pool.count("ready") == 7
    forget(pool, KEYS[:5])
    assert not any(pool.has(KEYS[:5])) and not pool.directory.pins
    assert preempted(pool, KEYS[10:12]) == 2
    assert pool.directory.stats(pool.now)["num_cumulative_preemption"] == 2


def test_a_swapped_request_of_which_a_block_is_missing_is_forgotten() -> None:
    pool = Pool()
    pool.store("a", KEYS[:5])
    assert preempted(pool, KEYS[:6]) == 0
    assert not any(pool.has(KEYS[:5])) and pool.count("free") == 8


@pytest.mark.parametrize("vanishes", [True, False])
def test_a_swapped_request_is_forgotten_when_its_engine_is_gone(vanishes: bool) -> None:
    pool = Pool(nodes="ab")
    pool.store("a", KEYS[:3])
    assert preempted(pool, KEYS[:3], "b") == 3
    if vanishes:
        pool.tick(11.0)
        pool.directory.stats(pool.now)
    else:
        pool.directory.disconnect(ord("b"), pool.now)
    assert not any(pool.has(KEYS[:3])) and not pool.directory.pins


def test_pinned_blocks_are_demoted_last_and_then_pinned_in_the_tier() -> None:
    pool = tiered(slabs=2)
    pool.store("a", KEYS[:7])
    assert preempted(pool, KEYS[:6]) == 6
    assert pool.demote_all("a") == [KEYS[6], KEYS[0]], "a quarter is to be free or clean: that is two"
    assert pool.store("a", KEYS[10:12]) == ["a"] * 2
    assert pool.has(KEYS[:7]) == [False] + [True] * 5 + [False]
    pool.demote_all("a", whole=True)
    assert all(in_external_tier(pool, KEYS[:6]))
    for first in range(100, 170, 7):
        pool.store("a", KEYS[first : first + 7])
        pool.demote_all("a", whole=True)
    assert not any(pool.has(KEYS[:6])) and all(in_external_tier(pool, KEYS[:6])), "others were evicted there"
    forget(pool, KEYS[:6])
    assert not any(in_external_tier(pool, KEYS[:6])) and not pool.directory.pins


def test_a_block_that_is_already_in_the_tier_is_pinned_there() -> None:
    pool = tiered(slabs=2)
    pool.store("a", KEYS[:6])
    pool.demote_all("a", whole=True)
    assert preempted(pool, KEYS[:6]) == 6
    assert pool.store("a", KEYS[10:17]) == ["a"] * 7, "memory is for others"
    assert not any(pool.has(KEYS[:6])) and all(in_external_tier(pool, KEYS[:6]))


def test_blocks_can_be_pulled_from_a_tier_while_all_others_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.directory.calls.clients.PINNED_SHARE", 1.0)
    pool = tiered(slots=8, slabs=4, window=2)
    only_in_tier(pool, KEYS[:4])
    for key in KEYS[900:907]:
        forget(pool, [key])
    pool.store("a", KEYS[10:16])
    assert pin(pool, KEYS[10:16]) == 6
    for key in KEYS[:4]:  # as if each had a reader of its own
        lease, got = pool.match("a", [key])
        assert blocks(got) == 1
        pool.heartbeat("a", pulled=got.staged)
        pool.release("a", lease)
    check_invariants(pool.directory)


def test_a_block_that_is_forgotten_while_it_is_demoted_is_deleted_in_the_tier() -> None:
    pool = tiered()
    pool.store("a", KEYS[:2])
    demoting = pool.demote("a", whole=True)
    forget(pool, KEYS[:1])
    assert not in_external_tier(pool, KEYS[:1], columns.DEMOTING)[0]
    assert split(pool.demote("a", demoting).to_delete) == KEYS[:1] and in_external_tier(pool, KEYS[:2]) == [False, True]
    check_invariants(pool.directory)


def test_leased_blocks_are_demoted_too_when_everything_is() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:5])
    lease, _ = pool.match("a", KEYS[2:5])
    assert set(pool.demote_all("a", whole=True)) == set(KEYS[:5])
    pool.release("a", lease)
    check_invariants(pool.directory)
