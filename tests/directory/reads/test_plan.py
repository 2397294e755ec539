"""Plans by the hit curve: room for copies if there is memory to spare, and one LRU if there is none."""

import itertools

import pytest
from helpers.directory.pool import KEYS, PAGE, Pool

from raykv.actors.directory import server
from raykv.actors.directory.metrics import DirectoryMetrics
from raykv.actors.directory.server import DirectoryServer
from raykv.config import Quota
from raykv.directory.state import hit_curve
from raykv.directory.state.arrays import key_array
from raykv.directory.state.hit_curve import HitCurve, Plan
from raykv.protocol.stores import SlabReport

MEMORY = 100 * PAGE


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curve, "PLANNED_FROM", 400)


def curve_of(cycles: dict[int, int], found: float) -> HitCurve:
    """A hit curve. cycles: how often each cycle of so many blocks is used. found: share of keys that were found."""
    curve = HitCurve()
    curve.resize(MEMORY)
    for blocks, times in cycles.items():
        for _ in range(times):
            curve.asked(key_array(b"".join(KEYS[:blocks])), PAGE, round(found * blocks))
    return curve


def test_few_look_ups_change_nothing() -> None:
    curve = curve_of({10: 39}, found=0.0)
    for before in (Plan(), Plan(exact=True), Plan(copies=0.25)):
        assert curve.plan(before) == before


@pytest.mark.parametrize(("blocks", "copies"), [(10, 0.5), (60, 0.375), (80, 0.1875)])
def test_memory_that_is_not_needed_is_for_copies(blocks: int, copies: float) -> None:
    assert curve_of({blocks: 400}, found=0.9).plan(Plan(exact=True)) == Plan(copies)


def test_where_memory_is_scarce_there_is_one_lru_if_local_stores_cost_hits() -> None:
    scarce = {97: 40}
    assert curve_of(scarce, found=0.98).plan(Plan()) == Plan()
    assert curve_of(scarce, found=0.90).plan(Plan()) == Plan(exact=True)
    assert curve_of(scarce, found=0.98).plan(Plan(exact=True)) == Plan(exact=True), "it is exact because of that"


def test_the_factor_of_idle_times() -> None:
    assert [Plan().locality(1.5), Plan(exact=True).locality(1.5), Plan(0.25).locality(1.5)] == [1.5, 1.0, 2.0]
    assert Plan(0.25).locality(4.0) == 4.0


def test_a_pool_that_is_to_be_an_lru_makes_no_plan() -> None:
    for locality, plan in ((1.0, Plan()), (1.5, Plan(0.5))):
        pool = Pool(locality=locality, slots=100)
        for _ in range(50):
            pool.directory.hit_curve.asked(key_array(b"".join(KEYS[:10])), PAGE, 10)
        assert pool.directory.next_plan() == plan


def test_copies_keep_their_room_while_others_store() -> None:
    def copies_left(copies: float) -> int:
        pool = Pool(nodes="ab", slots=64, window=2, locality=1e9)
        pool.store("a", KEYS[:24])
        for key in KEYS[:24]:
            pool.replicate("b", [key])
        for _ in range(20):
            pool.directory.follow("b", Plan(copies), pool.now)
        for key in KEYS[100:300]:
            pool.store("b", [key])
        return pool.count("replica", "b")

    assert copies_left(0.0) <= 2 and copies_left(0.5) == 24


def test_primaries_make_room_for_copies_as_writers_take_slots() -> None:
    pool = Pool(nodes="ab", slots=64, window=2, locality=1e9)
    pool.store("b", KEYS[200:262])
    pool.store("a", KEYS[:62])
    pool.directory.follow("a", Plan(0.25), pool.now)
    left = [pool.count("ready", "a")]
    for key in KEYS[100:120]:
        pool.store("a", [key])
        left.append(pool.count("ready", "a"))
    assert left == [*range(62, 47, -1), *[48] * 6] and all(pool.has(KEYS[100:120]))


@pytest.mark.parametrize("why", ["quota", "leaving", "alone"])
def test_what_must_stay_makes_no_room_for_copies(why: str) -> None:
    pool = Pool(nodes="ab", slots=64, window=2)
    pool.store("a", KEYS[:62])
    pool.directory.follow("a", Plan(0.25), pool.now)
    if why == "quota":
        pool.directory.set_quota("t", Quota(0.5, 1.0), pool.now)
    elif why == "leaving":
        pool.directory.leave("a", pool.now)
    else:
        pool.directory.remove_node("b", pool.now)
    pool.directory.follow("a", Plan(0.25), pool.now)
    pool.store("a", KEYS[100:110])
    assert pool.count("ready", "a") == 62


def test_a_node_that_gives_memory_back_keeps_what_has_room() -> None:
    pool = Pool(nodes="ab", slots=32, slabs=16, window=2)
    pool.store("a", KEYS[:256])
    pool.directory.follow("a", Plan(0.5), pool.now)
    for _ in range(4):
        pool.directory.set_slab_target("a", SlabReport(16, 8, b""), pool.now)
    assert pool.count("ready", "a") == 224, "less a slab's"


def test_a_size_of_few_slots_keeps_its_blocks() -> None:
    pool = Pool(nodes="ab", slots=32, slabs=4, window=32)
    pool.store("a", KEYS[:30])
    for _ in range(20):
        pool.directory.follow("a", Plan(0.125), pool.now)
        pool.directory.set_slab_target("a", SlabReport(4, 4, b""), pool.now)
    assert all(pool.has(KEYS[:30]))


def test_a_server_plans_for_each_node_once_in_a_while() -> None:
    pool, now = Pool(nodes="ab", slots=64, window=2), itertools.count()
    pool.store("a", KEYS[:64])
    answering = DirectoryServer("p", DirectoryMetrics("p", "p/directory-1"), lambda: float(next(now)))
    answering.serve(pool.directory)
    pool.directory.hit_curve.asked(key_array(b"".join(KEYS[:10] * 50)), PAGE, 500)
    report = SlabReport(1, 1, b"")
    plans = 0
    for _ in range(20):
        answering.heartbeat("a", tuple(report))
        plans += pool.directory.plan != Plan()
        pool.directory.plan = Plan()
    assert 0 < plans < 20 and plans == pytest.approx(next(now) / server.PLAN_EVERY_S, abs=2)
    assert pool.directory.nodes["a"].copies > 0 and pool.directory.nodes["b"].copies == 0
