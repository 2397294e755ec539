"""Blocks that a client is done with, by example. One of a node's 8 slots is its staging window."""

from dataclasses import dataclass, field
from random import Random

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.pool import KEYS, Pool
from helpers.directory.tiers import heartbeat, in_external_tier, list_existing, only_in_tier, tier, tiered

from raykv.config import Quota
from raykv.directory.calls.upkeep import MARKS
from raykv.directory.state.state import LATE_S

pytestmark = pytest.mark.usefixtures("small_slabs")


def done(pool: Pool, keys: list[bytes], again: bool = False, tenant: str = "", node: str = "a") -> int:
    return pool.directory.done(pool.call(node), b"".join(keys), pool.now, again, tenant).done


def left(pool: Pool, keys: list[bytes]) -> list[bytes]:
    check_invariants(pool.directory)
    return [key for key, there in zip(keys, pool.has(keys), strict=True) if there]


def test_a_block_that_is_done_with_goes_before_older_ones_and_the_last_key_first() -> None:
    pool = Pool()
    pool.store("a", KEYS[:4])
    pool.store("a", KEYS[4:7])
    assert done(pool, KEYS[4:6]) == 2
    pool.store("a", KEYS[10:11])
    assert left(pool, KEYS[:7]) == [*KEYS[:5], KEYS[6]]
    pool.store("a", KEYS[11:12])
    assert left(pool, KEYS[:7]) == [*KEYS[:4], KEYS[6]]
    pool.store("a", KEYS[12:13])
    assert left(pool, KEYS[:7]) == [*KEYS[:3], KEYS[6]], "then the oldest"


def test_what_is_asked_for_again_goes_after_what_is_not_the_last_first() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    assert done(pool, KEYS[:2], again=True) == done(pool, KEYS[2:4], again=True) == 2
    assert done(pool, KEYS[4:5]) == 1
    for number, goes in enumerate((4, 3, 2, 1, 0, 6, 5)):
        before = left(pool, KEYS[:7])
        pool.store("a", [KEYS[10 + number]])
        assert left(pool, KEYS[:7]) == [key for key in before if key != KEYS[goes]]


def test_who_is_late_may_not_come_and_goes_before_the_last() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    assert done(pool, KEYS[:2], again=True) == 2
    pool.tick(LATE_S / MARKS)
    assert done(pool, KEYS[2:4], again=True) == 2 and done(pool, KEYS[4:5]) == 1
    pool.tick(LATE_S)
    for number, goes in enumerate((4, 1, 0, 3, 2, 6, 5)):
        before = left(pool, KEYS[:7])
        pool.store("a", [KEYS[10 + number]])
        assert left(pool, KEYS[:7]) == [key for key in before if key != KEYS[goes]]


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_a_list(seed: int) -> None:
    rng, pool, order = Random(seed), Pool(slots=24), Order()
    for _ in range(2000):
        key = rng.choice(KEYS[:100])
        what = rng.choices(["use", "again", "ended", "time"], [10, 6, 1, 10])[0]
        if what == "time":
            order.let_pass()
            pool.tick(LATE_S / MARKS)
        elif what == "use":
            if pool.read("a", [key]) == 0:
                pool.store("a", [key])
            order.use(key, room=23)
        else:
            keys = rng.sample(KEYS[:100], 3)
            assert done(pool, keys, again=what == "again") == order.done(keys, what)
        assert pool.keys() == set(order.blocks)


