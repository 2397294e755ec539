"""External tiers of nodes that come and go, and the exact content of a tier."""

from random import Random

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import split, unpack
from helpers.directory.pool import KEYS, Pool, blocks
from helpers.directory.tiers import SLAB, heartbeat, in_external_tier, list_existing, only_in_tier, tier, tiered
from helpers.directory.world.documents import DOCUMENTS

from raykv.directory.kernels import columns
from raykv.protocol.clients import Call
from raykv.protocol.stores import ArenaDescription
from raykv.protocol.tiers import DemotionReport, Demotions, ExistingBlocks, TierReport

pytestmark = pytest.mark.usefixtures("small_slabs")
NOTHING = Demotions(b"", b"", b"", b"", 0)


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
    assert not pool.directory.c.rows["holds"].any()


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


@pytest.mark.parametrize("seed", range(8))
def test_the_directory_knows_exactly_what_is_in_a_tier(seed: int) -> None:
    """The store carries out all answers that it gets, but some of its writes fail."""
    rng = Random(seed)
    pool = Pool(slots=8, window=2, share=rng.choice([0.25, 1.0]))
    slabs = rng.randint(1, 5)
    heartbeat(pool, slabs=slabs)
    list_existing(pool, [])
    content: set[bytes] = set()  # keys that the tier holds
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
                written = [done or rng.random() < 0.5 for done in stored]  # a failed write may have left the block
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
        there = pool.directory.tier_catalog.tiers["a"]
        deleting = {key for _, keys in there.deleting.values() for key in keys}  # of answers that may not have come
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
    directory.report_existing("a", existing, 0.0)  # a has no tier
    assert directory.demote("x", nothing, 0.0) == directory.demote("a", nothing, 0.0) == NOTHING
    assert directory.demote("a", nothing._replace(locations=bytes(32), keys=KEYS[0]), 0.0) == NOTHING
    directory.join("new", ArenaDescription(b"new", SLAB, 1, 0), 0.0)
    assert directory.tier_heartbeat("new", reached, 0.0)
    assert directory.demote("new", nothing, 0.0) == NOTHING
    directory.client_heartbeat(Call(1, 1), 0.0)
    check_invariants(directory)
