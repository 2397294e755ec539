"""Which chunks are published to routers, and when routers hear that chunks are gone."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from raykv.integrations.vllm.events.published import (
    ABSENT_S,
    AGAIN_S,
    OFFERED_S,
    REPEATS,
    SETTLE_S,
    Change,
    Published,
)


class Routers:
    """A Published that asks a pool, and the indices of its routers. counts: the index of routers that count."""

    def __init__(self, chunks: int = 100, refresh_steps: int = 1000) -> None:
        self.published = Published(600.0, refresh_steps, chunks)
        self.now, self.step, self.epoch = 0.0, 0, 1
        self.pool: set[bytes] = set()
        self.counts: Counter[bytes] = Counter()
        self.plain: set[bytes] = set()

    def offer(self, *chunks: bytes) -> None:
        for chunk in chunks:
            self.published.offer(chunk, chunk, self.now)

    def ask(self, seconds: float = 0.0, limit: int = 100) -> list[Change]:
        """Ask the directory after some seconds, and tell routers. Returns the changes."""
        self.now += seconds
        asked = self.published.to_ask(limit, True, self.now)
        assert len(asked) == len(set(asked)) <= limit
        found = bytes(chunk in self.pool for chunk in asked)
        return self.tell(self.published.answered(asked, found, self.epoch, self.step, self.now))

    def tell(self, changes: Sequence[Change]) -> list[Change]:
        for event, removed, stored in changes:
            self.counts[event] -= removed
            if removed:
                self.plain.discard(event)
            if stored:
                self.counts[event] += 1
                self.plain.add(event)
        assert self.plain == {event for event, count in self.counts.items() if count}
        return list(changes)

    def told(self, *chunks: bytes) -> None:
        """The pool gets these chunks, and routers hear of them."""
        self.pool.update(chunks)
        self.offer(*chunks)
        assert self.ask(AGAIN_S) == [Change(chunk, 0, True) for chunk in chunks]


def settled() -> Routers:
    routers = Routers()
    routers.told(b"first")
    routers.ask(SETTLE_S)
    return routers


def test_a_chunk_is_told_once_the_pool_has_it() -> None:
    routers = Routers()
    routers.offer(b"a", b"b")
    assert routers.published.waits and not routers.ask(AGAIN_S)
    routers.pool = {b"b"}
    assert not routers.ask()  # the directory was asked just now
    assert routers.ask(AGAIN_S) == [Change(b"b", 0, True)]
    routers.offer(b"b")
    assert not routers.ask(AGAIN_S)  # routers know already
    assert not routers.ask(OFFERED_S) and not routers.published.waits  # the pool has refused the chunk


def test_a_chunk_is_removed_that_was_twice_not_there() -> None:
    routers = settled()
    routers.pool.clear()
    assert not routers.ask() and not routers.ask(ABSENT_S / 2)
    routers.pool.add(b"first")
    assert not routers.ask(ABSENT_S)  # the chunk came back
    routers.pool.clear()
    assert not routers.ask()
    assert routers.ask(ABSENT_S) == [Change(b"first", 1, False)]
    assert not routers.published.knows(b"first") and not routers.ask(1)


def test_a_new_directory_is_not_believed_before_it_can_know() -> None:
    routers = settled()
    routers.epoch, there = 2, routers.pool
    routers.pool = set()
    for _ in range(int(SETTLE_S)):
        assert not routers.ask(1.0)
    routers.pool = there
    assert not routers.ask(1.0) and routers.plain == {b"first"}


def test_all_are_asked_for_in_turn_and_few_at_a_time() -> None:
    routers = settled()
    chunks = [b"%d" % i for i in range(9)]
    routers.told(*chunks)
    routers.pool.clear()
    for _ in range(5):
        routers.ask(limit=2)
    removed = [change for _ in range(10) for change in routers.ask(ABSENT_S, limit=2)]
    assert sorted(change.event for change in removed) == sorted([*chunks, b"first"]) and not routers.plain


def test_routers_that_join_late_are_told_again_and_removals_add_up() -> None:
    routers = settled()
    for _ in range(3 * REPEATS):
        routers.now += 600
        again = routers.tell(routers.published.refresh(10, routers.step, routers.now))
        assert [change.stored for change in again] == [True]
        assert not routers.published.refresh(10, routers.step, routers.now)
        assert 0 < routers.counts[b"first"] <= REPEATS
    routers.pool.clear()
    routers.ask()
    routers.ask(ABSENT_S)
    assert not routers.plain and not +routers.counts


def test_chunks_are_told_again_before_an_engine_has_forgotten_that_it_told_them() -> None:
    routers = settled()
    assert not routers.published.refresh(10, 999, routers.now)
    assert routers.published.refresh(10, 1000, routers.now) == [Change(b"first", 0, True)]
    assert not routers.published.refresh(10, 1999, routers.now)


def test_what_routers_know_is_bounded() -> None:
    routers = Routers(chunks=3)
    routers.told(b"a", b"b", b"c")
    routers.pool.add(b"d")
    routers.offer(b"d")
    assert routers.ask(AGAIN_S) == [Change(b"a", 1, False), Change(b"d", 0, True)]
    routers.offer(*(b"%d" % i for i in range(10)))
    assert sum(routers.published.knows(b"%d" % i) for i in range(10)) == 3


def test_all_are_withdrawn_before_any_is_told_again() -> None:
    routers = settled()
    routers.published.withdraw_all()
    routers.offer(b"first")
    assert routers.published.leaves and not routers.ask(AGAIN_S)
    routers.tell(routers.published.withdrawn(10))
    assert not routers.plain and not routers.published.leaves
    assert routers.ask(AGAIN_S) == [Change(b"first", 0, True)]


@pytest.mark.parametrize("seed", range(30))
def test_routers_count_as_often_as_they_were_told_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    routers = Routers(chunks=rng.choice([5, 100]), refresh_steps=rng.choice([3, 1000]))
    published, chunks = routers.published, [b"%d" % i for i in range(12)]
    for _ in range(300):
        routers.step += rng.randrange(3)
        routers.pool ^= {chunk for chunk in chunks if rng.random() < 0.1}
        routers.offer(*rng.sample(chunks, rng.randrange(4)))
        if rng.random() < 0.01:
            published.withdraw_all()
        if rng.random() < 0.02:
            routers.epoch += 1
        routers.ask(rng.choice([0.01, 0.1, 1, 3]), limit=rng.choice([1, 4, 100]))
        routers.tell(published.withdrawn(rng.randrange(3)))
        routers.tell(published.refresh(3, routers.step, routers.now))
        left = Counter({told.event: told.times for told in published._withdrawn})
        assert +routers.counts == Counter({told.event: told.times for told in published._told.values()}) + left
