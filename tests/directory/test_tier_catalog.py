"""External tiers: which blocks are demoted, which are found there, and which keys are deleted there, by example."""

from random import Random

import pytest
from helpers.directory_checks import check_invariants
from helpers.directory_pool import KEYS, PAGE, Pool, blocks, staged
from helpers.directory_tiers import SLAB, heartbeat, in_external_tier, list_existing, only_in_tier, tier, tiered
from helpers.oracle.slots import split, unpack
from helpers.world import DOCUMENTS

from raykv.directory import demotion, kernels, tier_catalog
from raykv.directory.kernels import columns
from raykv.protocol import ArenaDescription, Call, DemotionReport, Demotions, ExistingBlocks, TierReport

NOTHING = Demotions(b"", b"", b"", b"", 0)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_catalog, "slab_bytes", lambda _: SLAB)


# ---------------------------------------------------------------------- which blocks are demoted


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
    pool.store("a", KEYS[100:101])  # in the place of a clean block
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


# ---------------------------------------------------------------------- reports


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
    """Else bytes that a store wrote before it died, or a tier before it failed, would stay there for ever."""
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
    got = pool.demote("a")  # the same blocks, in other slots
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


# ---------------------------------------------------------------------- blocks in the tier


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
    pool.read("a", [KEYS[3]])  # which was demoted first
    monkeypatch.setattr(demotion, "KEYS_PER_CALL", 3)
    assert split(pool.demote("a", whole=True).to_delete) == [KEYS[2], KEYS[1], KEYS[0]]
    assert in_external_tier(pool, KEYS[3:4]) == [True]


def test_a_tier_that_a_node_does_not_reach_is_not_offered() -> None:
    pool = tiered()
    only_in_tier(pool, KEYS[:1])
    pool.store("a", KEYS[100:101])
    heartbeat(pool, reached=False)
    assert pool.read("a", KEYS[:1]) == 0 and pool.directory.locate_prefix(KEYS[0]) == {}
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
    heartbeat(pool, "a")  # which does not show that others can read it
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
    pool.directory._tier_catalog.refresh(pool.directory.nodes["a"].size_classes.values())
    pool.store("a", KEYS[6:7])
    assert split(pool.demote("a").keys) == [], "the oldest two are clean"
    pool.directory._tier_catalog.refresh(pool.directory.nodes["a"].size_classes.values())
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


# ---------------------------------------------------------------------- keys to delete


def test_a_block_evicted_from_the_tier_is_deleted_unless_it_is_demoted_again() -> None:
    pool = tiered(slabs=1)
    pool.store("a", KEYS[:5])
    got = pool.demote("a", whole=True)
    assert split(got.keys) == [KEYS[4], KEYS[3], KEYS[2], KEYS[1]], "as many as there are slots"
    pool.read("a", KEYS[4:5])  # the youngest in memory, and the oldest in the tier
    got = pool.demote("a", got, whole=True)  # KEYS[4] is evicted for KEYS[0], then another for KEYS[4]
    assert split(got.keys) == [KEYS[0], KEYS[4]]
    assert len(split(got.to_delete)) == 1 and split(got.to_delete)[0] in KEYS[1:4]
    assert not pool.demote("a", got).to_delete, "each deletion is asked for once"
    assert tier(pool)["evicted"] == 2


def test_a_block_that_is_in_memory_too_is_not_the_first_evicted_from_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = tiered(slabs=1)
    pool.store("a", KEYS[:4])
    assert pool.demote_all("a", whole=True) == [KEYS[3], KEYS[2], KEYS[1], KEYS[0]]
    pool.read("a", KEYS[2:4])
    pool.store("a", KEYS[900:905])
    assert pool.has(KEYS[:4]) == [False, False, True, True]
    monkeypatch.setattr(demotion, "KEYS_PER_CALL", 1)
    assert split(pool.demote("a", whole=True).to_delete) == [KEYS[1]]


def test_a_slot_of_a_tier_that_is_read_is_not_taken() -> None:
    pool = tiered(slabs=1, window=2)
    only_in_tier(pool, KEYS[:4])
    lease, _ = pool.match("a", KEYS[2:4])
    got = pool.demote("a", whole=True)
    assert set(split(got.to_delete)) == set(KEYS[:2]) and len(split(got.keys)) == 2
    pool.release("a", lease)
    check_invariants(pool.directory)