@dataclass
class Order:
    """Blocks in memory, and which of them goes next."""

    now: float = 0.0
    blocks: dict[bytes, tuple[str, float]] = field(default_factory=dict)  # the last put is the last here

    def put(self, key: bytes, how: str) -> None:
        self.blocks.pop(key, None)
        self.blocks[key] = how, self.now

    def use(self, key: bytes, room: int) -> None:
        if key not in self.blocks and len(self.blocks) == room:
            del self.blocks[self.next()]
        self.put(key, "use")

    def done(self, keys: list[bytes], how: str) -> int:
        there = [key for key in keys if key in self.blocks]
        for key in there:
            self.put(key, how)
        return len(there)

    def let_pass(self) -> None:
        self.now += LATE_S / MARKS
        late = [
            key for key, (how, at) in self.blocks.items() if how == "again" and at <= self.now - LATE_S - LATE_S / MARKS
        ]
        for number, key in enumerate(reversed(late)):
            self.put(key, f"late {self.now:09.0f} {number:03}")

    def next(self) -> bytes:
        """The key that goes next: ended, late (earlier lateness first), waiting, in use."""
        ended, again, use = (
            [key for key, (what, _) in self.blocks.items() if what == how] for how in ("ended", "again", "use")
        )
        late = sorted((what, key) for key, (what, _) in self.blocks.items() if what.startswith("late"))
        return ended[-1] if ended else late[0][1] if late else again[-1] if again else use[0]


@pytest.mark.parametrize("again", [False, True])
def test_a_use_makes_it_a_block_in_use(again: bool) -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    assert done(pool, KEYS[:7], again) == 7
    assert pool.read("a", KEYS[:2]) == 2
    pool.store("a", KEYS[10:15])
    assert left(pool, KEYS[:7]) == KEYS[:2]


@pytest.mark.parametrize("again", [False, True])
def test_a_block_that_somebody_reads_is_in_use(again: bool) -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    lease, _ = pool.match("a", KEYS[:2])
    assert done(pool, KEYS[:4], again) == 2
    pool.release("a", lease)
    pool.store("a", KEYS[10:13])
    assert left(pool, KEYS[:7]) == [*KEYS[:2], *KEYS[4:6]]


@pytest.mark.parametrize("again", [False, True])
def test_keys_that_are_not_stored_count_nothing(again: bool) -> None:
    pool = Pool()
    pool.store("a", KEYS[:2])
    assert done(pool, [KEYS[100], KEYS[0], KEYS[0]], again) == 2 and done(pool, [], again) == 0
    assert left(pool, KEYS[:2]) == KEYS[:2]


def test_a_tenant_gives_up_only_its_own() -> None:
    pool = Pool()
    pool.directory.set_quota("b", Quota(), pool.now)
    pool.store("a", KEYS[:3])
    pool.store("a", KEYS[3:5], tenant="b")
    assert done(pool, KEYS[:5], tenant="b") == 2 and done(pool, KEYS[:5]) == 3
    assert done(pool, KEYS[:5], tenant="nobody") == 3, "all without a quota are one"


@pytest.mark.parametrize("again", [False, True])
def test_a_writer_takes_the_slot_on_another_node(again: bool) -> None:
    """The block counts as the oldest of the cluster. Otherwise it would stay on a node where nobody writes."""
    pool = Pool(nodes="ab")
    pool.store("b", KEYS[:7])
    pool.store("a", KEYS[10:17])
    pool.read("b", KEYS[:7])
    assert pool.store("a", KEYS[20:21]) == ["a"], "the directory has looked which block is the oldest"
    done(pool, KEYS[:7], again)
    assert pool.store("a", KEYS[21:22]) == ["b"]


@pytest.mark.parametrize("again", [False, True])
def test_copies_on_other_nodes_are_taken_first_too(again: bool) -> None:
    pool = Pool(nodes="ab", window=2)
    pool.store("b", KEYS[30:36])
    pool.store("a", KEYS[:3])
    pool.replicate("b", KEYS[:2])
    assert done(pool, KEYS[:1], again) == 2
    pool.replicate("b", KEYS[2:3])
    assert pool.count("replica", "b") == 2
    assert left(pool, KEYS[:2]) == KEYS[:2]
    assert pool.directory.locate_prefix(KEYS[0]).nodes == {"a": 1}, (
        "the room for copies was that of the block done with"
    )
    assert pool.directory.locate_prefix(KEYS[1]).nodes == {"a": 1, "b": 1}


def test_an_external_tier_does_not_want_what_is_done_with() -> None:
    pool = tiered(share=0.5)
    pool.store("a", KEYS[:7])
    done(pool, KEYS[:2])
    assert sorted(pool.demote_all("a")) == KEYS[5:7], "of the four slots without loss two are of blocks done with"
    assert tier(pool)["demoted"] == 2
    check_invariants(pool.directory)


