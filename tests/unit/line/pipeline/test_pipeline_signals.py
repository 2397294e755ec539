"""A signal interrupts a caller of a pipeline, and the other callers still get their answers."""

import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
from helpers.line.bare_listener import peer
from helpers.line.callers import ask, drain, send, threads
from helpers.line.echo_server import GATES, PATIENCE_S, expected, serving
from helpers.line.interrupts import Interrupted, interrupted_at
from helpers.pools import eventually

import raykv.line.pipeline
from raykv.line.pipeline import Pipeline, Request

pytestmark = pytest.mark.usefixtures("plain_and_tls")
MIB = 1 << 20


@contextmanager
def interrupted_when(check: Callable[[], object]) -> Iterator[None]:
    """Send the main thread a signal as soon as `check` is true."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    main = threading.main_thread().ident
    assert main
    before = signal.signal(signal.SIGUSR1, interrupt)

    def wait() -> None:
        eventually(check)
        signal.pthread_kill(main, signal.SIGUSR1)

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        waiting.join()
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def gated(*numbers: int) -> Iterator[threading.Event]:
    """Yields an event. The answers to these questions wait for it."""
    gate = threading.Event()
    GATES.update(dict.fromkeys(numbers, gate))
    try:
        yield gate
    finally:
        gate.set()
        for number in numbers:
            del GATES[number]


@pytest.mark.parametrize("reads", (True, False))
def test_a_waiter_that_a_signal_interrupts_passes_its_turn_on(pipeline: Pipeline, reads: bool) -> None:
    with threads(2) as executor, gated(1, 2) as gate:
        other = None if reads else executor.submit(ask, pipeline, 1)
        eventually(lambda: reads or pipeline.is_read)
        request = send(pipeline, 2)
        with interrupted_when(lambda: len(pipeline._waiting) == 2):
            if reads:
                other = executor.submit(_wait_when_read, pipeline, send(pipeline, 3))
            pipeline.wait(request, PATIENCE_S)
        assert other
        gate.set()
        other.result(PATIENCE_S)
    ask(pipeline, 4)


def _wait_when_read(pipeline: Pipeline, request: Request) -> None:
    eventually(lambda: pipeline.is_read)
    assert pipeline.wait(request, PATIENCE_S) == expected(3)


@pytest.mark.parametrize("what", ["wait", "look"])
def test_a_signal_at_any_moment_leaves_the_turn_to_others(what: str) -> None:
    """The signal comes at each moment once. Then the pipeline has failed, or another caller reads."""
    with serving() as listener, threads(1) as executor:
        pipeline, moments = Pipeline(listener.address), list[str]()
        while True:
            request = send(pipeline, 1)
            assert select.select([pipeline.socket], [], [], PATIENCE_S)[0]  # an answer is there to read
            with interrupted_at(len(moments), raykv.line.pipeline) as at:
                pipeline.wait(request, PATIENCE_S) if what == "wait" else pipeline.look()
            if not at:
                break
            moments.append(at[0])
            assert not pipeline.is_read, at
            if pipeline.alive:
                executor.submit(ask, pipeline, 2).result(2 * PATIENCE_S)
            else:
                pipeline = Pipeline(listener.address)
        pipeline.close()
    assert len(moments) > 10, moments


def test_a_request_that_a_signal_cut_short_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer would take the missing rest from the next request."""
    monkeypatch.setattr(raykv.line.pipeline, "SEND_S", PATIENCE_S)
    received: list[int] = []

    def count(connection: socket.socket) -> None:
        select.select([connection], [], [])
        begun.set()
        done.wait(PATIENCE_S)
        while data := connection.recv(MIB):
            received.append(len(data))

    begun, done = threading.Event(), threading.Event()
    with peer(count) as address:
        pipeline = Pipeline(address)
        with interrupted_when(begun.is_set):
            pipeline.send(bytes(64 * MIB), Request().deliver)
        with pytest.raises(ConnectionError):
            send(pipeline, 1)
        done.set()
        drain(pipeline)
    assert 0 < sum(received) < 64 * MIB
