"""Reads from a peer use the best transport that both have, the next one while the best fails, then the best again."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.line import certificates
from helpers.pools import WITH_NIXL
from numpy.typing import NDArray
from ray.exceptions import RayActorError

import raykv.cluster
import raykv.transports.nixl
import raykv.transports.selector
from raykv.actors.store.readiness import Question, answer
from raykv.arena.arena import Arena
from raykv.protocol.location import LOCATION
from raykv.protocol.transfers import ALTERED, FAILED, PULLED
from raykv.system.extras import to_install
from raykv.transports.base import Peer, PullRequest, Transport
from raykv.transports.selector import RETRY_S, TransportSelector, open_transports

MIB = 1 << 20
SOURCE = np.zeros(4, LOCATION)
SOURCE["bytes"] = MIB
KEYS = np.zeros((4, 16), np.uint8)
HERE: Any = SimpleNamespace(
    read_headers=lambda target, keys: SimpleNamespace(there=np.array([True, False, False, False]))
)


class Moody(Transport):
    """A transport that reads, or fails as a test says."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]
        self.error: BaseException | None = None
        self.pulls = 0
        self.offered: list[Any] = []
        self.forgot: list[str] = []
        self.connects = False  # whether it is still connecting
        self.asked_to_connect = 0

    def connecting(self, peer: Any, offer: Any) -> bool:
        self.asked_to_connect += 1
        return self.connects

    def forget(self, peer: str) -> None:
        self.forgot.append(peer)

    def offer(self) -> str:
        return f"{self.name} here"

    def pull(self, peer: Any, offer: Any, request: PullRequest) -> NDArray[np.uint8]:
        self.pulls += 1
        self.offered.append(offer)
        if self.error is not None:
            raise self.error
        return np.array([PULLED, PULLED, PULLED, ALTERED], np.uint8)


class Store:
    """In place of a peer's actor."""

    offers = SimpleNamespace(remote=lambda name: "the offers")


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked = 0.0, 0
        self.offers: dict[str, Any] | Exception = {"fast": 1, "middle": 1}
        self.fast, self.middle, self.last = (Moody(name) for name in ("fast", "middle", "last"))
        self.selector = TransportSelector([self.fast, self.middle, self.last])
        self.peer = Peer("node", Store())
        monkeypatch.setattr(raykv.transports.selector.time, "monotonic", lambda: self.now)  # type: ignore[attr-defined]
        monkeypatch.setattr(raykv.transports.selector.ray_calls, "get", self.get)  # type: ignore[attr-defined]

    def get(self, reference: str, timeout: float) -> dict[str, Any]:
        self.asked += 1
        if isinstance(self.offers, Exception):
            raise self.offers
        return self.offers

    def pull(self, peer: Peer | None = None) -> str:
        """Pull. Returns the names of the transports that were asked, in order."""
        before = [transport.pulls for transport in (self.fast, self.middle, self.last)]
        self.selector.pull(peer or self.peer, SOURCE, KEYS, HERE, SOURCE)
        names = ("fast", "middle", "last")
        after = [transport.pulls for transport in (self.fast, self.middle, self.last)]
        return " ".join(name for name, a, b in zip(names, before, after, strict=True) if b > a)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_the_best_common_transport_is_used(world: World) -> None:
    assert world.pull() == "fast" and world.pull() == "fast" and world.asked == 1
    world.offers = {"middle": 2}
    other = Peer("other", world.peer.store)
    assert world.pull(other) == "middle" and world.middle.offered == [2]
    world.offers = {}
    assert world.pull(Peer("third", world.peer.store)) == "last"
    assert world.selector.offers() == {"fast": "fast here", "middle": "middle here", "last": "last here"}


def test_a_peer_whose_node_is_gone_is_forgotten(world: World) -> None:
    gone = [Peer(name, world.peer.store) for name in ("gone", "gone/GPU-1")]
    for peer in (world.peer, *gone, gone[0]._replace(external=True)):
        world.pull(peer)
    assert world.selector.forget_others({"node", "another"}) == {"gone"}
    assert {name for name, _, _ in world.selector.routes()} == {"node"} and list(world.selector.stats()) == ["node"]
    assert list(world.selector._states) == [world.peer]
    assert world.fast.forgot == world.last.forgot and set(world.fast.forgot) == {"gone", "gone/GPU-1"}
    assert world.selector.forget_others({"node"}) == set()
    assert world.pull(gone[0]) == "fast", "a pull that was late is no fault"


