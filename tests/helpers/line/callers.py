"""Callers of a pipeline: threads and coroutines, and a wait for late answers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from helpers.line.echo_server import PATIENCE_S, expected, question
from helpers.pools import eventually
from raykv.line.pipeline import Pipeline, Request


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(count) as executor:
        yield executor


def send(pipeline: Pipeline, number: int, size: int = 0, seconds: float = 0.0) -> Request:
    request = Request()
    pipeline.send(question(number, size, seconds), request.deliver)
    return request


def ask(pipeline: Pipeline, number: int, size: int = 0, seconds: float = 0.0) -> None:
    assert pipeline.wait(send(pipeline, number, size, seconds), PATIENCE_S) == expected(number, size)


async def aask(pipeline: Pipeline, number: int, size: int = 0, seconds: float = 0.0) -> None:
    assert await pipeline.answer(question(number, size, seconds), PATIENCE_S) == expected(number, size)


def drain(pipeline: Pipeline) -> None:
    """Wait until the answers that callers gave up have come."""

    looked_until(pipeline, lambda: not pipeline._due)


def looked_until(pipeline: Pipeline, check: Callable[[], bool]) -> None:
    def look() -> bool:
        pipeline.look()
        return check()

    eventually(look)
