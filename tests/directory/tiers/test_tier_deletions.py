"""Which keys are deleted in external tiers, by example."""

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import split
from helpers.directory.pool import KEYS, PAGE, Pool
from helpers.directory.tiers import SLAB, heartbeat, in_external_tier, list_existing, only_in_tier, tier, tiered

from raykv.directory.state import demotion_batch, tier_catalog

pytestmark = pytest.mark.usefixtures("small_slabs")


def test_a_block_evicted_from_the_tier_is_deleted_unless_it_is_demoted_again() -> None:
    pool = tiered(slabs=1)
    pool.store("a", KEYS[:5])
    got = pool.demote("a", whole=True)
    assert split(got.keys) == [KEYS[4], KEYS[3], KEYS[2], KEYS[1]], "as many as there are slots"
    pool.read("a", KEYS[4:5])  # now the youngest in memory, but the oldest in the tier
    got = pool.demote("a", got, whole=True)  # the tier evicts KEYS[4] for KEYS[0], then another key for KEYS[4]
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
    monkeypatch.setattr(demotion_batch, "KEYS_PER_CALL", 1)
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
    got = pool.demote("a", got)  # the blocks were stored, but the deletions were not carried out
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
