"""The hit rate by memory, beside an LRU that is simulated with each size."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np
import pytest
from helpers.directory.pool import KEYS, Pool
from hypothesis import given
from hypothesis import strategies as st

from raykv.directory.kernels.hit_curve import COUNT, FINENESS, SHIFT
from raykv.directory.state import hit_curve
from raykv.directory.state.arrays import KeyArray
from raykv.directory.state.hit_curve import HALF_LIFE_S, USES_PER_S, HitCurve

SIZE = 5000  # bytes of a block: no distance lies where two counts meet
ROOM = 1 << 40  # bytes: nothing leaves the sample for its distance


def keys_of(blocks: Iterable[int]) -> KeyArray:
    """A hash a block, as real keys are."""
    numbers = np.fromiter(blocks, np.uint64)
    return np.stack([numbers, np.array([_hash(int(number)) for number in numbers], np.uint64)], axis=1)


def _hash(number: int) -> int:
    return int.from_bytes(hashlib.sha256(str(number).encode()).digest()[:8], "little")


def of_chain(chain: int, length: int) -> range:
    return range(chain * 1000, chain * 1000 + length)


def simulated(prompts: list[range], memory: float) -> float:
    """Hit rate of an LRU that a prompt's blocks are touched in last to first."""
    lru, hits = OrderedDict[int, None](), 0
    for prompt in prompts:
        hits += sum(block in lru for block in prompt)
        for block in reversed(prompt):
            lru[block] = None
            lru.move_to_end(block)
        while len(lru) * SIZE > memory:
            lru.popitem(last=False)
    return hits / sum(map(len, prompts))


def measured(prompts: list[range], capacity: int = ROOM) -> HitCurve:
    curve = HitCurve()
    curve.resize(capacity)
    for prompt in prompts:
        curve.asked(keys_of(prompt), SIZE, 0)
    return curve


def edges(lowest: int, highest: int) -> Iterator[float]:
    """Numbers of bytes at which one count ends and the next one begins."""
    for at in range(lowest * FINENESS, highest * FINENESS):
        yield 2 ** (at / FINENESS)


@given(st.lists(st.builds(of_chain, st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=60))
def test_without_sampling_the_curve_is_that_of_an_lru(prompts: list[range]) -> None:
    curve = measured(prompts)
    for memory in (*edges(13, 15), *edges(16, 21)):
        assert curve.hit_rate(memory) == pytest.approx(simulated(prompts, memory), abs=1e-6)


def zipf(seed: int, chains: int, count: int) -> list[range]:
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, chains + 1)
    drawn = random.choice(chains, count, p=shares / shares.sum())
    return [
        of_chain(int(chain), int(length)) for chain, length in zip(drawn, random.integers(1, 40, count), strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_of_few_keys_gives_nearly_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curve, "KEYS", 4096)
    prompts = zipf(seed, 1500, 6000)
    curve = measured(prompts)
    assert curve._sample.state[SHIFT] > 0 and curve._sample.state[COUNT] <= 4096
    for blocks in (1000, 4000, 16000):
        assert curve.hit_rate(blocks * SIZE) == pytest.approx(simulated(prompts, blocks * SIZE), abs=0.03)


def test_keys_that_were_used_too_long_ago_leave_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has more memory between its uses than any figure tells takes no room of what has less."""
    monkeypatch.setattr(hit_curve, "KEYS", 1024)
    prompts = [of_chain(chain, 20) for chain in accumulate([1] * 500)]
    curve = measured([prompt for new in prompts for prompt in (new, new)], capacity=20 * SIZE)
    assert curve._sample.state[SHIFT] == 0
    assert curve.hit_rate(21 * SIZE) == pytest.approx(0.5, abs=0.01)


def test_a_busy_directory_samples_fewer_keys() -> None:
    curve = measured([of_chain(chain, 100) for chain in range(10)])
    curve.check(1.0)
    for second in range(2, 30):
        for _ in range(10 * USES_PER_S // 1000):
            curve.asked(keys_of(of_chain(second % 10, 100)), SIZE, 0) if second < 4 else None
        curve.check(float(second))
    assert curve._sample.state[SHIFT] == 0, "fewer than the limit"
    many = keys_of(range(10 * USES_PER_S))
    shifts = []
    for second in range(30, 40):
        curve.asked(many, SIZE, 0)
        curve.check(float(second))
        shifts.append(int(curve._sample.state[SHIFT]))
    assert shifts[-1] == shifts[-2] > 0, "until it costs little"


def test_what_was_counted_ages() -> None:
    curve = HitCurve()
    curve.resize(ROOM)
    now = 1.0
    for chain in range(50):  # nothing is asked for twice
        curve.asked(keys_of(of_chain(chain, 20)), SIZE, 0)
    curve.check(now)
    assert curve.hit_rate(ROOM) == 0
    for _ in range(12):
        now += HALF_LIFE_S + 1
        curve.check(now)
        for _ in range(50):
            curve.asked(keys_of(of_chain(99, 20)), SIZE, 0)
    assert curve.hit_rate(ROOM) > 0.95


def test_matches_and_stores_of_a_pool_are_counted() -> None:
    pool = Pool(slots=16)
    assert pool.directory.stats(0.0)["hit_curve"] == {}
    pool.store("a", KEYS[:4])
    assert pool.read("a", KEYS[:4]) == 4 and pool.read("a", KEYS[:8]) == 4
    figures = pool.directory.stats(0.0)["hit_curve"]
    assert figures["ceiling"] == figures["4"] == pytest.approx(8 / 12, abs=1e-4)
