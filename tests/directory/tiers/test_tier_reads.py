"""Blocks that are found in external tiers, by example."""

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import split, unpack
from helpers.directory.pool import KEYS, PAGE, Pool, blocks, staged
from helpers.directory.tiers import heartbeat, in_external_tier, list_existing, only_in_tier, tier, tiered

from raykv.directory import kernels
from raykv.directory.state import demotion_batch

pytestmark = pytest.mark.usefixtures("small_slabs")


def test_an_evicted_clean_block_is_read_from_the_tier() -> None:
    pool = tiered(window=2)
    only_in_tier(pool, KEYS[:6])
    lease, got = pool.match("a", KEYS[:6])
    assert (blocks(got), staged(got)) == (6, 2), "the rest of the window; other blocks get staging slots later"
    assert {location[0] for location in unpack(got.source)} == {tier(pool)["index"]}
    assert {location[3] for location in unpack(got.source)} == {PAGE}
    assert pool.directory.counters["external_hits"] == 6 and pool.directory.counters["remote_hits"] == 0
    more = pool.next_window("a", lease, 2)
    assert more.source == got.source[64:] and staged(more) == 2
    pool.release("a", lease)
    check_invariants(pool.directory)


def test_memory_is_read_before_a_tier() -> None:
    pool = tiered(nodes="ab")
    pool.store("a", KEYS[:2])
    pool.demote_all("a", whole=True)
    index_a = pool.directory.nodes["a"].index
    assert {location[0] for location in unpack(pool.match("b", KEYS[:2])[1].source)} == {index_a}
    assert pool.match("a", KEYS[:2])[1].staged == b""


def test_a_block_promoted_from_a_tier_is_a_primary_and_stays_in_the_tier() -> None:
    pool = tiered()
    only_in_tier(pool, KEYS[:1])
    ready = pool.count("ready")
    pool.replicate("a", KEYS[:1])
    assert (pool.count("ready"), pool.count("replica"), pool.count("free")) == (ready, 0, 1), "the oldest made room"
    assert pool.has(KEYS[:1]) == [True] and tier(pool)["blocks"] == 1
    assert pool.match("a", KEYS[:1])[1].staged == b""
    assert KEYS[0] not in pool.demote_all("a", whole=True), "it is clean"


def test_a_size_with_fewer_slots_than_its_window_evicts_one_block_for_each_promoted() -> None:
    pool = Pool(slots=4, window=8)
    heartbeat(pool)
    list_existing(pool, KEYS[:4])
    pool.replicate("a", KEYS[:2])
    assert pool.has(KEYS[:2]) == [True, True]
    pool.replicate("a", KEYS[2:3])
    assert pool.has(KEYS[:3]) == [True, False, True], "and not all, though none is beside the window"


def test_a_promotion_evicts_nothing_while_a_slab_is_spare() -> None:
    pool = Pool(slots=4, slabs=2, window=2)
    heartbeat(pool)
    list_existing(pool, KEYS[:4])
    pool.store("a", KEYS[10:12])
    pool.replicate("a", KEYS[:1])
    assert pool.has([KEYS[0], *KEYS[10:12]]) == [True] * 3 and pool.count("free") == 5


def test_a_block_in_a_tier_out_of_reach_is_stored_again() -> None:
    pool = Pool(slots=8, share=1.0)
    assert heartbeat(pool)
    list_existing(pool, KEYS[:2])
    heartbeat(pool, reached=False)
    assert pool.read("a", KEYS[:2]) == 0
    assert pool.store("a", KEYS[:2]) == ["a", "a"], "a slab is found for what is not in memory"
    heartbeat(pool)
    assert pool.demote_all("a") == [] and pool.read("a", KEYS[:2]) == 2


def test_a_block_read_from_the_tier_is_evicted_last_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = tiered(slabs=1)
    only_in_tier(pool, KEYS[:4])
    pool.read("a", [KEYS[3]])  # KEYS[3] was demoted first
    monkeypatch.setattr(demotion_batch, "KEYS_PER_CALL", 3)
    assert split(pool.demote("a", whole=True).to_delete) == [KEYS[2], KEYS[1], KEYS[0]]
    assert in_external_tier(pool, KEYS[3:4]) == [True]