def test_external_tiers_are_read_by_the_last_transport(world: World) -> None:
    assert world.pull(world.peer._replace(external=True)) == "last" and world.asked == 0
    assert world.selector.stats() == {}


@pytest.mark.parametrize("error", [ConnectionError("gone"), RayActorError()])
def test_a_transport_that_fails_is_replaced_and_tried_again_later(world: World, error: Exception) -> None:
    world.fast.error = error
    assert world.pull() == "fast middle"
    assert world.pull() == "middle"
    world.now += RETRY_S / 2
    assert world.pull() == "middle"
    world.middle.error = ConnectionError("gone, too")
    assert world.pull() == "middle last" and world.pull() == "last"
    assert world.selector.stats()["node"]["failed"] == {"fast": 1, "middle": 1}
    world.now += RETRY_S / 2
    assert world.pull() == "fast last", "its time has come, and it fails again; the other's has not"
    world.fast.error = world.middle.error = None
    world.now += RETRY_S
    assert world.pull() == "fast" and world.pull() == "fast"
    assert world.selector.stats()["node"]["transport"] == "fast"


def test_a_transport_that_still_connects_has_not_failed(world: World) -> None:
    world.fast.connects = True
    assert world.pull() == "middle" and world.pull() == "middle"
    assert world.selector.stats()["node"]["failed"] == {}
    world.fast.connects = False
    assert world.pull() == "fast" and world.asked == 1
    world.fast.error, world.fast.connects = ConnectionError("gone"), False
    assert world.pull() == "fast middle"
    asked, world.fast.connects = world.fast.asked_to_connect, True
    assert world.pull() == "middle" and world.fast.asked_to_connect == asked, "its time has not come"
    world.now += RETRY_S
    assert world.pull() == "middle" and world.fast.asked_to_connect == asked + 1
    world.fast.error, world.fast.connects = None, False
    assert world.pull() == "fast"


def test_a_peer_that_restarted_is_read_as_before(world: World) -> None:
    world.pull()
    world.fast.error = ConnectionError("of the process before")
    world.offers = {"fast": "another process", "middle": "another process"}
    assert world.pull() == "fast middle" and world.middle.offered == [1]
    world.fast.error = None
    assert world.pull() == "fast" and world.fast.offered[-1] == "another process"


def test_a_peer_that_restarts_while_another_transport_is_used(world: World) -> None:
    world.fast.error = ConnectionError("no")
    assert world.pull() == "fast middle" and world.pull() == "middle"
    world.fast.error, world.offers = None, {"fast": "another process", "middle": "another process"}
    world.middle.error = ConnectionError("of the process before")
    assert world.pull() == "middle last"
    world.middle.error = None
    assert world.pull() == "fast"


def test_a_late_pull_is_not_tried_by_another_transport(world: World) -> None:
    """The late transport may still write the slots."""
    world.fast.error = TimeoutError("late")
    with pytest.raises(TimeoutError):
        world.pull()
    assert world.middle.pulls == 0
    assert world.pull() == "middle"


def test_blocks_that_a_failed_transport_wrote_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slots are not written twice."""
    world.fast.error = ConnectionError("in the middle")
    verdicts = np.array([FAILED, FAILED, PULLED, ALTERED], np.uint8)
    monkeypatch.setattr(world.middle, "pull", lambda *args: verdicts.copy())
    pulled = world.selector.pull(world.peer, SOURCE, KEYS, HERE, SOURCE)
    assert pulled.tolist() == [PULLED, FAILED, PULLED, ALTERED]


def test_offers_are_asked_for_once_when_a_retry_is_due(world: World) -> None:
    """The same holds for a transport that the peer no longer offers. Offers are not asked for with every pull."""
    world.fast.error = world.middle.error = ConnectionError("for now")
    assert world.pull() == "fast middle last"
    world.fast.error = None
    world.now += RETRY_S
    assert world.pull() == "fast"
    asked = world.asked
    assert world.pull() == "fast" and world.pull() == "fast" and world.asked == asked
    world.fast.error, world.offers = ConnectionError("again"), {"middle": 2}
    assert world.pull() == "fast middle last"
    world.middle.error = None
    world.now += RETRY_S
    assert world.pull() == "middle"
    asked = world.asked
    assert world.pull() == "middle" and world.asked == asked


def test_a_transport_that_had_no_time_has_not_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport's turn came too late, which tells nothing about the transport."""
    assert world.pull() == "fast"

    class Late:
        def acquire(self, timeout: float) -> bool:
            world.now += 0.9 * timeout
            return True

        def release(self) -> None: ...

    world.selector._states[world.peer].turn = Late()  # type: ignore[assignment]
    world.fast.error = TimeoutError("late")
    with pytest.raises(TimeoutError):
        world.pull()
    world.fast.error = None
    assert world.pull() == "fast" and world.selector.stats()["node"]["failed"] == {}