def test_sizes_share_a_tier_and_one_without_a_slot_takes_the_oldest_slab() -> None:
    pool = Pool(slots=8, slabs=2, share=1.0)
    assert heartbeat(pool, slabs=2)
    list_existing(pool, [])
    pool.store("a", KEYS[:7])
    pool.store("a", KEYS[100:102], size=2 * PAGE)
    got = pool.demote("a")
    assert split(got.keys) == KEYS[6::-1], "and all slots are being written"
    got = pool.demote("a", got)
    assert split(got.keys) == [KEYS[101], KEYS[100]] and set(split(got.to_delete)) == set(KEYS[3:7])
    pool.demote("a", got)
    assert all(in_external_tier(pool, [*KEYS[:3], *KEYS[100:102]])) and not any(in_external_tier(pool, KEYS[3:7]))
    assert tier(pool)["bytes_used"] == 3 * 2 * PAGE + 2 * 3 * PAGE


def test_listed_blocks_beyond_the_capacity_are_deleted() -> None:
    pool = Pool()
    assert heartbeat(pool, slabs=1)
    list_existing(pool, KEYS[:3], last=False)
    list_existing(pool, [KEYS[2], *KEYS[3:6]])
    assert in_external_tier(pool, KEYS[:6]) == [True] * 4 + [False] * 2
    assert split(pool.demote("a").to_delete) == KEYS[4:6], "and no key that was listed twice"
    list_existing(pool, KEYS[10:12])
    assert not any(in_external_tier(pool, KEYS[10:12])), "the tier was listed by then"


def test_blocks_that_fit_in_no_slab_of_a_tier_are_deleted() -> None:
    pool = Pool()
    assert heartbeat(pool, slabs=1)
    for size, keys in ((SLAB, KEYS[:1]), (0, KEYS[1:2]), (-1 << 40, KEYS[2:3])):
        list_existing(pool, keys, size=size, last=False)
    list_existing(pool, [])
    assert split(pool.demote("a").to_delete) == KEYS[:3] and tier(pool)["blocks"] == 0


def test_a_key_that_two_tiers_hold_is_known_in_both() -> None:
    pool = Pool(nodes="ab")
    for node in "ab":
        assert heartbeat(pool, node)
        list_existing(pool, KEYS[:1], node)
    assert (tier(pool, "a")["blocks"], tier(pool, "b")["blocks"]) == (1, 1), (
        "else nobody would ever delete the other copy"
    )
    pool.directory.remove_node("b", pool.now)
    assert in_external_tier(pool, KEYS[:1]) == [True]
    check_invariants(pool.directory)


def test_clear_deletes_all_blocks_of_a_tier_and_those_listed_later() -> None:
    pool = Pool(nodes="ab", share=1.0)
    assert heartbeat(pool, "a") and heartbeat(pool, "b")
    list_existing(pool, KEYS[:3], "a")
    list_existing(pool, KEYS[10:12], "b", last=False)
    pool.store("a", KEYS[20:22])
    demoting = pool.demote("a")
    pool.directory.clear(pool.now)
    list_existing(pool, KEYS[11:14], "b")
    assert not any(in_external_tier(pool, KEYS[:30]))
    assert split(pool.demote("b").to_delete) == KEYS[10:14]
    assert split(pool.demote("a", demoting).to_delete) == [*KEYS[:3], *split(demoting.keys)]
    pool.store("b", KEYS[12:14])
    assert pool.demote_all("b") == [KEYS[13], KEYS[12]], "and demotion goes on"


def test_deletions_of_a_lost_answer_are_repeated_unless_the_keys_were_demoted_since() -> None:
    pool = Pool(share=1.0)
    heartbeat(pool)
    list_existing(pool, KEYS[:3])
    pool.directory.clear(pool.now)
    assert sorted(split(pool.demote("a", lost=True).to_delete)) == KEYS[:3]
    again = pool.demote("a", lost=True)
    assert sorted(split(again.to_delete)) == KEYS[:3], "until somebody carries them out"
    pool.store("a", KEYS[:1])
    got = pool.demote("a", lost=True)
    assert split(got.keys) == KEYS[:1] and sorted(split(got.to_delete)) == KEYS[1:3], "the first is demoted again"
    got = pool.demote("a", got)  # stored, but the deletions were not carried out
    assert all(in_external_tier(pool, KEYS[:1])) and sorted(split(got.to_delete)) == KEYS[1:3]
    assert not pool.demote("a").to_delete, "and no more once the store has seen the answer"


