"""Which figures `make ratchet` calls worse: two sides whose times are made up, with the noise of a machine."""

import numpy as np
import pytest

from benchmarks.ratchet import LAST, OFTEN, compare

MATCH_S = 150e-6
TURNS = 12


class Side:
    """Takes as long for everything, but for some noise, and `slower` seconds more for a match."""

    def __init__(self, seed: int, slower: float = 0.0) -> None:
        self._random, self._slower = np.random.default_rng(seed), slower

    def __call__(self, figure: str) -> dict[str, float]:
        noise = float(self._random.lognormal(0.0, 0.04))
        return {figure: (MATCH_S + self._slower * (figure == "match")) * noise}


@pytest.mark.parametrize("seed", range(20))
def test_20_us_more_in_a_match_are_found_and_nothing_else(seed: int) -> None:
    found = compare(Side(seed), Side(1000 + seed, slower=20e-6), TURNS)
    assert set(found) == {*OFTEN, *LAST}
    assert [name for name, paired in found.items() if paired.is_worse] == ["match"]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_as_fast_or_faster_is_not_worse(seed: int) -> None:
    found = compare(Side(seed), Side(1000 + seed, slower=-20e-6), TURNS)
    assert not [name for name, paired in found.items() if paired.is_worse]
    assert found["match"].high < 1