def test_a_peer_that_does_not_answer_what_it_offers(world: World) -> None:
    world.offers = RayActorError()
    with pytest.raises(RayActorError):
        world.pull()
    world.offers = {"fast": 1}
    assert world.pull() == "fast"


def test_no_transport_works(world: World) -> None:
    for transport in (world.fast, world.middle, world.last):
        transport.error = ConnectionError(transport.name)
    with pytest.raises(ConnectionError, match="no transport reads from node node"):
        world.pull()
    world.last.error = None
    assert world.pull() == "last"


def test_stats_tell_the_speed(world: World) -> None:
    pull = world.fast.pull

    def slow(*args: Any) -> NDArray[np.uint8]:
        world.now += 0.5
        return pull(*args)

    world.fast.pull = slow  # type: ignore[method-assign, assignment]
    for _ in range(2):
        assert world.pull() == "fast"
    found = {"transport": "fast", "gbps": pytest.approx(6 * MIB / 1e9), "bytes": {"fast": 6 * MIB}, "failed": {}}
    assert world.selector.stats() == {"node": found}


def test_one_pull_at_a_time_from_one_peer(world: World) -> None:
    inside, most = 0, 0
    pull, go, mutex = world.fast.pull, threading.Barrier(2), threading.Lock()

    def counted(*args: Any) -> NDArray[np.uint8]:
        nonlocal inside, most
        with mutex:
            inside += 1
            most = max(most, inside)
        answer = pull(*args)
        with mutex:
            inside -= 1
        return answer

    def run() -> None:
        go.wait()
        for _ in range(200):
            world.selector.pull(world.peer, SOURCE, KEYS, None, SOURCE)  # type: ignore[arg-type]

    world.fast.pull = counted  # type: ignore[method-assign, assignment]
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and world.fast.pulls == 400


@pytest.fixture
def arena(tmp_path: Path) -> Any:
    arena = Arena.create(str(tmp_path / "arena"), b"0" * 16, 4 * MIB, 1)
    yield arena
    arena.close(unlink=True)


@WITH_NIXL
def test_nixl_is_chosen_where_there_is_rdma(arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(chosen: str) -> list[str]:
        lanes = open_transports(arena, chosen, "127.0.0.1")
        lanes.close()
        return list(lanes.offers())

    cards = tmp_path / "infiniband"
    monkeypatch.setattr(raykv.transports.nixl, "RDMA", str(cards))
    assert offered("auto") == ["tcp"] and offered("nixl") == ["nixl", "tcp"]
    cards.mkdir()
    assert offered("auto") == ["tcp"]
    (cards / "mlx5_0").mkdir()
    assert offered("auto") == offered("nixl") == ["nixl", "tcp"], "the better one first"
    assert offered("tcp") == ["tcp"] and offered("object_store") == []
    with certificates.used(tmp_path / "tls"):
        assert offered("nixl") == ["tcp"], "NIXL does not encrypt"


def test_without_nixl(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", None)
    assert to_install("nixl") in raykv.transports.nixl.why_not()
    lanes = open_transports(arena, "nixl", "127.0.0.1")
    assert list(lanes.offers()) == ["tcp"]
    lanes.close()


def test_nixl_that_is_required_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node says so before anything is started."""
    monkeypatch.setattr(raykv.cluster, "identity", lambda: bytes(8))  # no cluster runs here
    monkeypatch.setattr(raykv.transports.nixl, "why_not", lambda: "NIXL is not installed here")
    asked = ["nixl", "auto"]
    refusals = [answer(Question("p", 8 * MIB, 0, chosen, None, b"", None))["refusals"] for chosen in asked]
    assert refusals == [["", "transport='nixl': NIXL is not installed here"], ["", ""]]
