"""Which blocks are demoted to external tiers, and nodes' reports on demotions, by example."""

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import split, unpack
from helpers.directory.pool import KEYS, PAGE, Pool
from helpers.directory.tiers import heartbeat, in_external_tier, list_existing, tier, tiered

from raykv.directory.state import tier_catalog
from raykv.protocol.tiers import Demotions

pytestmark = pytest.mark.usefixtures("small_slabs")


def test_the_oldest_blocks_are_demoted_first_and_stay_in_memory() -> None:
    pool = tiered(share=0.5)
    pool.store("a", KEYS[:7])
    pool.read("a", KEYS[5:7])
    got = pool.demote("a")
    assert split(got.keys) == [KEYS[4], KEYS[3], KEYS[2], KEYS[1]], "4 of 8 slots; children before parents"
    assert [location[3] for location in unpack(got.source)] == [PAGE] * 4
    assert in_external_tier(pool, KEYS[:7]) == [False] * 7, "not before they are stored"
    assert not pool.demote("a", got).keys
    assert in_external_tier(pool, KEYS[:7]) == [False, True, True, True, True, False, False]
    assert all(pool.has(KEYS[:7])) and tier(pool)["demoted"] == 4


def test_a_block_in_the_tier_is_not_demoted_again() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:3])
    assert pool.demote_all("a") == [KEYS[2], KEYS[1], KEYS[0]]
    pool.read("a", KEYS[:3])
    pool.store("a", KEYS[3:5])
    assert pool.demote_all("a") == [KEYS[4], KEYS[3]]
    assert pool.demote_all("a", whole=True) == []


def test_a_share_of_the_slots_is_kept_free_or_clean() -> None:
    pool = tiered(share=0.25)
    pool.store("a", KEYS[:5])
    assert pool.demote_all("a") == [], "two slots are free beside the window"
    pool.store("a", KEYS[5:6])
    assert len(pool.demote_all("a")) == 1
    pool.store("a", KEYS[6:7])
    assert len(pool.demote_all("a")) == 1
    pool.store("a", KEYS[100:101])  # takes the slot of a clean block
    assert len(pool.demote_all("a")) == 1


def test_a_clean_block_that_is_used_again_does_not_count() -> None:
    pool = tiered(share=0.25)
    pool.store("a", KEYS[:7])
    assert pool.demote_all("a") == [KEYS[6], KEYS[5]]
    pool.read("a", KEYS[6:7])
    assert pool.demote_all("a") == [KEYS[4]]


def test_blocks_with_too_few_matches_are_not_demoted() -> None:
    pool = tiered(min_hits=2, share=1.0)
    pool.store("a", KEYS[:5])
    for keys in (KEYS[:3], KEYS[1:4]):
        pool.read("a", keys)
        pool.read("a", KEYS[600:601])
    for key in KEYS[1:3]:
        pool.read("a", [key])
    assert sorted(pool.demote_all("a")) == KEYS[1:3]


def test_nothing_is_demoted_while_a_slab_is_spare_unless_everything_is_to_be() -> None:
    pool = Pool(slots=8, slabs=2, share=0.5)
    heartbeat(pool)
    list_existing(pool, [])
    pool.store("a", KEYS[:7])
    assert pool.directory.stats(pool.now)["nodes"]["a"]["spare_slabs"] == 1
    assert pool.demote_all("a") == []
    assert len(pool.demote_all("a", whole=True)) == 7


def test_a_slab_that_another_size_may_take_is_free_or_clean() -> None:
    pool = Pool(slots=8, slabs=2, share=0.25)
    heartbeat(pool)
    list_existing(pool, [])
    pool.store("a", KEYS[:3])
    pool.store("a", KEYS[100:102], size=2 * PAGE)
    assert sorted(pool.demote_all("a")) == [*KEYS[:3], *KEYS[100:102]], "though four slots of the first are free"
    pool.read("a", KEYS[100:102], size=2 * PAGE)
    for key in KEYS[200:220]:
        pool.store("a", [key], size=2 * PAGE)
    assert not any(pool.has(KEYS[:3])) and all(in_external_tier(pool, KEYS[:3]))


