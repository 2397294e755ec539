"""The standby directory starts on another node. It is moved, but seldom, if Ray put it on the wrong node."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import RayActorError

from raykv.actors.directory import successor
from raykv.actors.directory.successor import LOOK_S, MOVE_AFTER_S, START_DEADLINE_S, Successor

NUMBER, IN_CHARGE = 2, "head"


class Directory:
    """In place of the handle of a directory: its state in Ray, and its answers."""

    def __init__(self, node_id: str) -> None:
        self.state, self.answers = ActorTableData.ALIVE, True
        self.error: Exception | None = None
        self.node_id = SimpleNamespace(remote=lambda: (self, node_id))

    def _get_local_state(self) -> int:
        return int(self.state)


class Ray:
    """In place of Ray, with a clock. puts: the node on which Ray puts the next directory, whatever was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.puts = 100.0, ""
        self.asked: list[str] = []  # nodes that were asked for
        self.killed: list[Directory] = []
        monkeypatch.setattr(successor, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(successor, "start_directory", self._start)
        monkeypatch.setattr(successor, "ray", SimpleNamespace(wait=self._wait, get=self._get, kill=self.killed.append))

    def _start(self, pool: str, number: int, node_id: str) -> Directory:
        assert (pool, number) == ("pool", NUMBER)
        self.asked.append(node_id)
        return Directory(self.puts or node_id)

    def _wait(self, answers: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done = [answer for answer in answers if answer[0].answers]
        return done, [answer for answer in answers if answer not in done]

    def _get(self, answer: tuple[Directory, str]) -> str:
        if answer[0].error:
            raise answer[0].error
        return answer[1]

    def look(self, kept: Successor, others: list[str], seconds: float = LOOK_S) -> bool:
        """Look after some seconds, and end a standby directory that is misplaced. Returns whether one was."""
        self.now += seconds
        assert kept.due()
        if bad := kept.look(NUMBER, IN_CHARGE, others):
            kept.give_up(bad, "test")
        assert not kept.due()
        return bad is not None


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(monkeypatch)


@pytest.fixture
def kept(ray: Ray) -> Successor:
    kept = Successor("pool")
    assert not kept.due()
    ray.now += successor.FIRST_LOOK_S
    return kept


def test_it_stands_by_on_another_node_where_there_is_one(ray: Ray, kept: Successor) -> None:
    assert not kept.stands_by(NUMBER)
    assert not any(ray.look(kept, ["a", "b"]) for _ in range(10))
    assert ray.asked == ["a"] and kept.stands_by(NUMBER) and not kept.stands_by(1)


def test_on_one_node_it_stays_where_it_is(ray: Ray, kept: Successor) -> None:
    assert not any(ray.look(kept, []) for _ in range(10))
    assert ray.asked == [IN_CHARGE]


def test_it_moves_once_there_is_another_node(ray: Ray, kept: Successor) -> None:
    ray.look(kept, [])
    there = kept._handle
    assert ray.look(kept, ["a"]) and ray.killed == [there] and not kept.stands_by(NUMBER)
    assert not any(ray.look(kept, ["a"]) for _ in range(10))
    assert ray.asked == [IN_CHARGE, "a"]


def test_one_that_ray_puts_back_is_moved_seldom(ray: Ray, kept: Successor) -> None:
    ray.puts = IN_CHARGE
    moved = [ray.now for _ in range(100) if ray.look(kept, ["a", "b"])]
    assert len(moved) > 10 and min(b - a for a, b in itertools.pairwise(moved)) >= MOVE_AFTER_S
    assert ray.asked[:4] == ["a", "b", "a", "b"]


def test_one_that_does_not_answer_is_started_anew(ray: Ray, kept: Successor) -> None:
    ray.look(kept, ["a", "b"])
    directory = kept._handle
    directory.answers = False
    assert not ray.look(kept, ["a", "b"], START_DEADLINE_S - 1)
    assert ray.look(kept, ["a", "b"]) and ray.killed == [directory]
    assert not ray.look(kept, ["a", "b"]) and ray.asked == ["a", "b"]


def test_one_that_ray_restarts_is_left_alone_and_one_that_is_dead_is_replaced(ray: Ray, kept: Successor) -> None:
    ray.look(kept, ["a"])
    kept._handle.error = RayActorError()
    assert not any(ray.look(kept, ["a"]) for _ in range(3)) and ray.asked == ["a"]
    kept._handle.state = ActorTableData.DEAD
    assert not kept.stands_by(NUMBER)
    assert not ray.look(kept, ["a"]) and ray.asked == ["a", "a"] and not ray.killed


def test_one_that_took_over_is_no_successor(ray: Ray, kept: Successor, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.look(kept, ["a"])
    in_charge, started = kept._handle, []

    def start(pool: str, number: int, node_id: str) -> Directory:
        started.append((number, node_id))
        return Directory(node_id)

    monkeypatch.setattr(successor, "start_directory", start)
    assert kept.look(1, "a", [IN_CHARGE]) is None and started == [(1, IN_CHARGE)]
    assert kept._handle is not in_charge and kept.stands_by(1) and not kept.stands_by(NUMBER)


def test_a_look_that_failed_is_not_made_again_at_once(ray: Ray, kept: Successor) -> None:
    """The supervisor first asks the directory in charge, which may hang."""
    assert kept.due() and not kept.due()
    ray.now += LOOK_S
    assert kept.due()
