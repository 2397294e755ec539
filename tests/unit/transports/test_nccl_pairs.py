"""Pairs of GPUs on the stand-in for CuPy's NCCL: how they connect and end, and what they leave behind."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from helpers.transports.nccl_nodes import (
    ELSEWHERE,
    FROM,
    PATIENCE_S,
    TO,
    ByHand,
    Node,
    blocks,
    eventually,
    keys,
    locations,
    peer,
)

from raykv.actors.store.gpu_memory import open_gpus
from raykv.arena.gpu import cuda
from raykv.arena.superblock import NO_CLUSTER
from raykv.errors import CapacityError
from raykv.protocol.transfers import PULLED
from raykv.transports import nccl_pair
from raykv.transports.base import PullRequest, Transport
from raykv.transports.selector import TransportSelector

pytest_plugins = ["helpers.transports.nccl_nodes"]
MIB = 1 << 20


class Slower(Transport):
    """A slower transport, which reads blocks that NCCL does not."""

    name = "slower"

    def pull(self, peer: Any, offer: Any, request: PullRequest) -> Any:
        return request.arena.write(request.target, request.keys, blocks()).astype("u1") * PULLED


def taken() -> list[int]:
    """MiB that are taken of each GPU."""
    found = []
    for ordinal in (0, 1):
        with cuda.on(ordinal) as module:
            free, total = module.cuda.runtime.memGetInfo()
            found.append((total - free) // MIB)
    return found


def pairs_running() -> bool:
    return any(thread.name == "raykv-nccl" for thread in threading.enumerate())


@pytest.mark.parametrize("step", ["before_connect", "after_meeting", "before_move"])
def test_another_transport_reads_while_nccl_connects(nccl: Any, sender: Node, reader: Node, step: str) -> None:
    """NCCL takes seconds to connect. That is no failure, and no reader waits for it."""
    go = threading.Event()
    setattr(nccl, step, lambda *_: go.wait())
    selector = TransportSelector([reader.nccl, Slower()])

    def pull(slots: list[int]) -> list[int]:
        return selector.pull(sender.peer, locations(FROM), keys(), reader.arena, locations(slots)).tolist()  # type: ignore[no-any-return]

    try:
        assert pull(TO) == [PULLED] * 6
        found = selector.stats()["a node"]
        assert (found["transport"], found["failed"]) == ("slower", {})
    finally:
        go.set()
    reader.connected_to(sender)
    assert pull(ELSEWHERE) == [PULLED] * 6 and all(reader.holds(ELSEWHERE))
    found = selector.stats()["a node"]
    assert (found["transport"], found["failed"]) == ("nccl", {})
    assert len(nccl.communicators) == 2


@pytest.mark.parametrize("step", ["before_connect", "after_meeting"])
def test_an_init_that_fails_gives_back_its_memory(nccl: Any, sender: Node, reader: Node, step: str) -> None:
    """Otherwise the next try, a minute later, would take as much again."""

    def fail(communicator: Any) -> None:
        raise nccl.NcclError(3)

    before, works = taken(), getattr(nccl, step)
    setattr(nccl, step, fail)
    with pytest.raises(ConnectionError, match="INTERNAL_ERROR"):
        reader.pull_from(sender)
    eventually(lambda: not pairs_running())
    eventually(lambda: taken() == before)
    setattr(nccl, step, works)
    assert reader.pull_from(sender) == [PULLED] * 6
    assert taken() == [each + 1 for each in before]


@pytest.mark.parametrize("end", ["reader", "sender"])
def test_a_peer_that_never_comes(
    nccl: Any, sender: Node, reader: Node, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would wait for ever. An abort ends the pair's thread."""
    monkeypatch.setattr(nccl_pair, "CONNECT_S", 0.3, raising=False)
    before = taken()
    if end == "reader":
        with pytest.raises(ConnectionError, match="not connected in"):
            reader.pull(peer(lambda *_: b""), sender.nccl.offer())
    else:
        ByHand(nccl, sender)
    eventually(lambda: nccl.communicators and nccl.communicators[0].aborted.is_set())
    eventually(lambda: not pairs_running())
    assert taken() == before
    monkeypatch.setattr(nccl_pair, "CONNECT_S", PATIENCE_S)
    assert reader.pull_from(sender, ELSEWHERE) == [PULLED] * 6
    assert all(reader.holds(ELSEWHERE))


