"""Calls from event loops share a pipeline: cancelled calls, a closed loop, and many calls at once."""

import asyncio
import gc
import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from helpers.line.callers import aask, ask, drain
from helpers.line.echo_server import PATIENCE_S, expected, question
from helpers.line.loops import LOOPS, run

from raykv.line.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("plain_and_tls")

a_loop = pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)


@a_loop
def test_cancelled_calls_leave_the_others_right(
    pipeline: Pipeline, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        rng = random.Random(1)
        for _ in range(20):
            tasks = [asyncio.create_task(aask(pipeline, i, rng.randrange(50_000))) for i in range(20)]
            await asyncio.sleep(rng.choice((0.0, 0.001)))
            cancelled = [task for task in tasks if rng.random() < 0.5 and task.cancel()]
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            assert all(task.cancelled() for task in cancelled)
        assert not asyncio.get_running_loop().remove_reader(pipeline.socket), "nobody waits"

    run(new_loop, main())
    drain(pipeline)


@a_loop
def test_a_loop_that_was_closed_in_the_middle_hinders_nobody(
    pipeline: Pipeline, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    loop = new_loop()
    task = loop.create_task(aask(pipeline, 1, seconds=0.2))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    ask(pipeline, 2)
    asyncio.run(aask(pipeline, 3))
    task.set_name("garbage")  # keeps the task alive until its loop is closed
    del task, loop
    gc.collect()
    ask(pipeline, 4)


@a_loop
def test_many_calls_of_one_loop_fit_through_the_socket(
    pipeline: Pipeline, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """All are sent before the loop can read, and the peer takes requests only while its answers are read."""
    count, filler = 600, bytes(100_000)

    async def one(number: int) -> None:
        body = question(number, 100_000) + filler
        assert await pipeline.answer(body, PATIENCE_S) == expected(number, 100_000)

    async def main() -> None:
        await asyncio.gather(*map(one, range(count)))

    run(new_loop, main())
