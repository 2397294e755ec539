"""Threads of async callers: a bounded number works at a time. A thread that waits for others does not count."""

import threading
from concurrent.futures import Future

import pytest

from raykv.client.stores.workers import SEATS, Workers, giving_way

PATIENCE_S = 30.0


def test_who_waits_for_another_process_holds_up_nobody() -> None:
    workers, gate = Workers("test"), threading.Event()

    def wait() -> bool:
        with giving_way():
            return gate.wait(PATIENCE_S)

    waiting = [workers.submit(wait) for _ in range(3 * SEATS)]
    assert workers.submit(int, "7").result(PATIENCE_S) == 7
    assert not any(task.done() for task in waiting)
    gate.set()
    assert all(task.result(PATIENCE_S) for task in waiting)


def test_no_more_work_at_a_time_than_there_are_seats_also_after_they_waited() -> None:
    workers, start, lock = Workers("test"), threading.Barrier(2 * SEATS), threading.Lock()
    full = threading.Barrier(SEATS)
    working, most = 0, 0

    def work() -> None:
        nonlocal working, most
        with giving_way():
            start.wait(PATIENCE_S)  # until all are here; then all go on at once
        with lock:
            working += 1
            most = max(most, working)
        full.wait(PATIENCE_S)
        with lock:
            working -= 1

    tasks: list[Future[None]] = [workers.submit(work) for _ in range(2 * SEATS)]
    for task in tasks:
        task.result(PATIENCE_S)
    assert most == SEATS


def test_work_that_fails_gives_its_seat_back() -> None:
    workers = Workers("test")
    for task in [workers.submit(int, "none") for _ in range(2 * SEATS)]:
        with pytest.raises(ValueError, match="none"):
            task.result(PATIENCE_S)
    assert workers.submit(int, "7").result(PATIENCE_S) == 7


def test_a_thread_of_nobodys_waits_as_ever() -> None:
    with giving_way():
        pass
