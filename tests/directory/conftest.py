import pytest
from helpers.directory.tiers import SLAB

from raykv.directory.state import tier_catalog


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slabs of external tiers small, so that a tier of few blocks has several."""
    monkeypatch.setattr(tier_catalog, "slab_bytes", lambda _: SLAB)
