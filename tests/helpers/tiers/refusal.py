"""The error of opening a tier that can't be used."""

import traceback

import pytest

from raykv.tiers import open_tier, parse


def refusal(url: str) -> str:
    """The messages of the error that opening this URL raises, and of its causes."""
    with pytest.raises((ValueError, OSError, ImportError)) as raised:
        open_tier(parse(url))
    assert str(raised.value).startswith("external=") or "] external=" in str(raised.value)
    return "".join(traceback.format_exception(raised.value))
