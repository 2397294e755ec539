"""Tenants' shares of memory, by example. A node has 16 slots for blocks, which are a share of 1, and a staging slot."""

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import split
from helpers.directory.pool import KEYS, PAGE, Pool

from raykv.config import Quota

A, B = KEYS[:500], KEYS[500:]


def pool_with(nodes: str = "n", locality: float = 1.5, slots: int = 17, slabs: int = 1, **quotas: Quota) -> Pool:
    pool = Pool(slots=slots, slabs=slabs, nodes=nodes, locality=locality)
    for tenant, quota in quotas.items():
        pool.directory.set_quota(tenant, quota, pool.now)
    return pool


def used(pool: Pool) -> dict[str, int]:
    """How many blocks each tenant is charged for."""
    check_invariants(pool.directory)
    return {name: record["used"] // PAGE for name, record in pool.directory.stats(pool.now)["tenants"].items()}


def flood(pool: Pool, keys: list[bytes], node: str = "n", tenant: str = "a", size: int = PAGE) -> None:
    for key in keys:
        pool.store(node, [key], tenant=tenant, size=size)


# ---------------------------------------------------------------------- minimum


def test_a_flood_takes_nothing_of_a_minimum() -> None:
    pool = pool_with(b=Quota(minimum=0.5))
    pool.store("n", B[:10], tenant="b")
    flood(pool, A[:100])
    assert pool.has(B[:10]) == [True] * 8 + [False] * 2  # children go first, parents stay
    assert used(pool) == {"": 8, "b": 8}


def test_without_a_minimum_a_flood_takes_all() -> None:
    pool = pool_with(b=Quota())
    pool.store("n", B[:10], tenant="b")
    flood(pool, A[:100])
    assert used(pool) == {"": 16, "b": 0}


def test_what_nobody_needs_anybody_may_use_until_it_is_needed() -> None:
    pool = pool_with(b=Quota(minimum=0.5))
    flood(pool, A[:100])
    assert used(pool) == {"": 16, "b": 0}
    for n in range(8):  # while a goes on storing blocks, all younger than b's
        pool.store("n", B[n : n + 1], tenant="b")
        flood(pool, A[100 + 20 * n : 120 + 20 * n])
        assert used(pool) == {"": 15 - n, "b": n + 1}
    pool.store("n", B[8:9], tenant="b")  # b has its minimum, so the oldest block of all goes: one of b's
    assert used(pool) == {"": 8, "b": 8} and pool.has(B[:9]) == [False] + [True] * 8


def test_above_their_minima_blocks_go_by_age_alone() -> None:
    pool = pool_with(a=Quota(minimum=0.1), b=Quota(minimum=0.1))
    pool.store("n", A[:8], tenant="a")
    pool.store("n", B[:8], tenant="b")
    pool.read("n", A[:4], tenant="a")
    pool.store("n", KEYS[900:910])
    assert pool.has(A[:8]) == [True] * 4 + [False] * 4
    assert pool.has(B[:8]) == [True] * 2 + [False] * 6


def test_who_may_take_nobodys_is_refused() -> None:
    pool = pool_with(b=Quota(minimum=1.0))
    pool.store("n", B[:16], tenant="b")
    assert pool.reserve("n", A[:2], tenant="a")[1].covered == 0
    assert used(pool) == {"": 0, "b": 16} and pool.directory.stats(pool.now)["refused"] == 2


def test_a_minimum_is_of_the_whole_cluster_and_so_is_who_lives_above_it() -> None:
    pool = pool_with(nodes="mn", locality=1.0, b=Quota(minimum=0.5))
    pool.store("m", B[:16], tenant="b")
    flood(pool, A[:200], "m")
    assert used(pool) == {"": 16, "b": 16} and pool.has(B[:16]) == [True] * 16
    flood(pool, A[200:300], "n")
    assert pool.has(B[:16]) == [True] * 16


# ---------------------------------------------------------------------- maximum


def test_room_is_not_for_who_has_its_maximum() -> None:
    pool = pool_with(a=Quota(maximum=0.25))
    flood(pool, A[:10])
    assert used(pool) == {"": 0, "a": 4} and pool.has(A[:10]) == [False] * 6 + [True] * 4
    pool.store("n", B[:12])
    assert used(pool) == {"": 12, "a": 4}


def test_a_maximum_of_nothing_stores_nothing() -> None:
    pool = pool_with(a=Quota(maximum=0.0))
    flood(pool, A[:3])
    assert used(pool) == {"": 0, "a": 0} and pool.directory.stats(pool.now)["refused"] == 3


def test_who_has_its_maximum_elsewhere_stores_on_its_own_node_for_a_block_there() -> None:
    pool = pool_with(nodes="mn", a=Quota(maximum=0.25))
    flood(pool, A[:8], "m")
    assert pool.store("n", A[8:9], tenant="a") == ["n"]
    assert used(pool) == {"": 0, "a": 8} and pool.has(A[:9]) == [False] + [True] * 8


def test_what_is_read_from_another_node_counts_once() -> None:
    pool = pool_with(nodes="mn", a=Quota(maximum=0.25))
    pool.store("m", A[:8], tenant="a")
    pool.replicate("n", A[:1])
    assert used(pool)["a"] + used(pool)[""] == 8


# ---------------------------------------------------------------------- who is charged


def test_the_last_who_stored_or_matched_a_block_is_charged() -> None:
    pool = pool_with(a=Quota(maximum=0.5), b=Quota(maximum=0.5))
    pool.store("n", A[:4], tenant="a")
    assert pool.read("n", A[:2], tenant="b") == 2
    assert used(pool) == {"": 0, "a": 2, "b": 2}
    pool.reserve("n", A[:3], tenant="b")  # b has nothing to store: the blocks are there
    assert used(pool) == {"": 0, "a": 1, "b": 3}
    pool.read("n", A[:4])
    assert used(pool) == {"": 4, "a": 0, "b": 0}


def test_who_reads_what_is_in_anothers_minimum_does_not_take_it_from_there() -> None:
    pool = pool_with(a=Quota(maximum=0.25), b=Quota(minimum=0.5))
    pool.store("n", B[:9], tenant="b")
    assert pool.read("n", B[:9], tenant="a") == 9
    assert used(pool) == {"": 0, "a": 1, "b": 8}  # b can spare one
    pool.store("n", A[:8], tenant="a")
    flood(pool, A[100:200])
    assert used(pool)["b"] == 8 and pool.has(B[1:9]) == [True] * 8


# ---------------------------------------------------------------------- quotas


def test_a_maximum_that_was_lowered_is_reached_block_by_block() -> None:
    pool = pool_with(a=Quota())
    pool.store("n", A[:12], tenant="a")
    pool.directory.set_quota("a", Quota(maximum=0.25), pool.now)
    flood(pool, A[100:104])
    assert used(pool) == {"": 0, "a": 8}
    flood(pool, A[104:112])
    assert used(pool) == {"": 0, "a": 4}


def test_a_removed_quota_leaves_the_blocks_to_all_by_age() -> None:
    pool = pool_with(a=Quota(minimum=0.5), b=Quota(minimum=0.5))
    for n in range(8):
        pool.store("n", A[n : n + 1], tenant="a")
        pool.store("n", B[n : n + 1])
    assert pool.directory.remove_quota("a", pool.now) and not pool.directory.remove_quota("a", pool.now)
    assert used(pool) == {"": 16, "b": 0}
    pool.store("n", KEYS[900:906])
    assert pool.has(A[:8]) == pool.has(B[:8]) == [False] * 3 + [True] * 5
    pool.directory.set_quota("c", Quota(minimum=0.5), pool.now)  # c gets the number that a had, but none of a's blocks
    assert used(pool) == {"": 16, "b": 0, "c": 0}


def test_quotas_follow_the_memory_that_there_is() -> None:
    pool = pool_with(b=Quota(0.25, 0.5))
    assert pool.directory.stats(pool.now)["tenants"]["b"]["minimum_bytes"] == 4 * PAGE
    pool.add("m")
    tenants = pool.directory.stats(pool.now)["tenants"]
    assert tenants["b"]["minimum_bytes"] == 8 * PAGE and tenants["b"]["maximum_bytes"] == 16 * PAGE
    assert tenants[""]["minimum_bytes"] == 0 and tenants[""]["maximum_bytes"] == 32 * PAGE
    pool.directory.remove_node("n", pool.now)
    assert pool.directory.stats(pool.now)["tenants"]["b"]["minimum_bytes"] == 4 * PAGE


def test_a_slab_of_another_block_size_is_not_taken_from_a_minimum() -> None:
    pool = pool_with(slots=4, slabs=5, b=Quota(minimum=0.5), c=Quota(minimum=0.2))
    pool.store("n", B[:9], tenant="b")
    flood(pool, A[:100], size=2 * PAGE)
    assert pool.has(B[:9]) == [True] * 9
    pool.store("n", KEYS[900:901], size=4 * PAGE, tenant="c")  # c has no block: a young slab of a's goes for it
    assert used(pool)["c"] == 4 and pool.has(B[:9]) == [True] * 9


def test_a_slab_of_nobodys_minimum_is_found_behind_those_of_minima() -> None:
    pool = pool_with(slots=4, slabs=5, b=Quota(minimum=0.65), c=Quota(minimum=0.2))
    pool.store("n", B[:11], tenant="b")
    flood(pool, A[:100], size=2 * PAGE)
    assert pool.store("n", KEYS[900:901], tenant="c") == ["n"]
    assert pool.has(B[:11]) == [True] * 11 and used(pool)["c"] == 1


def test_blocks_of_a_gpu_behind_those_of_a_full_tenant_are_demoted() -> None:
    pool = Pool(slots=17, nodes=("n", "n/gpu"))
    pool.directory.set_quota("a", Quota(maximum=0.0), pool.now)
    pool.store("n/gpu", A[:2], tenant="a")
    pool.store("n/gpu", B[:14])
    moved = split(pool.demote_gpu("n/gpu").keys)
    assert moved and not {*A[:2]} & {*moved}


def test_impossible_quotas_are_refused() -> None:
    pool = pool_with(a=Quota(minimum=0.75))
    with pytest.raises(ValueError, match=r"minimum of 0\.5 for 'b': other tenants have minima of 0\.75"):
        pool.directory.set_quota("b", Quota(minimum=0.5), pool.now)
    pool.directory.set_quota("a", Quota(minimum=1.0), pool.now)
    with pytest.raises(ValueError, match=r"minimum=0\.5 is above maximum=0\.25"):
        Quota(0.5, 0.25)
    for share in (-0.1, 1.5, float("nan"), "half"):
        with pytest.raises(ValueError, match="give a share"):
            Quota(maximum=share)  # type: ignore[arg-type]
    for n in range(14):
        pool.directory.set_quota(f"tenant {n}", Quota(), pool.now)
    with pytest.raises(ValueError, match="15 tenants have one"):
        pool.directory.set_quota("one more", Quota(), pool.now)
    pool.directory.set_quota("tenant 3", Quota(maximum=0.5), pool.now)
