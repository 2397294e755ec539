"""Blocks that a client touches, and asks to keep for a time, by example. A slot of a node's memory is its window."""

from random import Random

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.pool import KEYS, Pool
from helpers.directory.tiers import in_external_tier, tiered

from raykv.config import Quota

pytestmark = pytest.mark.usefixtures("small_slabs")
KEPT_S = 60.0


def touch(pool: Pool, keys: list[bytes], seconds: float = KEPT_S, tenant: str = "", node: str = "a") -> int:
    return pool.directory.touch(pool.call(node), b"".join(keys), seconds, tenant, pool.now).done


def left(pool: Pool, keys: list[bytes]) -> list[bytes]:
    check_invariants(pool.directory)
    return [key for key, there in zip(keys, pool.has(keys), strict=True) if there]


def store_each(pool: Pool, keys: list[bytes]) -> None:
    for key in keys:
        pool.store("a", [key])


def test_a_touch_is_a_use_of_the_first_key_last() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    assert touch(pool, KEYS[:2], 0.0) == 2
    pool.store("a", KEYS[10:15])
    assert left(pool, KEYS[:7]) == KEYS[:2]
    pool.store("a", KEYS[15:16])
    assert left(pool, KEYS[:7]) == KEYS[:1]
    assert touch(pool, KEYS[:3], 0.0) == 1, "of the keys that are there"


def test_the_oldest_other_block_goes_in_the_place_of_a_kept_one() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    assert touch(pool, KEYS[:2]) == 2
    pool.store("a", KEYS[10:15])
    for number in range(20):
        pool.store("a", [KEYS[20 + number]])
        assert left(pool, [*KEYS[:7], *KEYS[10:15]]) == [*KEYS[:2], *KEYS[10 : max(10, 14 - number)]]
    assert pool.directory.stats(pool.now)["evicted"] == 25, "one block for each store"


@pytest.mark.parametrize("end", ["time", "touch", "done", "again"])
def test_a_block_is_kept_until_the_time_or_a_later_word(end: str) -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    touch(pool, KEYS[:2])
    store_each(pool, KEYS[10:20])
    assert left(pool, KEYS[:2]) == KEYS[:2]
    if end == "touch":
        touch(pool, KEYS[:2], 0.0)
        store_each(pool, KEYS[20:25])
    elif end in ("done", "again"):
        pool.directory.done(pool.call("a"), b"".join(KEYS[:2]), pool.now, end == "again")
    else:
        pool.tick(KEPT_S - 1)
        store_each(pool, KEYS[20:25])
        assert left(pool, KEYS[:2]) == KEYS[:2]
        pool.tick(3.0)
    pool.store("a", KEYS[30:32])
    assert left(pool, KEYS[:2]) == []


def test_at_most_half_of_a_nodes_blocks_are_passed_over() -> None:
    pool = Pool(slots=9)
    pool.store("a", KEYS[:8])
    assert touch(pool, KEYS[:8]) == 8, "no hint is refused"
    store_each(pool, KEYS[10:40])
    assert left(pool, KEYS[:8]) == KEYS[:4]


def test_another_slot_of_a_block_is_not_kept() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    touch(pool, KEYS[:1])
    pool.directory.forget(pool.call("a"), KEYS[0], pool.now)
    pool.store("a", KEYS[10:12])
    pool.store("a", KEYS[:1])
    pool.store("a", KEYS[12:19])
    assert left(pool, [*KEYS[:1], *KEYS[10:12]]) == []


def test_a_block_that_somebody_reads_is_passed_over_too() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    touch(pool, KEYS[:1])
    pool.store("a", KEYS[10:16])
    lease, _ = pool.match("a", KEYS[15:16])
    pool.store("a", KEYS[20:21])
    assert left(pool, [*KEYS[:1], *KEYS[10:16]]) == [KEYS[0], *KEYS[10:14], KEYS[15]], "14 was next after the lease"
    pool.release("a", lease)
    pool.store("a", KEYS[21:25])
    assert left(pool, [*KEYS[:1], *KEYS[10:16]]) == [KEYS[0], KEYS[15]]


