"""Which requests of an engine's queue are fetched for, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.chunks.chunks import Origin
from raykv.integrations.vllm.identity.adapters import Adapter
from raykv.integrations.vllm.scheduler.queue import AT_ONCE, Queue


def chain(request: str) -> Chain:
    return Chain({}, Origin(request, None, None))


def step(queue: Queue) -> list[str]:
    """The requests that are fetched for in a step."""
    fetched: list[str] = []
    queue.step(lambda one: fetched.append(one.origin.id))
    return fetched


@pytest.fixture
def queue() -> Queue:
    queue = Queue()
    for request in "abcd":
        queue.add(request, chain(request))
    return queue


def test_a_request_that_is_scheduled_within_a_step_is_not_fetched_for(queue: Queue) -> None:
    assert step(queue) == [], "the step may yet have scheduled the others"
    for request in "abcd":
        queue.leave(request)
    queue.leave("unknown")
    assert step(queue) == []


def test_the_first_requests_are_fetched_for_and_the_next_when_these_have_left(queue: Queue) -> None:
    step(queue)
    assert step(queue) == list("abcd")[:AT_ONCE]
    assert step(queue) == [], "their chunks would be pushed out"
    queue.leave("c")
    queue.leave("a")
    queue.add("e", chain("e"))
    assert step(queue) == ["d"]
    queue.leave("b")
    assert step(queue) == ["e"]
    queue.leave("d")
    assert step(queue) == [], "each is fetched for once"


def test_a_request_whose_adapter_has_no_name_yet_holds_up_nobody() -> None:
    queue, unnamed = Queue(), replace(chain("a"), adapter=1)
    queue.add("a", unnamed)
    queue.add("b", chain("b"))
    assert step(queue) == [] and step(queue) == ["b"]
    unnamed.origin = unnamed.origin._replace(adapter=Adapter(1, b"name", {}))
    assert step(queue) == ["a"]
