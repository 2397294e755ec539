"""A probe notices that a guarded tier is back, hangs or has lost its content."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.pools import eventually
from helpers.tiers.guarded_tier import OURS, SEED, folder, load, some_keys, store
from helpers.tiers.moody_dictionary import Moody

from raykv.tiers import guarded
from raykv.tiers.guarded import GuardedTier


def test_a_tier_that_is_down_at_first_is_opened_later(
    tmp_path: Path, opened: Callable[..., GuardedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "BACK_OFF_S", (0.05,))
    path, keys = tmp_path / "tier", some_keys(2)
    assert all(store(opened(path), keys))
    moved = path.rename(tmp_path / "moved")
    path.write_bytes(b"not a folder")
    tier = GuardedTier(lambda: folder(path), OURS)
    assert not tier.open(SEED) and tier.shared is None
    assert load(tier, keys) == [] and not any(store(tier, keys)) and list(tier.scan()) == []
    eventually(lambda: tier.probe() is None and tier.faults["probe"] > 1)
    path.unlink()
    moved.rename(path)
    (path / "0" / "lock").unlink()  # otherwise the new tier would take another subfolder
    assert eventually(lambda: tier.probe() is not None)
    assert tier.shared is False and load(tier, keys) == [True, True]
    tier.close()


def test_probes_back_off(opened: Callable[..., GuardedTier], hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "BACK_OFF_S", (0.02, 0.2, 30.0))
    moody = Moody()
    tier = opened(moody)
    moody.error = OSError("no route")
    assert not any(store(tier, some_keys(1)))
    eventually(lambda: tier.probe() is None and tier.faults["probe"] == 2)
    calls = len(moody.calls)
    for _ in range(20):
        assert tier.probe() is None
    assert len(moody.calls) == calls


@pytest.mark.parametrize("noticed", [True, False])
def test_a_probe_notices_lost_content(
    opened: Callable[..., GuardedTier], hasty: None, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """It does so whether calls failed meanwhile or nobody called."""
    monkeypatch.setattr(guarded, "CHECK_S", 0.05)
    moody, keys = Moody(), some_keys(2)
    tier = opened(moody)
    assert all(store(tier, keys))
    if noticed:
        moody.error = OSError("killed")
        assert load(tier, keys) == []
    moody.blocks.clear()
    moody.error = None
    assert eventually(lambda: tier.probe() is False)
    assert tier.up and load(tier, keys) == [False, False]
    assert tier.probe() is None
    assert all(store(tier, keys)) and load(tier, keys) == [True, True]


def test_a_probe_notices_a_tier_that_hangs(
    opened: Callable[..., GuardedTier], hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "CHECK_S", 0.05)
    moody = Moody()
    tier = opened(moody)
    moody.open.clear()
    eventually(lambda: tier.probe() is None and not tier.up)
    moody.open.set()
    assert eventually(tier.probe) is True
