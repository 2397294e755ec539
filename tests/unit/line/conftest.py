"""Fixtures for tests of lines. Files that need another `listener` have their own fixture."""

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
    """A listener that answers. After the test, it and all its connections must be gone."""
    before = open_files()
    with serving(LONGEST) as listener:
        yield listener
        eventually(lambda: not listener.unproven and not listener.served)
        assert len(listener._selector.get_map()) == 2, "the socket, and what wakes the thread"
    assert open_files() <= before


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setattr(raykv.line.pipeline, "SEND_S", PATIENCE_S)  # the listener answers, but maybe late
    with serving() as listener:
        pipeline = Pipeline(listener.address)
        yield pipeline
        assert not pipeline._due and not pipeline._waiting and not pipeline._loops
        pipeline.close()
