"""Pools in this process: everything of raykv's as it is, and Ray in one process."""

import os
from collections.abc import Iterator

import pytest
from helpers.one_process import OneProcess


def _refuse(pid: int, number: int) -> None:
    raise AssertionError("here is one process: what kills belongs to tests/cluster")


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneProcess]:
    """Two nodes; this thread is on the head's."""
    with pytest.MonkeyPatch.context() as patch:
        one = OneProcess()
        one.put_in_place(patch)
        patch.setattr(os, "kill", _refuse)
        yield one
