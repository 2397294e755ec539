"""Pools in this process: everything of raykv's as it is, and Ray in one process."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from helpers.cluster.one_process import OneProcess

HANDLED = (signal.SIGALRM, signal.SIGUSR1)  # what tests interrupt this process by


def _kill(pid: int, number: int, kill: Callable[[int, int], None] = os.kill) -> None:
    """Others, such as a Redis server. An actor's pid is this process's."""
    assert pid != os.getpid() or number in HANDLED, "what kills actors belongs to tests/cluster"
    kill(pid, number)


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneProcess]:
    """Two nodes; this thread is on the head's."""
    with pytest.MonkeyPatch.context() as patch:
        one = OneProcess()
        one.put_in_place(patch)
        patch.setattr(os, "kill", _kill)
        yield one
