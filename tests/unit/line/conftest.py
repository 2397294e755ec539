"""Fixtures of tests of lines. A file that needs another `listener` has its own."""

from collections.abc import Iterator

import pytest
from helpers.line.echo_server import PATIENCE_S, open_files, serving
from helpers.line.listeners import LONGEST
from helpers.pools import eventually

import raykv.line.pipeline
from raykv.line.listener import Listener
from raykv.line.pipeline import Pipeline


@pytest.fixture
def listener() -> Iterator[Listener]:
    """One that answers; nothing is left of it, nor of who connected to it."""
    before = open_files()
    with serving(LONGEST) as listener:
        yield listener
        eventually(lambda: not listener.unproven and not listener.served)
        assert len(listener._selector.get_map()) == 2, "the socket, and what wakes the thread"
    assert open_files() <= before


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setattr(raykv.line.pipeline, "SEND_S", PATIENCE_S)  # its listener is alive, however busy the machine
    with serving() as listener:
        pipeline = Pipeline(listener.address)
        yield pipeline
        assert not pipeline._due and not pipeline._waiting and not pipeline._loops
        pipeline.close()
