"""Which requests of an engine's queue are fetched for, and when."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.chunks.chunks import Origin
from raykv.integrations.vllm.scheduler.queue import AT_ONCE, Queue


def chain(request: str) -> Chain:
    return Chain({}, Origin(request, None, None))


def names(chains: list[Chain]) -> list[str]:
    return [one.origin.id for one in chains]


@pytest.fixture
def queue() -> Queue:
    queue = Queue()
    for request in "abcd":
        queue.add(request, chain(request))
    return queue


def test_a_request_that_is_looked_up_within_a_step_is_not_fetched_for(queue: Queue) -> None:
    assert queue.step() == [], "the step may yet have looked up the others"
    for request in "abcd":
        queue.leave(request)
    queue.leave("unknown")
    assert queue.step() == []


def test_the_first_requests_are_fetched_for_and_the_next_when_these_have_come(queue: Queue) -> None:
    queue.step()
    assert names(queue.step()) == list("abcd")[:AT_ONCE]
    fetching: list[Future[Any]] = [Future() for _ in range(AT_ONCE)]
    for one in fetching:
        queue.begin(one)
    assert queue.step() == []
    queue.leave("c")
    fetching[0].set_result(None)
    assert names(queue.step()) == ["d"]
    fetching[1].set_result(None)
    assert queue.step() == [], "each is fetched for once"
    queue.add("e", chain("e"))
    assert queue.step() == []
    assert names(queue.step()) == ["e"]
