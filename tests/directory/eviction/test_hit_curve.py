"""The hit rate by memory size, compared with a simulated LRU of each size."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np
import pytest
from helpers.directory.pool import KEYS, Pool
from hypothesis import given
from hypothesis import strategies as st

from raykv.bench.trace import caches
from raykv.bench.trace.formats import Request
from raykv.directory.kernels.hit_curve import COUNT, FINENESS, SHIFT, SHIFT_MAX
from raykv.directory.state import hit_curve
from raykv.directory.state.arrays import KeyArray
from raykv.directory.state.hit_curve import CALM_S, HALF_LIFE_S, LOOK_S, HitCurve

SIZE = 5000  # bytes of a block: with this size no distance lies at the edge of two counts
ROOM = 1 << 40  # bytes: so much that no key leaves the sample for its distance


def keys_of(blocks: Iterable[int]) -> KeyArray:
    """A key with a hash for each block."""
    numbers = np.fromiter(blocks, np.uint64)
    return np.stack([numbers, np.array([_hash(int(number)) for number in numbers], np.uint64)], axis=1)


def _hash(number: int) -> int:
    return int.from_bytes(hashlib.sha256(str(number).encode()).digest()[:8], "little")


def of_chain(chain: int, length: int) -> range:
    return range(chain * 1000, chain * 1000 + length)


def simulated(prompts: list[range], memory: float) -> float:
    """Hit rate of an exact LRU, in which a block is present only with all blocks before it."""
    requests = [Request(list(prompt), len(prompt)) for prompt in prompts]
    return sum(caches.lru(requests, [int(memory // SIZE)], [0] * len(requests))) / sum(map(len, prompts))


def measured(prompts: list[range], capacity: int = ROOM) -> HitCurve:
    curve = HitCurve()
    curve.resize(capacity)
    for prompt in prompts:
        curve.asked(keys_of(prompt), SIZE, 0)
    return curve


def edges(lowest: int, highest: int) -> Iterator[float]:
    """Memory sizes in bytes at which one count ends and the next one begins."""
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


def test_a_prompt_of_more_keys_than_usually_wait_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curve, "KEYS", 1024)  # so 256 uses can wait
    prompts = [of_chain(1, 5), of_chain(0, 1000), of_chain(0, 1000)]
    curve = measured(prompts)
    for memory in edges(16, 23):
        assert curve.hit_rate(memory) == pytest.approx(simulated(prompts, memory), abs=1e-6)


def test_a_full_queue_of_uses_is_counted_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curve, "KEYS", 512)  # so 128 uses can wait
    prompts = zipf(0, 9, 100)
    curve = measured(prompts)
    for memory in (*edges(13, 15), *edges(16, 21)):
        assert curve.hit_rate(memory) == pytest.approx(simulated(prompts, memory), abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_of_few_keys_gives_nearly_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curve, "KEYS", 4096)
    prompts = zipf(seed, 1500, 6000)
    curve = measured(prompts)
    assert curve._sample.state[SHIFT] > 0 and curve._sample.state[COUNT] <= 4096
    for blocks in (1000, 4000, 16000):
        assert curve.hit_rate(blocks * SIZE) == pytest.approx(simulated(prompts, blocks * SIZE), abs=0.03)


def test_keys_that_were_used_too_long_ago_leave_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distances between their uses are longer than any figure covers. They take no room from other keys."""
    monkeypatch.setattr(hit_curve, "KEYS", 1024)
    prompts = [of_chain(chain, 20) for chain in accumulate([1] * 500)]
    curve = measured([prompt for new in prompts for prompt in (new, new)], capacity=20 * SIZE)
    assert curve._sample.state[SHIFT] == 0
    assert curve.hit_rate(21 * SIZE) == pytest.approx(0.5, abs=0.01)


def test_a_busy_directory_samples_fewer_keys_and_a_calm_one_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curve, "USES_MOST", 1000)
    curve, now, many = measured([]), 0.0, keys_of(range(6000))
    shifts = []
    for _ in range(20):
        now += LOOK_S
        curve.asked(many, SIZE, 0)
        curve.check(now)
        shifts.append(int(curve._sample.state[SHIFT]))
    assert shifts[0] == 1 and shifts[-1] == shifts[-10] == 3, "until there are few enough"
    for _ in range(int(CALM_S / LOOK_S) + 2):
        now += LOOK_S
        curve.asked(many[:900], SIZE, 0)
        curve.check(now)
    assert curve._sample.state[SHIFT] == 3, "with all keys they would be too many"
    for _ in range(int(CALM_S / LOOK_S) + 2):
        now += LOOK_S
        curve.asked(many[:100], SIZE, 0)
        curve.check(now)
    assert curve._sample.state[SHIFT] == 0


def test_a_sample_whose_places_are_used_up_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curve, "KEYS", 4)
    prompts = [of_chain(number % 2, 2) for number in range(200)]
    curve = measured(prompts)
    assert curve._sample.state[COUNT] == 4
    assert curve.hit_rate(ROOM) == pytest.approx(simulated(prompts, ROOM)) == pytest.approx(396 / 400)


def test_keys_whose_hashes_somebody_chose_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All these keys are in every sample."""
    monkeypatch.setattr(hit_curve, "KEYS", 64)
    inverse = pow(0xD6E8FEB86659FD93, -1, 1 << 64)
    chosen = np.array([[number * inverse % (1 << 64), 0] for number in range(1, 1000)], np.uint64)
    curve = measured([])
    for _ in range(3):
        curve.asked(chosen, SIZE, 0)
        curve.stored(chosen, SIZE)
    assert curve._sample.state[COUNT] <= 64 and curve._sample.state[SHIFT] <= SHIFT_MAX
    assert 0 <= curve.hit_rate(ROOM) <= 1


def test_a_prompt_of_more_keys_than_a_sample_has_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_curve, "KEYS", 1024)
    curve = measured([of_chain(0, 1000), range(10_000, 15_000)])
    assert curve.hit_rate(ROOM) == pytest.approx(0, abs=0.05)


def test_ranks_that_need_the_same_blocks_use_them_once() -> None:
    pool = Pool(slots=16)
    pool.store("a", KEYS[:4])
    for _ in range(3):
        pool.match_parts("a", [("a", KEYS[:8])] * 4)
    figures = pool.directory.stats(0.0)["hit_curve"]
    assert figures["ceiling"] == pytest.approx((4 + 8 + 8) / 24, abs=1e-4)


def test_what_was_counted_ages() -> None:
    curve = HitCurve()
    curve.resize(ROOM)
    now = 1.0
    for chain in range(50):  # no chain is asked for twice
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
    pool.directory.clear(0.0)
    assert pool.directory.stats(0.0)["hit_curve"] == {}


def test_a_burst_of_look_ups_samples_fewer_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All look-ups come at one time, so the clock never makes the directory look in between."""
    monkeypatch.setattr(hit_curve, "USES_MOST", 100)
    monkeypatch.setattr(hit_curve, "KEYS", 64)
    pool = Pool(slots=16)
    pool.store("a", KEYS[:8])
    for _ in range(200):
        assert pool.read("a", KEYS[:8]) == 8
    assert pool.directory.hit_curve._sample.state[SHIFT] >= 2