def test_deletions_of_a_node_that_died_are_carried_out_by_another_in_a_shared_tier() -> None:
    pool = Pool(nodes="ab")
    assert heartbeat(pool, "a", shared=True) and not heartbeat(pool, "b", shared=True)
    list_existing(pool, KEYS[:3])
    pool.directory.clear(pool.now)
    assert len(split(pool.demote("a", lost=True).to_delete)) == 3 and not pool.demote("b").to_delete
    pool.directory.remove_node("a", pool.now)
    assert sorted(split(pool.demote("b").to_delete)) == KEYS[:3]


def test_one_answer_has_a_few_keys_to_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    heartbeat(pool)
    list_existing(pool, KEYS[:5])
    pool.directory.clear(pool.now)
    monkeypatch.setattr(tier_catalog, "KEYS_PER_CALL", 3)
    deletions = [split(pool.demote("a").to_delete) for _ in range(3)]
    assert list(map(len, deletions)) == [3, 2, 0] and sorted(deletions[0] + deletions[1]) == KEYS[:5]


# ---------------------------------------------------------------------- nodes


def test_a_tier_that_lost_its_content_is_forgotten_and_filled_again() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:5])
    pool.demote_all("a")
    assert not heartbeat(pool, lost=b"another"), "there is nothing to list"
    assert not any(in_external_tier(pool, KEYS[:5])) and all(pool.has(KEYS[:5]))
    assert sorted(pool.demote_all("a")) == KEYS[:5]


def test_a_lease_on_blocks_that_a_tier_lost_holds_nothing() -> None:
    pool = tiered()
    only_in_tier(pool, KEYS[:1])
    lease, _ = pool.match("a", KEYS[:1])
    heartbeat(pool, lost=b"another")
    check_invariants(pool.directory)
    assert blocks(pool.next_window("a", lease, 0)) == 0
    pool.release("a", lease)
    assert not pool.directory._size_classes.c.rows["holds"].any()


def test_blocks_and_demotions_of_a_tier_are_gone_with_its_owner() -> None:
    pool = tiered(nodes="ab", share=1.0)
    pool.store("a", KEYS[:4])
    pool.store("b", KEYS[10:13])
    pool.demote_all("a")
    pool.demote("b")
    pool.directory.remove_node("a", pool.now)
    assert list(pool.directory.stats(pool.now)["tiers"]) == ["b"]
    pool.directory.remove_node("b", pool.now)
    assert pool.directory.stats(pool.now)["keys"] == 0
    check_invariants(pool.directory)


def test_a_shared_tier_outlives_its_nodes_and_is_listed_by_one_at_a_time() -> None:
    pool = Pool(nodes="ab")
    assert heartbeat(pool, "a", shared=True) and not heartbeat(pool, "b", shared=True)
    list_existing(pool, KEYS[:2], "b", last=False)
    assert not any(in_external_tier(pool, KEYS[:2])), "a is the one that lists"
    list_existing(pool, KEYS[:2], "a", last=False)
    pool.directory.remove_node("a", pool.now)
    assert heartbeat(pool, "b", shared=True), "from the beginning, by another node"
    list_existing(pool, KEYS[:4], "b")
    assert all(in_external_tier(pool, KEYS[:4])) and pool.read("b", KEYS[:4]) == 4
    pool.directory.remove_node("b", pool.now)
    assert all(in_external_tier(pool, KEYS[:4]))
    pool.add("c")
    assert not heartbeat(pool, "c", shared=True) and pool.read("c", KEYS[:4]) == 4


def test_a_key_that_another_node_demotes_to_a_shared_tier_is_left_out() -> None:
    pool = tiered(nodes="ab", shared=True, share=1.0)
    pool.store("a", KEYS[:1])
    pool.replicate("b", KEYS[:1])
    pool.store("b", KEYS[1:2])
    got = pool.demote("a")
    assert split(got.keys) == KEYS[:1]
    _, there = pool.match("a", KEYS[:1])
    pool.heartbeat("a", corrupt=there.source)
    assert pool.count("ready", "b") == 2, "b's copy is the primary now"
    assert pool.demote_all("b") == KEYS[1:2]
    pool.demote("a", got)
    assert all(in_external_tier(pool, KEYS[:2]))


