"""Pools in this process: all of raykv runs unchanged, on Ray in one process."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from helpers.cluster.one_process import OneProcess

HANDLED = (signal.SIGALRM, signal.SIGUSR1)  # signals by which tests interrupt this process


def _kill(pid: int, number: int, kill: Callable[[int, int], None] = os.kill) -> None:
    """os.kill for other processes, such as a Redis server. The pid of an actor is this process's own."""
    assert pid != os.getpid() or number in HANDLED, "what kills actors belongs to tests/cluster"
    kill(pid, number)


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneProcess]:
    """Two nodes. This thread is on the head."""
    with pytest.MonkeyPatch.context() as patch:
        one = OneProcess()
        one.put_in_place(patch)
        patch.setattr(os, "kill", _kill)
        yield one