def test_a_tier_that_a_node_does_not_reach_is_not_offered() -> None:
    pool = tiered()
    only_in_tier(pool, KEYS[:1])
    pool.store("a", KEYS[100:101])
    heartbeat(pool, reached=False)
    assert pool.read("a", KEYS[:1]) == 0 and pool.directory.locate_prefix(KEYS[0]) == (0, {})
    assert not pool.demote("a", whole=True).keys and tier(pool)["state"] == "down"
    heartbeat(pool)
    assert pool.read("a", KEYS[:1]) == 1 and tier(pool)["state"] == "up"


def test_a_tier_whose_owner_is_silent_is_not_offered() -> None:
    pool = tiered(nodes="ab")
    pool.store("a", KEYS[:1])
    pool.demote_all("a", whole=True)
    pool.store("b", KEYS[100:107])
    pool.store("a", KEYS[200:207])
    assert not any(pool.has(KEYS[:1])) and pool.read("b", KEYS[:1]) == 1
    pool.tick(4.0, alive="b")
    assert pool.read("b", KEYS[:1]) == 0
    heartbeat(pool, "a")  # this does not show that other nodes reach the tier
    assert pool.read("b", KEYS[:1]) == 0
    pool.tick(1.0)
    assert pool.read("b", KEYS[:1]) == 1


def test_a_tier_that_is_new_while_its_owner_is_silent_is_not_offered_either() -> None:
    pool = Pool(nodes="ab")
    pool.tick(4.0, alive="b")
    assert heartbeat(pool, "a")
    list_existing(pool, KEYS[:1], "a")
    assert pool.read("b", KEYS[:1]) == 0 and tier(pool)["state"] == "down"
    pool.tick(1.0)
    assert pool.read("b", KEYS[:1]) == 1


def test_a_corrupt_block_is_deleted_in_the_tier_and_not_matched_again() -> None:
    pool = tiered()
    only_in_tier(pool, KEYS[:2])
    lease, got = pool.match("a", KEYS[:2])
    pool.heartbeat("a", corrupt=got.source[:32])
    assert (pool.directory.counters["corrupt"], tier(pool)["blocks"]) == (1, 1)
    pool.release("a", lease)
    assert pool.read("a", KEYS[:2]) == 0
    assert split(pool.demote("a").to_delete) == KEYS[:1]


def test_a_cleared_slot_of_a_tier_is_freed_when_its_reader_vanishes() -> None:
    pool = tiered(slabs=1)
    only_in_tier(pool, KEYS[:1])
    pool.match("a", KEYS[:1])
    pool.directory.clear(pool.now)
    pool.tick(11.0)
    pool.store("a", KEYS[10:17])
    assert len(pool.demote("a", whole=True).keys) == 4 * 16


def test_demoting_everything_examines_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.demotion, "ROWS_EXAMINED", 2)
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:6])
    assert pool.demote_all("a", whole=True) == KEYS[5::-1]
    pool.directory.tier_catalog.refresh(pool.directory.nodes["a"].size_classes.values())
    pool.store("a", KEYS[6:7])
    assert split(pool.demote("a").keys) == [], "the oldest two are clean"
    pool.directory.tier_catalog.refresh(pool.directory.nodes["a"].size_classes.values())
    assert split(pool.demote("a", whole=True).keys) == KEYS[6:7]


def test_a_shared_tier_is_lost_once_however_many_nodes_report_it() -> None:
    pool = tiered(nodes="ab", shared=True, share=1.0)
    pool.store("a", KEYS[:2])
    pool.demote_all("a", whole=True)
    heartbeat(pool, "a", shared=True, lost=b"another")
    assert not any(in_external_tier(pool, KEYS[:2]))
    pool.demote_all("a", whole=True)
    heartbeat(pool, "b", shared=True, lost=b"another")
    assert all(in_external_tier(pool, KEYS[:2]))
    heartbeat(pool, "b", shared=True, lost=b"a third")
    assert not any(in_external_tier(pool, KEYS[:2]))
