"""torch, for tests that need it in files that `make pythons` runs without torch."""

from typing import Any

import pytest


def torch_or_skip() -> Any:
    """The module torch. Skips the test or file that calls this if torch is not installed."""
    return pytest.importorskip("torch", reason="torch is not installed: pip install 'raykv[transformers]'")
