"""Fixtures of tests of lines. A file that needs another `listener` has its own."""

from collections.abc import Iterator

import pytest
from helpers.line.echo_server import open_files, serving
from helpers.line.listeners import LONGEST
from helpers.pools import eventually

from raykv.line.listener import Listener


@pytest.fixture
def listener() -> Iterator[Listener]:
    """One that answers; nothing is left of it, nor of who connected to it."""
    before = open_files()
    with serving(LONGEST) as listener:
        yield listener
        eventually(lambda: not listener.unproven and not listener.served)
        assert len(listener._selector.get_map()) == 2, "the socket, and what wakes the thread"
    assert open_files() <= before