def test_a_store_that_needs_all_slots_gets_them() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    touch(pool, KEYS[:7])
    assert pool.store("a", KEYS[10:17]) == ["a"] * 7 and left(pool, KEYS[:7]) == []


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_a_list(seed: int) -> None:
    rng, pool, room = Random(seed), Pool(slots=24), 23
    line: list[bytes] = []  # from the oldest on
    until: dict[bytes, float] = {}
    passed, passes, waited = (
        set[bytes](),
        0,
        0,
    )  # keys that evictions pass over; how often one did, also since ages moved
    for _ in range(3000):
        key, what = rng.choice(KEYS[:60]), rng.choices(["use", "touch", "time"], [20, 4, 2])[0]
        if what == "time":
            pool.tick(1.0)
        elif what == "touch":
            seconds = rng.choice([0.0, 1.0, 20.0])
            keys = rng.sample(KEYS[:60], 5)
            there = [key for key in reversed(keys) if key in line]
            assert touch(pool, keys, seconds) == len(there)
            line = [other for other in line if other not in there] + there
            passed.difference_update(there)
            until |= dict.fromkeys(there, pool.now + seconds)
        else:
            if pool.read("a", [key]) == 0:
                if len(line) == room:
                    gone = 0
                    if until.get(line[0], 0.0) > pool.now:
                        behind = [i for i, other in enumerate(line) if other not in passed]
                        gone = next((i for i in behind if until.get(line[i], 0.0) <= pool.now), room)
                        passed.update(line[: min(gone, room // 2 + 1)])
                        passes += gone <= room / 2
                        waited += gone <= room / 2
                    key_gone = line.pop(gone if gone <= room / 2 else 0)
                    if waited * 8 > len(passed):
                        waited = 0
                        end = next((i for i, other in enumerate(line) if until.get(other, 0.0) <= pool.now), room)
                        passed.intersection_update(line[:end])
                    until.pop(key_gone, None)
                    passed.discard(key_gone)
                pool.store("a", [key])
            line = [other for other in line if other != key] + [key]
            passed.discard(key)
        assert pool.keys() == set(line)
    assert passes > 100


def test_blocks_whose_time_is_over_go_before_one_that_is_kept_longer() -> None:
    pool = Pool(slots=24)
    pool.store("a", KEYS[:7])
    touch(pool, KEYS[:1], 3600.0)
    touch(pool, KEYS[1:7], 10.0)
    pool.store("a", KEYS[10:17])
    pool.read("a", KEYS[1:7])
    store_each(pool, KEYS[20:50])
    assert left(pool, KEYS[:7]) == KEYS[:7]
    pool.tick(40.0)
    store_each(pool, KEYS[100:130])
    assert left(pool, KEYS[:7]) == KEYS[:1]


def test_a_list_keeps_its_order_when_a_tenant_joins_it() -> None:
    pool = Pool(slots=40)
    pool.directory.set_quota("x", Quota(), pool.now)
    for number in range(8):
        pool.store("a", [KEYS[number]], tenant="x")
    touch(pool, KEYS[:8], tenant="x")
    for number in range(35):
        pool.store("a", [KEYS[100 + number]], tenant="" if number % 3 == 0 else "x")
    pool.directory.remove_quota("x", pool.now)
    for number in range(40):
        pool.store("a", [KEYS[200 + number]])
        check_invariants(pool.directory)


@pytest.mark.parametrize("blocks", [4, 12, 20])
@pytest.mark.parametrize("kept_s", [8.0, 1000.0])
def test_no_block_goes_before_a_later_block_of_its_chain(blocks: int, kept_s: float) -> None:
    pool, chain = Pool(slots=24), KEYS[:blocks]
    pool.store("a", chain)
    touch(pool, chain, kept_s)
    lengths = []
    for number in range(80):
        pool.store("a", [KEYS[100 + number]])
        there = pool.has(chain)
        assert there == sorted(there, reverse=True), "a prefix"
        lengths.append(sum(there))
        pool.tick(0.25)
    assert lengths[25] == min(blocks, 11) and lengths[-1] == (0 if kept_s < 20 else min(blocks, 11))


@pytest.mark.parametrize("seed", range(3))
def test_a_hint_costs_no_other_tenant_a_block_and_refuses_nothing(seed: int) -> None:
    """The same calls without `seconds`: at every step, the other tenant has the same blocks, or more."""
    rng, hinted, plain = Random(seed), Pool(slots=40, nodes="ab"), Pool(slots=40, nodes="ab")
    for pool in (hinted, plain):
        for tenant, minimum in (("x", 0.1), ("y", 0.2)):
            pool.directory.set_quota(tenant, Quota(minimum, 0.8), pool.now)
    mine, fresh = list[bytes](), iter(KEYS[100:])
    differences = 0
    for _ in range(700):
        node, what, keys = rng.choice("ab"), rng.choice(["mine", "theirs", "theirs", "read", "touch"]), KEYS[:80]
        for_each = next(fresh) if what == "mine" else rng.choice(keys)
        for pool, seconds in ((hinted, 30.0), (plain, 0.0)):
            if what == "mine":
                pool.store(node, [for_each], tenant="x")
            elif what == "touch" and mine:
                touch(pool, mine[-1:], seconds, "x", node)
            elif what == "theirs":
                pool.store(node, [for_each], tenant="y")
            else:
                pool.read(node, [for_each], tenant="y")
            pool.tick(0.2)
        mine += [for_each] if what == "mine" else []
        assert all(there >= without for there, without in zip(hinted.has(keys), plain.has(keys), strict=True))
        assert hinted.directory.stats(pool.now)["refused"] == plain.directory.stats(pool.now)["refused"]
        differences += hinted.keys() != plain.keys()
    assert differences > 50, "hints changed nothing"


def test_a_hint_ends_where_another_tenant_pays_for_the_block() -> None:
    pool = Pool(slots=16)
    for tenant in "xy":
        pool.directory.set_quota(tenant, Quota(), pool.now)
    pool.store("a", KEYS[:4], tenant="x")
    touch(pool, KEYS[:4], tenant="x")
    pool.store("a", KEYS[10:20], tenant="y")
    pool.read("a", KEYS[:4], tenant="y")
    for number in range(15):
        pool.store("a", [KEYS[30 + number]], tenant="y")
    assert left(pool, [*KEYS[:4], *KEYS[10:20]]) == []


def test_a_tenant_keeps_only_its_own_blocks() -> None:
    pool = Pool()
    pool.directory.set_quota("x", Quota(0.1, 1.0), pool.now)
    pool.store("a", KEYS[:7], tenant="x")
    assert touch(pool, KEYS[:2]) == touch(pool, KEYS[:2], tenant="nobody") == 0
    pool.store("a", KEYS[10:15])
    assert left(pool, KEYS[:7]) == KEYS[:2], "as without a touch"
    pool.directory.remove_quota("x", pool.now)
    assert touch(pool, KEYS[:2]) == 2


def test_no_block_that_a_tier_lacks_goes_for_one_that_the_tier_has() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:7])
    touch(pool, KEYS[:1])
    pool.read("a", KEYS[1:7])
    assert len(pool.demote_all("a")) == 7
    for number in range(6):
        pool.store("a", [KEYS[10 + number]])
        assert left(pool, KEYS[:7]) == KEYS[: 6 - number], "the next block that the tier has too"
    pool.store("a", KEYS[20:21])
    assert left(pool, KEYS[:7]) == [] and all(in_external_tier(pool, KEYS[:1]))
    assert left(pool, KEYS[10:16]) == KEYS[10:16]


def test_a_block_is_kept_for_a_day_at_most() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    touch(pool, KEYS[:1], 1e300)
    store_each(pool, KEYS[10:20])
    pool.tick(24 * 3600 - 1)
    store_each(pool, KEYS[20:30])
    assert left(pool, KEYS[:1]) == KEYS[:1]
    pool.tick(3.0)
    store_each(pool, KEYS[30:40])
    assert left(pool, KEYS[:1]) == []


@pytest.mark.parametrize("terms", [(-1.0, ""), (float("nan"), ""), ("1", ""), (1.0, 3)])
def test_what_is_no_hint_is_refused(terms: tuple[object, object]) -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    with pytest.raises((ValueError, TypeError)):
        pool.directory.touch(pool.call("a"), KEYS[0], *terms, pool.now)  # type: ignore[arg-type]
