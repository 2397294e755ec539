"""The supervisor looks closely when something has changed, and now and then."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

from raykv.actors.supervisor import supervisor


class Watch(supervisor.Supervisor):
    """A supervisor of two nodes that counts its close looks. After the first it is at rest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.nodes, self.some_leave, self.looks = 100.0, {"a", "b"}, False, 0
        self._stores: dict[str, Any] = {node: Store() for node in self.nodes}
        self._served = set(self.nodes)
        idle: Any = SimpleNamespace(without_store=set())
        self._rests_until, self._idle = 0.0, idle
        monkeypatch.setattr(supervisor, "_nodes", lambda: (self.nodes, self.some_leave))
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: self.now))
        assert self.looks_closely() and not self.looks_closely()

    def _look_closely(self, living: set[str]) -> None:
        self.looks += 1
        self._rests_until = self.now + supervisor.REST_S

    def looks_closely(self) -> bool:
        before = self.looks
        self._look()
        return self.looks > before


class Store:
    """In place of the handle of a node store, with its state in Ray."""

    state: int | None = ActorTableData.ALIVE

    def _get_local_state(self) -> int | None:
        return self.state


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def test_it_looks_closely_now_and_then(watch: Watch) -> None:
    watch.now += supervisor.REST_S - 0.1
    assert not watch.looks_closely()
    watch.now += 0.2
    assert watch.looks_closely() and not watch.looks_closely()


def test_it_has_asked_a_directory_that_hangs_several_times_before_it_is_replaced() -> None:
    assert supervisor.REST_S < supervisor.REPLACE_AFTER_S / 2


def test_a_node_that_joins_and_one_that_is_gone(watch: Watch) -> None:
    watch.nodes = {"a", "b", "c"}
    assert watch.looks_closely() and watch.looks_closely(), "until it has a store"
    watch.nodes = {"a"}
    assert watch.looks_closely()


def test_a_node_that_was_left_since_nobody_else_used_it(watch: Watch) -> None:
    watch._idle.without_store.add("b")
    assert watch.looks_closely(), "until its store is gone"
    del watch._stores["b"]
    assert not watch.looks_closely()
    watch._idle.without_store.clear()
    assert watch.looks_closely() and watch.looks_closely(), "until it has a store"


def test_a_node_that_is_about_to_leave(watch: Watch) -> None:
    watch.some_leave = True
    assert watch.looks_closely() and watch.looks_closely()


@pytest.mark.parametrize("state", [ActorTableData.DEAD, ActorTableData.RESTARTING, None])
def test_a_store_that_died(watch: Watch, state: int | None) -> None:
    watch._stores["b"].state = state
    assert watch.looks_closely() and watch.looks_closely()


def test_a_store_that_has_not_answered_yet(watch: Watch) -> None:
    watch._served.discard("b")
    assert watch.looks_closely() and watch.looks_closely()


def test_a_look_that_failed_is_repeated(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: set[str]) -> None:
        raise RuntimeError

    watch.now += 2 * supervisor.REST_S
    with monkeypatch.context() as patch:
        patch.setattr(watch, "_look_closely", fail)
        with pytest.raises(RuntimeError):
            watch._look()
    assert watch.looks_closely()
