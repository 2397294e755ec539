"""A pipeline ends with its connection. Its callers learn this at once, and no file or thread is left."""

import asyncio
import gc
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from helpers.line.bare_listener import peer
from helpers.line.callers import aask, ask, looked_until, send, threads
from helpers.line.echo_server import PATIENCE_S, Server, expected, open_files, question, serving
from helpers.line.loops import LOOPS, run
from helpers.pools import eventually

from raykv.line import wire
from raykv.line.pipeline import Answer, Pipeline, Request
from raykv.protocol.location import Address

pytestmark = pytest.mark.usefixtures("plain_and_tls")
MIB = 1 << 20


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
        for error in asked:  # await all, because a loop that closes earlier leaves tasks unfinished
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


def test_an_answer_to_nothing_ends_the_connection() -> None:
    """Otherwise the next question would get this answer."""

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
    """They break in the middle of answers, requests and sends."""
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
    eventually(lambda: server.status()[1] == 2)  # only its listening socket and its waker are left


def test_a_fork_that_ends_leaves_the_connection_alone(pipeline: Pipeline) -> None:
    ask(pipeline, 1)
    child = os.fork()
    if not child:
        del pipeline
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ask(pipeline, 2)
