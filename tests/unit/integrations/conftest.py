"""Tests of integrations without an engine."""

from collections.abc import Iterator

import pytest
from helpers.project.signatures import Package


@pytest.fixture(scope="module", autouse=True)
def no_trees_left() -> Iterator[None]:
    """Forget syntax trees after the last test that reads them: a garbage collection of them would take 0.4 s."""
    yield
    Package.module.cache_clear()
