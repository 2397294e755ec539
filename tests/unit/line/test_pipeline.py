"""Requests and answers on one connection: everybody gets the own answer, whatever becomes of the others."""

import asyncio
import gc
import os
import random
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
from helpers.line.echo_server import GATES, PATIENCE_S, Server, expected, open_files, question, serving
from helpers.line.interrupts import Interrupted, interrupted_at
from helpers.pools import eventually

import raykv.line.pipeline
from raykv.line import tls, wire
from raykv.line.pipeline import Answer, Pipeline, Request
from raykv.protocol.location import Address

pytestmark = pytest.mark.usefixtures("plain_and_tls")

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
with suppress(ImportError):
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop

a_loop = pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
MIB = 1 << 20
Ask = Callable[[int, int, float], bytes]


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setattr(raykv.line.pipeline, "SEND_S", PATIENCE_S)  # its listener is alive, however busy the machine
    with serving() as listener:
        pipeline = Pipeline(listener.address)
        yield pipeline
        assert not pipeline._due and not pipeline._waiting and not pipeline._loops
        pipeline.close()


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(count) as executor:
        yield executor


def send(pipeline: Pipeline, number: int, size: int = 0, seconds: float = 0.0) -> Request:
    request = Request()
    pipeline.send(question(number, size, seconds), request.deliver)
    return request


def ask(pipeline: Pipeline, number: int, size: int = 0, seconds: float = 0.0) -> None:
    """Ask, and see that it is answered."""
    assert pipeline.wait(send(pipeline, number, size, seconds), PATIENCE_S) == expected(number, size)


async def aask(pipeline: Pipeline, number: int, size: int = 0, seconds: float = 0.0) -> None:
    assert await pipeline.answer(question(number, size, seconds), PATIENCE_S) == expected(number, size)


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], coroutine: Any) -> Any:
    """In a loop of its own, which watches no socket when it is done."""
    with closing(new_loop()) as loop:
        return loop.run_until_complete(coroutine)


def drain(pipeline: Pipeline) -> None:
    """Wait for the answers that nobody waits for any more."""

    looked_until(pipeline, lambda: not pipeline._due)


def looked_until(pipeline: Pipeline, check: Callable[[], bool]) -> None:
    def look() -> bool:
        pipeline.look()
        return check()

    eventually(look)


# ---------------------------------------------------------------------- everybody at once


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
    """And does not take what it was told for its answer."""
    first, second = send(pipeline, 1), send(pipeline, 2, seconds=0.1)
    assert pipeline.wait(first, PATIENCE_S) == expected(1)
    for _ in range(3):
        second.woken.put(None)
    assert pipeline.wait(second, PATIENCE_S) == expected(2)


def test_no_patient_waiter_misses_its_answer_beside_hasty_ones(pipeline: Pipeline) -> None:
    """A hasty one gives up as it reads, as it is told to read, or before."""
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


@contextmanager
def interrupted_when(check: Callable[[], object]) -> Iterator[None]:
    """The main thread gets a signal as soon as this is so."""

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
    """The answers to these questions wait for the event."""
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
    """At each moment once: the pipeline has failed then, or others read."""
    with serving() as listener, threads(1) as executor:
        pipeline, moments = Pipeline(listener.address), list[str]()
        while True:
            request = send(pipeline, 1)
            assert select.select([pipeline.socket], [], [], PATIENCE_S)[0]  # there is something to read
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


# ---------------------------------------------------------------------- event loops


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
    task.set_name("garbage")  # else it is collected before its loop is closed
    del task, loop
    gc.collect()
    ask(pipeline, 4)


