"""Which directory takes charge, and when, with a stand-in for Ray's internal KV."""

import os
import socket
import threading
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from raykv.actors.directory import succession
from raykv.actors.directory.succession import SILENT_PINGS, SILENT_RAY_PINGS, Succession
from raykv.cluster.internal_kv import InCharge
from raykv.protocol.location import Address

FIRST, SECOND = "raykv/p/directory-1", "raykv/p/directory-2"
THERE = Address("127.0.0.1", 1, b"")  # where nobody listens
HERE = Address("127.0.0.1", 2, b"")


class InternalKv:
    """A stand-in for Ray's internal KV, for one pool."""

    def __init__(self) -> None:
        self.now = InCharge(FIRST, THERE)
        self.stopped = False
        self.asked = 0  # how often somebody asked who is in charge
        self.deaf = 0  # how many puts are executed although their answer is lost

    def in_charge(self, pool: str) -> InCharge:
        self.asked += 1
        return self.now

    def put_in_charge(self, pool: str, name: str, address: Address | None) -> None:
        self.now = InCharge(name, address)
        if self.deaf:
            self.deaf -= 1
            raise GetTimeoutError("Ray's GCS is slow")

    def settings(self, pool: str) -> dict[str, Any] | None:
        return None if self.stopped else {}


class Line:
    def __init__(self, pool: str) -> None:
        self.answers, self.alive, self.way = True, True, "socket"
        self.address: Address | None = THERE

    def find(self) -> bool:
        return True

    def look(self) -> bool:
        return self.alive

    def close(self) -> None:
        self.address = None

    def call(self, method: str, seconds: float) -> int:
        if not self.answers:
            raise TimeoutError
        return 1


@pytest.fixture
def internal_kv(monkeypatch: pytest.MonkeyPatch) -> InternalKv:
    found = InternalKv()
    monkeypatch.setattr(succession, "internal_kv", found)
    monkeypatch.setattr(succession, "DirectoryLine", Line)
    monkeypatch.setattr(succession, "HEARTBEAT_S", 0.0)
    return found


class Directory:
    """A directory that counts how often it took charge."""

    def __init__(self, name: str, prepare: Any = lambda: None) -> None:
        self.taken = 0
        self.succession = Succession("p", name, prepare, self._take)
        self.line: Any = self.succession._line

    def _take(self) -> Address:
        self.taken += 1
        return HERE

    def steps(self, count: int) -> int:
        """Take so many looks. Returns how often the directory has taken charge."""
        for _ in range(count):
            self.succession._step()
        return self.taken


def test_a_successor_leaves_a_directory_that_answers_in_charge(internal_kv: InternalKv) -> None:
    assert Directory(SECOND).steps(50) == 0 and internal_kv.now.name == FIRST


def test_a_successor_asks_the_internal_kv_only_while_the_directory_does_not_answer(internal_kv: InternalKv) -> None:
    second = Directory(SECOND)
    second.steps(50)
    assert internal_kv.asked == 1
    second.line.answers = False
    second.steps(2)
    assert internal_kv.asked == 2, "since the first ping in vain"


def test_a_successor_that_was_put_in_charge_while_the_directory_answers_serves(internal_kv: InternalKv) -> None:
    second, internal_kv.deaf = Directory(SECOND), 1
    second.steps(2)
    with pytest.raises(GetTimeoutError):  # the supervisor asked the directory to take charge, and gets this error
        second.succession.take()
    assert second.steps(1) == 2 and internal_kv.now.name == SECOND


def test_a_successor_takes_over_at_once_when_the_process_has_ended(internal_kv: InternalKv) -> None:
    second = Directory(SECOND)
    assert second.steps(2) == 0
    second.line.alive = False
    assert second.steps(1) == 1 and internal_kv.now == InCharge(SECOND, HERE)


def test_a_directory_that_ends_slowly_has_ended(internal_kv: InternalKv) -> None:
    """A killed process closes its files one by one, maybe its port last."""
    port, taken = socket.create_server(("127.0.0.1", 0)), threading.Event()
    host, number = port.getsockname()
    there = Address(host, number, b"")
    internal_kv.now = InCharge(FIRST, there)

    def end() -> None:
        for _ in range(3):  # the dying directory accepts connections, and never answers
            port.accept()[0].close()
        port.close()
        taken.set()

    threading.Thread(target=end, daemon=True).start()
    second = Directory(SECOND)
    second.line.address = there
    assert second.steps(2) == 0
    second.line.alive = False
    assert second.steps(1) == 1 and internal_kv.now == InCharge(SECOND, HERE)
    assert taken.is_set()


def test_a_restarted_directory_is_not_replaced(internal_kv: InternalKv) -> None:
    second = Directory(SECOND)
    assert second.steps(2) == 0
    second.line.alive, internal_kv.now = False, InCharge(FIRST, HERE)  # the first directory listens elsewhere
    assert second.steps(1) == 0 and internal_kv.now.name == FIRST


@pytest.mark.parametrize(("way", "pings"), [("socket", SILENT_PINGS), ("ray", SILENT_RAY_PINGS)])
def test_a_silent_directory_is_replaced_after_so_many_pings(internal_kv: InternalKv, way: str, pings: int) -> None:
    second = Directory(SECOND)
    assert second.steps(2) == 0
    second.line.answers, second.line.way = False, way
    assert second.steps(pings - 1) == 0
    assert second.steps(1) == 1 and internal_kv.now.name == SECOND


def test_pings_of_a_directory_before_do_not_count_for_one_that_was_restarted(internal_kv: InternalKv) -> None:
    second = Directory(SECOND)
    assert second.steps(2) == 0
    second.line.answers = False
    assert second.steps(SILENT_PINGS - 1) == 0
    second.line.address, internal_kv.now = HERE, InCharge(FIRST, HERE)
    assert second.steps(SILENT_PINGS - 1) == 0


def test_nobody_takes_over_a_pool_that_is_being_stopped(internal_kv: InternalKv) -> None:
    second = Directory(SECOND)
    assert second.steps(2) == 0
    internal_kv.stopped, second.line.alive = True, False
    assert second.steps(10) == 0 and internal_kv.now.name == FIRST


def test_a_successor_gives_up_if_the_first_is_back_while_it_prepares(internal_kv: InternalKv) -> None:
    def prepare() -> None:
        internal_kv.now = InCharge(FIRST, HERE)

    second = Directory(SECOND, prepare)
    second.succession.take()
    assert second.taken == 0 and internal_kv.now == InCharge(FIRST, HERE)


def test_a_directory_whose_news_was_told_but_not_confirmed_serves(internal_kv: InternalKv) -> None:
    second, internal_kv.deaf = Directory(SECOND), 1
    with pytest.raises(GetTimeoutError):
        second.succession.take()
    assert second.steps(1) == 2 and internal_kv.now.name == SECOND, "asked twice, which changes nothing"
    assert second.steps(5) == 2


def test_a_directory_that_was_replaced_ends(internal_kv: InternalKv, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    first = Directory(FIRST)
    first.succession.take()
    assert first.steps(3) == 1
    internal_kv.now = InCharge(SECOND, HERE)
    with pytest.raises(Ended):
        first.steps(1)
    with pytest.raises(Ended):  # even if the supervisor asks it to take charge again
        first.succession.take()
