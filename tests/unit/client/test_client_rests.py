"""While nobody calls, a client's thread rests until the next heartbeat. It wakes when it is needed."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.pools import eventually

from raykv.client import directory_client, tending
from raykv.client.directory_client import FORGET_S, PROBE_S, DirectoryClient
from raykv.client.tending import Tending
from raykv.config import METADATA_DEADLINE_S
from raykv.protocol.location import KEY_BYTES


class Line:
    way = "socket"

    def __init__(self, pool: str) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.alive, self.looks, self.asked = True, 0, list[str]()
        self.waited = dict[str, float]()  # by method, how long the last call was ready to wait

    def find(self) -> bool:
        self.asked.append("find")
        return True

    def look(self) -> bool:
        self.looks += 1
        return self.alive

    def send(self, method: str, *arguments: Any) -> str:
        self.asked.append(method)
        return method

    def wait(self, sent: str, seconds: float) -> tuple[int, int]:
        self.waited[sent] = seconds
        return 1, 0

    def call(self, method: str, *arguments: Any, seconds: float) -> None:
        pass

    def close(self) -> None:
        self.alive = True  # the directory that the next `find` finds
        self.connection.close()
        self.theirs.close()
        self.connection, self.theirs = socket.socketpair()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectoryClient]:
    """A client whose thread rests for long."""
    monkeypatch.setattr(directory_client, "DirectoryLine", Line)
    monkeypatch.setattr(tending, "TEND_S", 0.01)
    monkeypatch.setattr(tending, "HEARTBEAT_AFTER_S", 1000.0)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    client = DirectoryClient("p", lambda: 0, METADATA_DEADLINE_S)
    Tending(client)
    rests(client)
    line: Any = client.line
    assert line.asked == ["find"] and line.looks < 10
    yield client
    client.close()


def rests(client: DirectoryClient) -> None:
    eventually(lambda: client.rests)


def test_what_is_released_meanwhile_is_told(client: DirectoryClient) -> None:
    line: Any = client.line
    client.release(1)
    eventually(lambda: line.asked[1:] == ["client_heartbeat"])
    rests(client)
    client.pulled(np.zeros(1, np.uint8))
    eventually(lambda: line.asked[1:] == ["client_heartbeat"] * 2)


def test_what_is_released_soon_after_a_call_is_told(client: DirectoryClient) -> None:
    line: Any = client.line
    client.pin(bytes(KEY_BYTES))
    client.release(1)
    eventually(lambda: line.asked[1:] == ["pin", "client_heartbeat"])


def test_a_connection_that_ends_meanwhile_is_found_anew(client: DirectoryClient) -> None:
    line: Any = client.line
    line.alive = False
    line.theirs.close()
    eventually(lambda: line.asked[1:] == ["find", "client_heartbeat"])
    rests(client)


@pytest.mark.parametrize("deadline", [METADATA_DEADLINE_S, 7.0])
def test_nothing_waits_for_a_directory_longer_than_the_deadline_or_a_probe(
    client: DirectoryClient, deadline: float
) -> None:
    """The thread that asks looks for another directory only after the answer is due. Until then all is a miss."""
    line: Any = client.line
    client.deadline = deadline
    client.pin(bytes(KEY_BYTES))
    client.release(1)
    client.forget_later(bytes(KEY_BYTES))
    eventually(lambda: {"client_heartbeat", "forget"} <= line.waited.keys())
    assert line.waited["pin"] == deadline
    assert line.waited["client_heartbeat"] == max(PROBE_S, deadline)
    assert line.waited["forget"] == max(FORGET_S, deadline)


def test_the_thread_ends_with_a_client_that_nobody_has_any_more(client: DirectoryClient) -> None:
    others = set(threading.enumerate())
    forgotten = DirectoryClient("p", lambda: 0, METADATA_DEADLINE_S)
    Tending(forgotten)
    (thread,) = set(threading.enumerate()) - others
    rests(forgotten)
    del forgotten
    thread.join(20.0)
    assert not thread.is_alive()


def test_the_thread_ends_though_close_was_interrupted(client: DirectoryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    others = set(threading.enumerate())
    leaving = DirectoryClient("p", lambda: 0, METADATA_DEADLINE_S)
    Tending(leaving)
    (thread,) = set(threading.enumerate()) - others
    monkeypatch.setattr(leaving.line, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leaving.close()
    thread.join(20.0)
    assert not thread.is_alive()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_was_counted_is_told_before_the_thread_rests(client: DirectoryClient) -> None:
    counter: Any = Counted()
    client.metrics._metrics["saved_tokens_total"] = counter
    for total in (1, 2):  # the second count comes within EXPORT_S of the first
        client.metrics.add("saved_tokens_total", 1, model="m")
        client.release(1)
        eventually(lambda total=total: counter.sum == total)  # type: ignore[misc]


class Counted:
    """A stand-in for Ray's metric."""

    sum = 0.0

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.sum += value