@a_loop
def test_many_calls_of_one_loop_fit_through_the_socket(
    pipeline: Pipeline, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """All are sent before the loop can read: the peer takes requests only while its answers are taken."""
    count, filler = 600, bytes(100_000)

    async def one(number: int) -> None:
        body = question(number, 100_000) + filler
        assert await pipeline.answer(body, PATIENCE_S) == expected(number, 100_000)

    async def main() -> None:
        await asyncio.gather(*map(one, range(count)))

    run(new_loop, main())


# ---------------------------------------------------------------------- calls that nobody waits for


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


# ---------------------------------------------------------------------- failures


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.end()


def test_whoever_waits_learns_at_once_that_the_server_was_killed(server: Server) -> None:
    pipeline = Pipeline(server.address)
    told: list[Answer] = []

    async def in_loop(number: int) -> None:
        asked = await asyncio.gather(*(aask(pipeline, number + i) for i in range(5)), return_exceptions=True)
        for error in asked:  # all have ended: a loop that closes before that leaves them as they are
            assert isinstance(error, ConnectionError)
        raise asked[0]  # type: ignore[misc]

    send(pipeline, 0, seconds=PATIENCE_S)
    pipeline.send(question(1), told.append)
    with threads(10) as executor:
        waiting: list[Future[Any]] = [executor.submit(ask, pipeline, 10 + i) for i in range(6)]
        waiting += [executor.submit(run, loop, in_loop(100)) for loop in LOOPS.values()]
        eventually(lambda: len(pipeline._due) == 2 + 6 + 5 * len(LOOPS))
        os.kill(server.process.pid, signal.SIGKILL)
        for future in waiting:
            with pytest.raises(ConnectionError):
                future.result(PATIENCE_S / 2)
    assert not pipeline.alive and not pipeline._loops and isinstance(told[0], ConnectionError)
    with pytest.raises(ConnectionError):
        send(pipeline, 2)
    with pytest.raises(ConnectionError):
        asyncio.run(aask(pipeline, 3))


def greet(connection: socket.socket, token: bytes) -> None:
    """As a listener does."""
    ours = wire.challenge()
    connection.sendall(ours)
    theirs = wire.receive(connection, wire.CHALLENGE_BYTES + wire.PROOF_BYTES)[: wire.CHALLENGE_BYTES]
    connection.sendall(wire.proof(token, wire.LISTENER, ours + theirs))


def encrypted(connection: socket.socket) -> Any:
    """Where TLS is used."""
    if not tls.used():
        return connection
    guarded = tls.TlsSocket(connection)
    while not guarded.shake():
        pass
    return guarded


@contextmanager
def peer(serve: Callable[[socket.socket], Any]) -> Iterator[Address]:
    """Whoever connects is served by this function, in a thread; the connection ends with it."""
    token = b"t" * wire.TOKEN_BYTES

    def run() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with encrypted(connection) as connection, suppress(OSError):
                    greet(connection, token)
                    serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Address("127.0.0.1", listening.getsockname()[1], token)
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    done = threading.Event()
    with peer(lambda connection: done.wait(PATIENCE_S)) as address:
        pipeline = Pipeline(address)
        waiting = send(pipeline, 1)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                pipeline.send(bytes(MIB), Request().deliver)
        with pytest.raises(ConnectionError):
            pipeline.wait(waiting, PATIENCE_S)
        assert not pipeline.alive and not pipeline._due
        done.set()


def test_a_request_that_a_signal_cut_short_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it would be taken out of the next one."""
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


def test_an_answer_to_nothing_ends_the_connection() -> None:
    """It would be taken for the next one's."""

    def answer_nothing(connection: socket.socket) -> None:
        connection.sendall(wire.frame(expected(1)))
        connection.recv(1000)

    with peer(answer_nothing) as address:
        pipeline = Pipeline(address)
        looked_until(pipeline, lambda: not pipeline.alive)
        with pytest.raises(ConnectionError):
            ask(pipeline, 1)


def test_an_answer_longer_than_any_ends_the_connection() -> None:

    def answer_too_much(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"\xff" * 100)
        connection.recv(1)

    with peer(answer_too_much) as address:
        pipeline = Pipeline(address)
        with pytest.raises(ConnectionError, match="4294967295 bytes"):
            ask(pipeline, 1)


def test_connections_that_break_give_nobody_anothers_answer() -> None:
    """In the middle of answers, of requests, of sends."""
    rng = random.Random(2)

    def break_soon(connection: socket.socket) -> None:
        for _ in range(rng.randrange(20)):
            (length,) = wire.LENGTH.unpack(wire.receive(connection, wire.LENGTH.size))
            number = int.from_bytes(wire.receive(connection, length)[:8], "little")
            connection.sendall(wire.frame(expected(number, 3000)))
        if rng.random() < 0.5:
            connection.sendall(wire.frame(expected(0, 3000))[: rng.randrange(3000)])
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def until_it_breaks(pipeline: Pipeline, seed: int) -> None:
        with pytest.raises(ConnectionError):
            for i in range(1000):
                ask(pipeline, seed * 1000 + i, 3000)

    def in_a_loop_until_it_breaks(pipeline: Pipeline, seed: int) -> None:
        async def main() -> None:
            for i in range(1000):
                await aask(pipeline, seed * 1000 + i, 3000)

        with pytest.raises(ConnectionError):
            asyncio.run(main())

    with peer(break_soon) as address, threads(4) as executor:
        for _ in range(40):
            pipeline = Pipeline(address)
            done = [executor.submit(until_it_breaks, pipeline, 1 + i) for i in range(3)]
            done.append(executor.submit(in_a_loop_until_it_breaks, pipeline, 9))
            for future in done:
                future.result(PATIENCE_S)
            assert not pipeline._due and not pipeline._waiting and not pipeline._loops


def test_closing_while_an_answer_is_read_gives_it_to_nobody_else(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_frame, closer = wire.take_frame, threading.Thread(target=pipeline.close)

    def take_as_it_is_closed(inbox: bytearray, longest: int) -> bytes | None:
        body = take_frame(inbox, longest)
        if body is not None and threading.current_thread() is threading.main_thread() and pipeline.alive:
            closer.start()
            eventually(lambda: not pipeline.alive)
        return body

    requests = [send(pipeline, number) for number in (1, 2, 3)]
    monkeypatch.setattr(wire, "take_frame", take_as_it_is_closed)
    assert pipeline.wait(requests[0], PATIENCE_S) == expected(1)
    closer.join(PATIENCE_S)
    for number, request in zip((2, 3), requests[1:], strict=True):
        with suppress(ConnectionError):
            assert pipeline.wait(request, PATIENCE_S) == expected(number)


def test_who_can_not_connect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1], b"t")
        with pytest.raises(ConnectionError, match="says nothing"):
            Pipeline(address)
    with pytest.raises(ConnectionError):
        Pipeline(address)
    with serving() as listener, pytest.raises(ConnectionError):
        Pipeline(listener.address._replace(token=b"guessed"))


# ---------------------------------------------------------------------- what is left


def test_pipelines_leave_no_files_and_no_threads(server: Server) -> None:
    def use(i: int) -> None:
        pipeline = Pipeline(server.address)
        ask(pipeline, 1)
        asyncio.run(aask(pipeline, 2))
        with suppress(TimeoutError):
            pipeline.wait(send(pipeline, 3, seconds=0.01), 0.0)
        if i % 2:
            pipeline.close()

    use(0)
    before = open_files(), threading.active_count()
    for i in range(10):
        use(i)
    assert open_files() <= before[0] and threading.active_count() <= before[1]
    eventually(lambda: server.status()[1] == 2)  # what it listens to, and what wakes it


def test_a_fork_that_ends_leaves_the_connection_alone(pipeline: Pipeline) -> None:
    ask(pipeline, 1)
    child = os.fork()
    if not child:
        del pipeline
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ask(pipeline, 2)