def test_one_answer_demotes_at_most_a_batch_but_at_least_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:7])
    monkeypatch.setattr(tier_catalog, "BATCH_BYTES", 3 * PAGE)
    got = pool.demote("a")
    assert len(split(got.keys)) == 3
    monkeypatch.setattr(tier_catalog, "BATCH_BYTES", 1)
    assert len(split(pool.demote("a", got).keys)) == 1


def test_nothing_is_demoted_before_the_tier_is_listed() -> None:
    pool = Pool(share=1.0)
    pool.store("a", KEYS[:3])
    assert heartbeat(pool)
    assert not pool.demote("a").keys
    list_existing(pool, [KEYS[1]], last=False)
    assert heartbeat(pool) and not pool.demote("a").keys
    list_existing(pool, [KEYS[2]])
    assert not heartbeat(pool)
    assert pool.demote_all("a") == [KEYS[0]]


def test_a_failed_demotion_is_tried_again() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:3])
    first = pool.demote("a")
    second = pool.demote("a", first, bytes([1, 0, 1]))
    assert split(second.keys) == [KEYS[1]]
    assert in_external_tier(pool, KEYS[:3]) == [True, False, True]
    assert not pool.demote("a", second).keys and all(in_external_tier(pool, KEYS[:3]))


def test_demotions_of_a_lost_answer_are_cancelled_at_the_next_call_and_tried_again() -> None:
    pool = tiered(share=0.5)
    pool.store("a", KEYS[:7])
    lost = pool.demote("a")
    got = pool.demote("a")
    assert got.keys == lost.keys and got.target != lost.target
    part = Demotions(got.source[:32], got.keys[:16], got.target[:32], b"", got.number)
    assert pool.demote("a", part).keys == got.keys[16:], "a block that is not reported was not stored"
    check_invariants(pool.directory)


def test_a_report_may_come_twice() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:3])
    got = pool.demote("a")
    assert not any(part for _ in range(3) for part in pool.demote("a", got)[:4])
    assert tier(pool)["demoted"] == tier(pool)["blocks"] == 3


def test_a_failed_demotion_is_deleted_unless_it_is_tried_again() -> None:
    """Otherwise bytes that were written before a store died or a tier failed would stay in the tier for ever."""
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:3])
    got = pool.demote("a")
    pool.directory.clear(pool.now)
    assert set(split(pool.demote("a", got, bytes([0, 1, 1])).to_delete)) == set(KEYS[:3])
    pool.store("a", KEYS[:3])
    got = pool.demote("a")
    assert not pool.demote("a", got, bytes(3)).to_delete, "it is written over"
    _, there = pool.match("a", KEYS[:1])
    pool.heartbeat("a", corrupt=there.source)
    assert split(pool.demote("a").to_delete) == KEYS[:1], "it is no longer in memory"


def test_a_block_stored_too_late_is_deleted_unless_it_was_demoted_again() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:2])
    late = pool.demote("a")
    got = pool.demote("a")  # the same blocks, for other slots
    pool.demote("a", got)
    assert not pool.demote("a", late).to_delete, "those bytes are those of the second answer"
    pool.directory.clear(pool.now)
    assert set(split(pool.demote("a").to_delete)) == set(KEYS[:2])
    assert set(split(pool.demote("a", late).to_delete)) == set(KEYS[:2]), "they may have been stored again"


def test_a_report_of_another_directorys_answer_is_ignored() -> None:
    pool = tiered()
    pool.store("a", KEYS[:7])
    got = pool.demote("a")
    pool.directory.remove_node("a", pool.now)
    pool.add("a")
    assert heartbeat(pool)
    list_existing(pool, [split(got.keys)[0]])
    assert not pool.demote("a", got).to_delete and tier(pool)["blocks"] == 1
