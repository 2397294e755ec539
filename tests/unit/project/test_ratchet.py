"""Which figures `make ratchet` calls worse, by made-up times of two sides with the noise of a machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.ratchet import LAST, OFTEN, WORSE, Ask, Sides, compare

MATCH_S = 150e-6
STARTS = 3


class World:
    """All processes take the same times, but some a third more by chance. A match takes `slower` more."""

    def __init__(self, seed: int, slower: float) -> None:
        self._random, self._slower = np.random.default_rng(seed), slower
        self.first: list[bool] = []

    @contextmanager
    def sides(self, ours_first: bool) -> Iterator[Sides]:
        self.first.append(ours_first)
        yield self._side(0.0), self._side(self._slower)

    def _side(self, slower: float) -> Ask:
        random = self._random
        places = 1 + 0.33 * (random.random(4) < 0.3)  # a factor for each of four processes

        def ask(figure: str) -> list[float]:
            seconds = MATCH_S + slower * (figure == "match")
            return [float(seconds * place * (1 + random.exponential(0.03))) for place in places]

        return ask


@pytest.mark.parametrize("seed", range(20))
def test_20_us_more_in_a_match_are_found_and_nothing_else(seed: int) -> None:
    world = World(seed, 20e-6)
    found = compare(world.sides, STARTS)
    assert world.first == [False, True, False] and set(found) == {*OFTEN, *LAST}
    assert [name for name, compared in found.items() if compared.is_worse(WORSE)] == ["match"]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_as_fast_or_faster_is_not_worse(seed: int) -> None:
    found = compare(World(seed, -20e-6).sides, STARTS)
    assert not [name for name, compared in found.items() if compared.is_worse(WORSE)]
    assert found["match"].best < 1
