"""A thread that repeats a step: its pauses, what wakes it, and what ends it. Errors do not end it."""

import socket
import threading
import time
from typing import Any

import pytest
from helpers.pools import eventually

from raykv.line import directory_loop
from raykv.line.directory_loop import DirectoryLoop
from raykv.line.periodic import Pause, Periodic

LONG_S = 1000.0


def unexpected(error: Exception) -> None:
    pytest.fail(repr(error))


def counted(pause: Pause) -> tuple[Periodic, list[float]]:
    """(a loop, the times at which it took a step)."""
    steps: list[float] = []

    def step() -> Pause:
        steps.append(time.monotonic())
        return pause

    return Periodic("raykv-test", step, unexpected), steps


def ended(loop: Periodic) -> bool:
    loop.join(20.0)
    return not loop._thread.is_alive()


def test_steps_follow_one_another_after_the_pause_that_a_step_returns() -> None:
    loop, steps = counted(0.02)
    loop.start()
    eventually(lambda: len(steps) >= 4)
    loop.stop()
    assert ended(loop) and steps[3] - steps[0] >= 0.06


@pytest.mark.parametrize("pause", (None, LONG_S))
def test_wake_ends_a_pause(pause: Pause) -> None:
    loop, steps = counted(pause)
    loop.start()
    for n in (1, 2, 3):
        eventually(lambda n=n: len(steps) == n)  # type: ignore[misc]
        time.sleep(0.02)
        assert len(steps) == n
        loop.wake()
    loop.stop()
    assert ended(loop)


def test_the_end_of_a_connection_ends_a_pause() -> None:
    ours, theirs = socket.socketpair()
    steps: list[socket.socket | None] = []
    connection: list[socket.socket | None] = [ours]

    def step() -> None:
        steps.append(connection[0])
        connection[0] = ours if len(steps) == 1 else None

    loop = Periodic("raykv-test", step, unexpected, lambda: connection[0])
    loop.start()
    eventually(lambda: len(steps) == 1)
    with ours:
        theirs.close()
        eventually(lambda: len(steps) == 2)
    loop.stop()
    assert ended(loop)


def test_a_wake_during_a_step_is_not_lost() -> None:
    began, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def step() -> None:
        began.release()
        go_on.acquire()

    loop = Periodic("raykv-test", step, unexpected)
    loop.start()
    began.acquire()
    loop.wake()
    go_on.release()
    assert began.acquire(timeout=20.0), "though the step returned no time for the next one"
    loop.stop()
    go_on.release()
    assert ended(loop)


@pytest.mark.parametrize("sleeps", (False, True))
def test_stop_ends_a_pause_and_a_sleep_within_a_step(sleeps: bool) -> None:
    began = threading.Event()

    def step() -> float:
        began.set()
        if sleeps:
            loop.sleep(LONG_S)
        return LONG_S

    loop = Periodic("raykv-test", step, unexpected)
    loop.start()
    assert began.wait(20.0)
    loop.stop()
    assert ended(loop)


def test_an_error_is_handed_on_and_the_steps_go_on() -> None:
    errors: list[Exception] = []
    pauses = iter((0.0, None))

    def step() -> float:
        raise KeyError(len(errors))

    def on_error(error: Exception) -> Pause:
        errors.append(error)
        return next(pauses)

    loop = Periodic("raykv-test", step, on_error)
    loop.start()
    eventually(lambda: len(errors) == 2)
    time.sleep(0.02)
    assert [error.args for error in errors] == [(0,), (1,)], "the second pause lasts until it is woken"
    loop.stop()
    assert ended(loop)


def test_a_period_counts_from_the_beginning_of_a_step() -> None:
    left: list[float] = []

    def step() -> None:
        time.sleep(0.05)
        left.extend((loop.rest_of(1.0), loop.rest_of(0.01)))

    loop = Periodic("raykv-test", step, unexpected)
    loop.start()
    eventually(lambda: len(left) == 2)
    loop.stop()
    assert 0.0 < left[0] <= 0.95 and left[1] == 0.0


def test_the_directory_is_looked_for_anew_after_an_error_only(monkeypatch: pytest.MonkeyPatch) -> None:
    directories = iter((ValueError("none yet"), "first", "second", "third"))
    late = TimeoutError("once, which may happen")
    outcomes = iter((0.0, late, 0.0, late, late, OSError("a bug"), 0.0))
    asked, failed, done = [], [], threading.Event()

    class Line:
        def __init__(self, pool: str, side: bytes) -> None:
            self.found = ""

        def find(self) -> bool:
            found = next(directories)
            if isinstance(found, Exception):
                raise found
            self.found = found
            return True

        way, connection = "socket", None

        def look(self) -> bool:
            return True

        def close(self) -> None:
            pass

    def step(line: Any) -> Pause:
        asked.append(line.found)
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        if line.found == "third":
            done.set()
            return None
        return outcome

    def on_error(error: Exception) -> float:
        failed.append(type(error))
        return 0.0

    monkeypatch.setattr(directory_loop, "DirectoryLine", Line)
    loop = DirectoryLoop("p", "raykv-test", step, on_error)
    loop.start()
    assert done.wait(20.0)
    loop.stop()
    assert ended(loop)
    assert asked == ["first"] * 5 + ["second", "third"], "one late answer is no reason to look, a second one is"
    assert failed == [ValueError, TimeoutError, TimeoutError, TimeoutError, OSError]
