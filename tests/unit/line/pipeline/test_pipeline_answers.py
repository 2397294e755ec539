"""Every caller of a pipeline gets its own answer, whenever other callers give up."""

import asyncio
import random
import threading

import pytest
from helpers.line.callers import aask, ask, drain, send, threads
from helpers.line.echo_server import PATIENCE_S, expected, question
from helpers.line.loops import LOOPS, run

from raykv.line.pipeline import Answer, Pipeline

pytestmark = pytest.mark.usefixtures("plain_and_tls")
MIB = 1 << 20


def test_threads_and_loops_get_their_own_answers_at_once(pipeline: Pipeline) -> None:
    def in_thread(seed: int) -> None:
        rng = random.Random(seed)
        for i in range(60):
            ask(pipeline, seed * 1000 + i, size(rng), pause(rng))

    async def in_loop(seed: int) -> None:
        async def task(number: int) -> None:
            rng = random.Random(number)
            for i in range(10):
                await aask(pipeline, number + i, size(rng), pause(rng))

        await asyncio.gather(*(task(seed * 1000 + 10 * i) for i in range(8)))

    def size(rng: random.Random) -> int:
        return rng.choice((0, 100, rng.randrange(40_000), rng.randrange(MIB)))

    def pause(rng: random.Random) -> float:
        return rng.choice((0.0, 0.0, 0.0, 0.001))

    with threads(8) as executor:
        done = [executor.submit(in_thread, seed) for seed in range(5)]
        loops = [*LOOPS.values(), asyncio.new_event_loop]
        done += [executor.submit(run, loop, in_loop(100 + i)) for i, loop in enumerate(loops)]
        for future in done:
            future.result(PATIENCE_S)


def test_a_waiter_that_was_told_to_read_before_it_waited_reads(pipeline: Pipeline) -> None:
    first, second = send(pipeline, 1), send(pipeline, 2, seconds=0.1)
    assert pipeline.wait(first, PATIENCE_S) == expected(1)
    for _ in range(3):
        second.woken.put(None)
    assert pipeline.wait(second, PATIENCE_S) == expected(2)


def test_no_patient_waiter_misses_its_answer_beside_hasty_ones(pipeline: Pipeline) -> None:
    """A hasty waiter gives up while it reads, when it is told to read, or before."""
    late, stop = [0, 0], threading.Event()

    def patient(seed: int) -> None:
        rng = random.Random(seed)
        for i in range(400):
            ask(pipeline, seed * 10_000 + i, rng.randrange(2000), rng.choice((0.0, 0.0, 0.0, 0.001)))

    def hasty(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            number = rng.randrange(1 << 40)
            try:
                request = send(pipeline, number, 10)
                assert pipeline.wait(request, rng.choice((0.0, 0.0002, 0.001))) == expected(number, 10)
            except TimeoutError:
                late[0] += 1
            late[1] += 1

    with threads(8) as executor:
        hasties = [executor.submit(hasty, seed) for seed in range(4)]
        patients = [executor.submit(patient, 10 + seed) for seed in range(4)]
        try:
            for future in patients:
                future.result(2 * PATIENCE_S)
        finally:
            stop.set()
        for future in hasties:
            future.result(PATIENCE_S)
    assert late[0] > 100 and late[1] > 1000, "the stress was none"
    drain(pipeline)


def test_late_answers_are_taken_for_nobody_elses(pipeline: Pipeline) -> None:
    given_up = send(pipeline, 1, 5000, seconds=0.2)
    with pytest.raises(TimeoutError):
        pipeline.wait(given_up, 0.01)
    with pytest.raises(TimeoutError):
        asyncio.run(_hasty(pipeline, 2))
    ask(pipeline, 3, 77)
    asyncio.run(aask(pipeline, 4, 78))


async def _hasty(pipeline: Pipeline, number: int) -> bytes:
    return await pipeline.answer(question(number, 5000, 0.05), 0.01)


def test_a_request_whose_answer_nobody_waits_for_keeps_nobody_from_reading(pipeline: Pipeline) -> None:
    send(pipeline, 1, seconds=0.1)
    with threads(3) as executor:
        done = [executor.submit(ask, pipeline, 10 + i, 100, 0.02) for i in range(6)]
        for future in done:
            future.result(PATIENCE_S)


def test_answers_that_nobody_waits_for_are_delivered_by_look(pipeline: Pipeline) -> None:
    answers: list[Answer] = []
    for number in range(3):
        pipeline.send(question(number), answers.append)
    drain(pipeline)
    assert answers == [expected(number) for number in range(3)]


def test_an_answer_that_can_not_be_delivered_is_not_the_readers_fault(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(answer: Answer) -> None:
        raise TypeError("refused")

    pipeline.send(question(1), refuse)
    ask(pipeline, 2)
    assert "refused" in caplog.text
