"""What opening a tier that can't be used says."""

import traceback

import pytest

from raykv.tiers import open_tier, parse


def refusal(url: str) -> str:
    """What tier_for or the tier itself says, with all that led to it."""
    with pytest.raises((ValueError, OSError, ImportError)) as raised:
        open_tier(parse(url))
    assert str(raised.value).startswith("external=") or "] external=" in str(raised.value)
    return "".join(traceback.format_exception(raised.value))