def test_demotions_of_a_node_that_died_are_done_by_another() -> None:
    pool = tiered(nodes="ab", shared=True, share=1.0)
    pool.store("a", KEYS[:1])
    pool.replicate("b", KEYS[:1])
    pool.demote("a")
    pool.directory.remove_node("a", pool.now)
    assert pool.demote_all("b") == KEYS[:1]


# ---------------------------------------------------------------------- all of it


@pytest.mark.parametrize("seed", range(8))
def test_the_directory_knows_exactly_what_is_in_a_tier(seed: int) -> None:
    """A store carries out its answers, though some of its writes fail."""
    rng = Random(seed)
    pool = Pool(slots=8, window=2, share=rng.choice([0.25, 1.0]))
    slabs = rng.randint(1, 5)
    heartbeat(pool, slabs=slabs)
    list_existing(pool, [])
    content: set[bytes] = set()  # what the tier holds
    last, stored = NOTHING, b""
    documents = DOCUMENTS[4096]
    every = set().union(*documents)
    for _ in range(400):
        keys = rng.choice(documents)[: rng.randint(1, 12)]
        match rng.choices(("store", "read", "demote", "clear", "bad", "wait"), (4, 6, 6, 0.1, 0.2, 0.1))[0]:
            case "store":
                pool.store("a", keys)
            case "read":
                lease, got = pool.match("a", keys)
                external = [location[0] % 2 == 1 for location in unpack(got.source)]
                assert all(key in content for key, there in zip(keys, external, strict=False) if there)
                pool.heartbeat("a", pulled=got.staged if rng.random() < 0.8 else b"")
                pool.release("a", lease)
            case "demote":
                lost = rng.random() < 0.1
                answer = pool.demote("a", last, stored, whole=rng.random() < 0.3, lost=lost)
                if lost:
                    continue
                last = answer
                content -= set(split(last.to_delete))
                stored = bytes(rng.random() < 0.9 for _ in split(last.keys))
                written = [done or rng.random() < 0.5 for done in stored]  # what failed may lie there all the same
                content |= {key for key, done in zip(split(last.keys), written, strict=True) if done}
                if rng.random() < 0.05:  # the store restarts
                    last, stored = NOTHING, b""
            case "clear":
                pool.directory.clear(pool.now)
            case "bad":
                lease, got = pool.match("a", keys)
                pool.heartbeat("a", corrupt=got.source[:32])
                pool.release("a", lease)
            case "wait":
                pool.tick(4.0)
        known = {key for key in every if in_external_tier(pool, [key])[0]}
        on_their_way = {key for key in every if in_external_tier(pool, [key], columns.DEMOTING)[0]}
        there = pool.directory._tier_catalog.tiers["a"]
        deleting = {key for _, keys in there.deleting.values() for key in keys}  # once that answer is there
        assert known <= content <= known | on_their_way | there.to_delete.keys() | deleting
    check_invariants(pool.directory)
    assert tier(pool)["demoted"] and pool.directory.counters["external_hits"]


def test_calls_of_unknown_nodes_change_nothing() -> None:
    pool = Pool()
    directory = pool.directory
    reached, nothing = TierReport(SLAB, False, True, b""), DemotionReport(b"", b"", b"", 0, True)
    existing = ExistingBlocks(KEYS[0], bytes(8), True)
    assert directory.tier_heartbeat("x", reached, 0.0) is None
    directory.report_existing("x", existing, 0.0)
    directory.report_existing("a", existing, 0.0)  # which has no tier
    assert directory.demote("x", nothing, 0.0) == directory.demote("a", nothing, 0.0) == NOTHING
    assert directory.demote("a", nothing._replace(locations=bytes(32), keys=KEYS[0]), 0.0) == NOTHING
    directory.join("new", ArenaDescription(b"new", SLAB, 1, 0), 0.0)
    assert directory.tier_heartbeat("new", reached, 0.0)
    assert directory.demote("new", nothing, 0.0) == NOTHING
    directory.client_heartbeat(Call(1, 1), 0.0)
    check_invariants(directory)