def test_a_peer_that_stalls_in_the_first_move(
    nccl: Any, sender: Node, reader: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its init was done, the pair does not count as connected."""
    monkeypatch.setattr(nccl_pair, "CONNECT_S", 0.5, raising=False)
    nccl.before_move, nccl.silent = lambda communicator, number: communicator.aborted.wait(), True
    before = taken()
    with pytest.raises(ConnectionError, match="stalls"):
        reader.pull_from(sender)
    eventually(lambda: not pairs_running())
    eventually(lambda: taken() == before)


def test_a_pair_that_is_dropped_while_it_connects(nccl: Any, sender: Node, reader: Node) -> None:
    """NCCL would read memory that an abort frees, so the pair is aborted only when it has connected."""
    go = threading.Event()
    nccl.before_connect = lambda *_: go.wait()
    assert reader.nccl.connecting(sender.peer, sender.nccl.offer())
    eventually(lambda: len(nccl.communicators) == 2)
    before = sender.nccl
    sender.start()
    assert reader.nccl.connecting(sender.peer, sender.nccl.offer())
    assert not any(each.aborted.is_set() for each in nccl.communicators)
    go.set()
    assert reader.pull_from(sender) == [PULLED] * 6
    before.close()
    first = [each for each in nccl.communicators if each.unique == nccl.communicators[0].unique]
    assert all(each.aborted.wait(PATIENCE_S) for each in first)


def test_a_gpu_whose_node_is_gone(nccl: Any, sender: Node, reader: Node) -> None:
    """Both pairs with that GPU give back their memory of the GPU here."""
    before = taken()
    reader.put()
    for here, there in ((reader, sender), (sender, reader)):
        assert here.pull_from(there, ELSEWHERE) == [PULLED] * 6
    assert taken() == [each + 2 for each in before]
    reader.nccl.forget(f"another/{reader.gpu.uuid}")
    assert not any(each.aborted.is_set() for each in nccl.communicators)
    reader.nccl.forget(f"a node/{sender.gpu.uuid}")
    eventually(lambda: taken()[0] == before[0])
    sender.nccl.forget(f"a node/{reader.gpu.uuid}")
    eventually(lambda: taken() == before)
    assert reader.pull_from(sender, [11, 12, 13, 14, 15, 16]) == [PULLED] * 6


def test_pairs_make_no_context_elsewhere(nccl: Any, node: Callable[[int], Node]) -> None:
    """NCCL sets a thread back to its former GPU, and to GPU 0 if it had none."""
    sender, reader = node(1).put(), node(1)
    assert reader.pull_from(sender) == [PULLED] * 6
    for each in (sender, reader):
        each.nccl.close()
    assert all(each.aborted.wait(PATIENCE_S) for each in nccl.communicators)
    eventually(lambda: not pairs_running())
    assert cuda.cupy().cuda.driver.contexts == {1}


@pytest.mark.parametrize(("status", "says"), [(7, "unset NCCL_COMM_BLOCKING"), (8, "NCCL_ERROR_TIMEOUT")])
def test_errors_that_cupy_has_no_name_for(nccl: Any, sender: Node, reader: Node, status: int, says: str) -> None:
    """CuPy raises KeyError."""

    def fail(communicator: Any) -> None:
        raise nccl.NcclError(status)

    nccl.before_connect = fail
    with pytest.raises(ConnectionError, match=says):
        reader.pull_from(sender)


def test_nccl_that_makes_no_name(nccl: Any, sender: Node, reader: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL fails so if it finds no network, for example."""

    def fail() -> bytes:
        raise nccl.NcclError(2)

    monkeypatch.setattr(nccl, "get_unique_id", fail)
    selector = TransportSelector([reader.nccl, Slower()])
    pulled = selector.pull(sender.peer, locations(FROM), keys(), reader.arena, locations(TO))
    assert pulled.tolist() == [PULLED] * 6 and selector.stats()["a node"]["failed"] == {"nccl": 1}


def test_a_gpu_that_has_no_room_for_its_pairs(nccl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes memory that the engine beside it counted as its own."""
    nodes = [{"NodeID": name, "Alive": name != "gone", "Resources": {"GPU": 8.0}} for name in ("here", "other", "gone")]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    needs = nccl_pair.memory_of(16)
    with pytest.raises(CapacityError, match=f"{needs // MIB} MiB of it for NCCL"):
        open_gpus("p", "here", b"0" * 16, 8 * MIB, "auto", NO_CLUSTER)
    monkeypatch.setenv("CUPY_ON_HOST_BYTES", str(8 * MIB + needs))
    for memory in open_gpus("p", "here", b"0" * 16, 8 * MIB, "auto", NO_CLUSTER):
        memory.arena.close(unlink=True)
        memory.transports.close()
