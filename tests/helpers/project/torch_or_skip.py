"""torch, for the tests of it in files that `make pythons` runs without it."""

from typing import Any

import pytest


def torch_or_skip() -> Any:
    """The module. Where it is not installed, the test, or the file that calls this, is skipped."""
    return pytest.importorskip("torch", reason="torch is not installed: pip install 'raykv[transformers]'")
