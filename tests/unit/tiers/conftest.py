"""Fixtures for tests of a guarded tier."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.tiers.guarded_tier import DEADLINE_S, OURS, SEED, folder
from helpers.tiers.moody_dictionary import Moody

from raykv.tiers import guarded
from raykv.tiers.guarded import GuardedTier


@pytest.fixture
def opened() -> Iterator[Callable[..., GuardedTier]]:
    """A function that opens a guarded tier, of files in a folder or of a given tier."""
    made = []

    def open_it(where: Path | Moody, fingerprint: bytes = OURS, seed: bytes = SEED) -> GuardedTier:
        made.append(GuardedTier((lambda: where) if isinstance(where, Moody) else lambda: folder(where), fingerprint))
        assert made[-1].open(seed)
        return made[-1]

    yield open_it
    for one in made:
        one.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "CALL_S", DEADLINE_S)
    monkeypatch.setattr(guarded, "data_deadline", lambda size: DEADLINE_S)
    monkeypatch.setattr(guarded, "BACK_OFF_S", (0.05,))