def test_what_the_tier_lacks_is_demoted_before_it_goes() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:3])
    assert len(pool.demote_all("a")) == 3
    pool.store("a", KEYS[3:6])
    assert done(pool, KEYS[3:6], again=True) == 0, "they would be amidst clean ones, and are not clean"
    assert done(pool, KEYS[:3], again=True) == 2 * 3
    assert sorted(pool.demote_all("a")) == KEYS[3:6]
    assert done(pool, KEYS[:6], again=True) == 2 * 6
    check_invariants(pool.directory)


def test_with_an_external_tier_the_longest_wait_ends_first() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:7])
    assert len(pool.demote_all("a")) == 7
    assert done(pool, KEYS[:2], again=True) == done(pool, KEYS[2:4], again=True) == 4
    pool.tick(2 * LATE_S)
    for number, goes in enumerate((1, 0, 3, 2, 6)):
        assert pool.directory.locate_prefix(KEYS[goes]).nodes
        pool.store("a", [KEYS[10 + number]])
        assert not pool.directory.locate_prefix(KEYS[goes]).nodes
        assert len(pool.demote_all("a")) == 1


def test_it_goes_first_in_the_tier_too() -> None:
    pool = tiered(slabs=1, share=1 / 8)
    only_in_tier(pool, KEYS[:4])
    assert done(pool, KEYS[2:3]) == done(pool, KEYS[1:2], again=True) == 1
    for there in ([True, True, False, True], [True, False, False, True]):
        assert len(pool.demote_all("a")) == 1
        assert in_external_tier(pool, KEYS[:4]) == there
        pool.store("a", KEYS[10:11])
    check_invariants(pool.directory)


def test_what_is_in_memory_too_leaves_the_tier_first() -> None:
    """Eviction from a tier passes over blocks in use that are in memory too, but not over this one."""
    pool = tiered(slabs=1, share=5 / 8)
    pool.store("a", KEYS[:4])
    assert len(pool.demote_all("a", whole=True)) == 4
    assert done(pool, KEYS[:1]) == 2
    pool.store("a", KEYS[10:13])
    assert len(pool.demote_all("a")) == 1
    assert in_external_tier(pool, KEYS[:4]) == [False, True, True, True]
    check_invariants(pool.directory)


def test_a_tier_that_lost_its_blocks_does_not_want_them_either() -> None:
    pool = tiered(share=1.0)
    pool.store("a", KEYS[:5])
    done(pool, KEYS[:3])
    assert sorted(pool.demote_all("a")) == KEYS[3:5]
    heartbeat(pool, lost=b"all")
    list_existing(pool, [])
    assert not set(pool.demote_all("a")) & set(KEYS[:3])
    check_invariants(pool.directory)


@pytest.mark.parametrize("again", [False, True])
def test_a_gpus_copy_stays_as_it_is(again: bool) -> None:
    """A copy made older would be demoted first, and would then be a young block in memory."""
    pool = Pool(nodes=("a", "a/0"))
    pool.store("a/0", KEYS[:3])
    assert done(pool, KEYS[:3], again, node="a/0") == 0
    check_invariants(pool.directory)


def test_the_age_of_the_coldest_block_is_that_of_one_in_use() -> None:
    pool = Pool()
    pool.store("a", KEYS[:7])
    pool.read("a", KEYS[:1])
    coldest = pool.directory.coldest("a")
    done(pool, KEYS[6:7], again=True)
    assert pool.directory.coldest("a") == coldest + 1
    done(pool, KEYS[:6])
    assert pool.directory.coldest("a") == -1


@pytest.mark.parametrize("terms", [(1, ""), ("again", ""), (True, None), (False, 3)])
def test_bad_terms(terms: tuple[object, object]) -> None:
    pool = Pool()
    pool.store("a", KEYS[:1])
    with pytest.raises(ValueError, match="give True or False, and a name"):
        pool.directory.done(pool.call("a"), KEYS[0], pool.now, *terms)  # type: ignore[arg-type]
