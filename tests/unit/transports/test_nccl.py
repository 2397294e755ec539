"""Blocks by NCCL, on the stand-in for CuPy's NCCL: between nodes of this process, and other processes, which die."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers.arena import worker as w
from helpers.transports.nccl_nodes import (
    ELSEWHERE,
    FROM,
    PATIENCE_S,
    SIZE,
    TO,
    ByHand,
    Node,
    Verdicts,
    blocks,
    eventually,
    keys,
    locations,
    peer,
    stalls,
)
from numpy.typing import NDArray
from ray.exceptions import RayActorError

from raykv.arena.gpu import cuda
from raykv.protocol.transfers import ALTERED, FAILED, PULLED
from raykv.system.extras import to_install
from raykv.transports import nccl as transport
from raykv.transports import nccl_pair
from raykv.transports.base import PullRequest, Transport
from raykv.transports.nccl import Nccl
from raykv.transports.nccl_pair import READER, SENDER
from raykv.transports.selector import TransportSelector

pytest_plugins = ["helpers.transports.nccl_nodes"]


def test_without_nccl(reader: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not nccl_pair.why_not()
    monkeypatch.setattr(cuda.cupy().cuda.nccl, "available", False)
    assert "pip install nvidia-nccl-cu13" in nccl_pair.why_not()
    with pytest.raises(ImportError, match="nvidia-nccl-cu13"):
        Nccl(reader.arena, reader.gpu)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert to_install("gpu") in nccl_pair.why_not()


def test_blocks_arrive_in_scattered_slots(nccl: Any, sender: Node, reader: Node) -> None:
    for slots in (TO, ELSEWHERE):
        assert reader.pull_from(sender, slots) == [PULLED] * 6
        assert all(reader.holds(slots))
        mine, theirs = (
            reader.arena.read_headers(locations(slots), keys()),
            sender.arena.read_headers(locations(FROM), keys()),
        )
        assert [column.tolist() for column in mine] == [column.tolist() for column in theirs]
    assert len(nccl.communicators) == 2, "one pair for all of them"


def test_blocks_with_an_unknown_checksum(node: Callable[[int], Node]) -> None:
    sender, reader = node(1), node(0)

    def fill(which: NDArray[np.bool_], slots: NDArray[np.int64]) -> list[int]:
        for address, block in zip(slots.tolist(), blocks()[which], strict=True):
            ctypes.memmove(address, block.ctypes.data, SIZE)
        return [0] * len(slots)

    assert sender.arena.fill(locations(FROM), keys(), fill, np.arange(6)).all()
    assert reader.pull_from(sender) == [PULLED] * 6
    assert all(reader.holds())
    sums, positions, _ = reader.arena.read_headers(locations(TO), keys())
    assert sums.tolist() == [0] * 6 and positions.tolist() == list(range(6))


def test_blocks_that_are_not_there(sender: Node, reader: Node) -> None:
    for slot, gen in ((FROM[1], 20), (FROM[4], 21)):
        assert w.put(sender.arena, slot, gen)
    assert reader.pull_from(sender) == [PULLED, ALTERED, PULLED, PULLED, ALTERED, PULLED]
    assert reader.holds() == [True, False, True, True, False, True]
    source = locations(FROM)
    source["slab"] = 7
    end = time.monotonic() + PATIENCE_S
    offer = sender.nccl.offer()
    verdicts = reader.nccl.pull(
        sender.peer, offer, PullRequest(source, keys(), reader.arena, locations(ELSEWHERE), end)
    )
    assert verdicts.tolist() == [ALTERED] * 6
    assert reader.pull_from(sender, ELSEWHERE)[0] == PULLED


@pytest.mark.parametrize("taken", [[1, 4], range(6)])
def test_slots_that_are_no_longer_granted(nccl: Any, sender: Node, reader: Node, taken: Sequence[int]) -> None:
    """The peer sends those blocks all the same. The next pull must not take them for its own."""
    for i in taken:
        assert w.put(reader.arena, TO[i], 30 + i)
    assert reader.pull_from(sender) == [FAILED if i in taken else PULLED for i in range(6)]
    assert reader.holds() == [i not in taken for i in range(6)]
    assert all(w.get(reader.arena, TO[i], 30 + i) for i in taken)
    assert reader.pull_from(sender, ELSEWHERE) == [PULLED] * 6
    assert all(reader.holds(ELSEWHERE))
    assert len(nccl.communicators) == 2


def test_all_read_from_all_at_once(nccl: Any, node: Callable[[int], Node]) -> None:
    """No node posts before all have been asked, and then all post at once."""
    nodes = [node(ordinal).put() for ordinal in (0, 1, 0)]
    ways = [(a, b) for a in nodes for b in nodes if a is not b]
    together = threading.Barrier(2 * len(ways))
    nccl.before_move = lambda communicator, number: number == 1 and together.wait(PATIENCE_S)
    with ThreadPoolExecutor(len(ways)) as pool:
        slots = [[slot + 6 * i for slot in (10, 15, 11, 13, 12, 14)] for i in range(2)]
        pulls = [pool.submit(a.pull_from, b, slots[i % 2]) for i, (a, b) in enumerate(ways)]
        assert [pull.result() for pull in pulls] == [[PULLED] * 6] * len(ways)
    assert all(all(node.holds(part)) for node in nodes for part in slots)
    assert len(nccl.communicators) == 2 * len(ways)


@pytest.mark.full
@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("rank", [READER, SENDER])
def test_a_gpu_that_stalls(nccl: Any, sender: Node, reader: Node, rank: int, silent: bool) -> None:
    nccl.before_move, nccl.silent = stalls(rank, 4), silent
    begin = time.monotonic()
    with pytest.raises(ConnectionError):
        reader.pull_from(sender, seconds=4.0)
    assert time.monotonic() - begin < 3.5, "in half of the time, and nobody waits for the peer's abort"
    assert reader.arena.write(locations(TO), keys(), blocks()).all(), "the same grants, by the next transport"
    nccl.before_move = stalls(rank, -1)
    assert reader.pull_from(sender, ELSEWHERE) == [PULLED] * 6
    assert all(reader.holds(ELSEWHERE)) and all(reader.holds(TO))
    assert len(nccl.communicators) == 4, "a pair of their own again"
    eventually(lambda: [each.aborted.is_set() for each in nccl.communicators] == [True, True, False, False])


def test_an_abort_that_hangs(nccl: Any, sender: Node, reader: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort hangs while it waits for the peer's. It is enough that the GPU has stopped."""
    go, abort = threading.Event(), nccl.NcclCommunicator.abort
    monkeypatch.setattr(nccl.NcclCommunicator, "abort", lambda communicator: (abort(communicator), go.wait()))
    nccl.before_move = stalls(SENDER, 4)
    with pytest.raises(ConnectionError):
        reader.pull_from(sender, seconds=1.0)
    assert reader.arena.write(locations(TO), keys(), blocks()).all()
    go.set()


def test_a_gpu_that_does_not_stop(nccl: Any, sender: Node, reader: Node) -> None:
    """No other transport writes into slots that the GPU may still write."""
    go = threading.Event()
    nccl.before_move = lambda communicator, number: communicator.rank == SENDER or number < 4 or go.wait()
    with pytest.raises(TimeoutError, match="slots stay locked"):
        reader.pull_from(sender, seconds=1.0)
    assert not reader.arena.write(locations(TO), keys(), blocks()).any()
    assert reader.arena.sweep(locations(TO)).tolist() == [0] * 6
    go.set()
    eventually(lambda: reader.arena.write(locations(TO[:1]), keys()[:1], blocks()[:1]).all())
    assert reader.arena.write(locations(TO)[1:], keys()[1:], blocks()[1:]).all()


def test_an_error_that_nccl_reports(nccl: Any, sender: Node, reader: Node) -> None:
    def before_move(communicator: Any, number: int) -> None:
        if number == 4:
            communicator.error = 6
            communicator.aborted.wait()

    nccl.before_move = before_move
    with pytest.raises(ConnectionError, match="REMOTE_ERROR"):
        reader.pull_from(sender, seconds=1000.0)
    assert reader.arena.write(locations(TO), keys(), blocks()).all()


def test_the_next_transport_reads_it_in_time(nccl: Any, sender: Node, reader: Node) -> None:
    class Other(Transport):
        name = "other"

        def pull(self, peer: Any, offer: Any, request: PullRequest) -> Verdicts:
            _, names, arena, target, end = request
            assert time.monotonic() < end
            return np.where(arena.write(target, names, blocks()), PULLED, FAILED).astype(np.uint8)

    nccl.before_move = stalls(SENDER, 4)
    selector, peer = TransportSelector([reader.connected_to(sender).nccl, Other()]), sender.peer
    assert selector.pull(peer, locations(FROM), keys(), reader.arena, locations(TO)).tolist() == [PULLED] * 6
    stats = selector.stats()["a node"]
    assert (stats["transport"], stats["failed"], list(stats["bytes"])) == ("other", {"nccl": 1}, ["other"])
    nccl.before_move = stalls(SENDER, -1)
    selector._states[peer].routes["nccl"].retry_at = time.monotonic()
    reader.connected_to(sender)
    assert selector.pull(peer, locations(FROM), keys(), reader.arena, locations(ELSEWHERE)).tolist() == [PULLED] * 6
    assert selector.stats()["a node"]["transport"] == "nccl"


@pytest.mark.parametrize("stuck", ["join", "send", "headers"])
def test_an_actor_that_does_not_answer(sender: Node, reader: Node, stuck: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The late call does no harm when the actor gets to it."""
    if stuck == "join":
        monkeypatch.setattr(nccl_pair, "CONNECT_S", 0.5)
    go, late = threading.Event(), threading.Event()

    def serve(token: str, what: str, *args: Any) -> bytes:
        assert what != stuck or go.wait(PATIENCE_S)
        answer = sender.nccl.serve(token, what, *args)
        if what == stuck:
            late.set()
        return answer

    with pytest.raises(ConnectionError, match="does not answer"):
        reader.pull(peer(serve), sender.nccl.offer(), seconds=1.0)
    assert reader.arena.write(locations(TO), keys(), blocks()).all()
    monkeypatch.setattr(nccl_pair, "CONNECT_S", PATIENCE_S)
    go.set()
    assert late.wait(PATIENCE_S)
    assert reader.pull(sender.peer, sender.nccl.offer(), ELSEWHERE, step=-1) == [PULLED] * 6
    assert all(reader.holds(ELSEWHERE))


def test_a_peer_that_restarted(nccl: Any, sender: Node, reader: Node) -> None:
    assert reader.pull_from(sender) == [PULLED] * 6
    before = sender.nccl
    sender.start()
    assert reader.pull_from(sender, ELSEWHERE) == [PULLED] * 6
    (first, _) = (each for each in nccl.communicators if each.rank == READER)
    assert first.aborted.wait(PATIENCE_S)
    before.close()
    with pytest.raises(ConnectionError, match="ask for the offer again"):
        reader.pull(sender.peer, before.offer())
    reader.start()  # a reader restarts too: the sender drops the old pair
    assert reader.pull_from(sender, [11, 12, 13, 14, 15, 16]) == [PULLED] * 6
    assert all(each.aborted.wait(PATIENCE_S) for each in nccl.communicators[2:4])


def test_a_block_overwritten_while_it_is_sent_is_altered(nccl: Any, sender: Node, reader: Node) -> None:
    def before_move(communicator: Any, number: int) -> None:
        if communicator.rank == SENDER and number == 4:
            assert w.put(sender.arena, FROM[1], 20) and w.put(sender.arena, FROM[5], 21), "one of which was sent"

    nccl.before_move = before_move
    assert reader.pull_from(sender) == [PULLED, ALTERED, PULLED, PULLED, PULLED, ALTERED]
    assert reader.holds() == [True, False, True, True, True, False]
    assert w.get(sender.arena, FROM[1], 20) and w.get(sender.arena, FROM[5], 21)


@pytest.mark.parametrize("silent", [True, False])
def test_a_reader_that_dies(
    nccl: Any, sender: Node, reader: Node, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pair is aborted at the latest by the sender's own deadline. Other readers are served meanwhile."""
    monkeypatch.setattr(transport, "data_deadline", lambda size: 1.0 if silent else 1000.0)
    nccl.silent = silent
    dead = ByHand(nccl, sender).connect()
    dead.ask()
    assert reader.pull_from(sender) == [PULLED] * 6
    dead.communicator.abort()
    assert dead.of_sender.aborted.wait(PATIENCE_S)
    assert reader.pull_from(sender, ELSEWHERE) == [PULLED] * 6


def test_withdraw_waits_for_sends(nccl: Any, sender: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends from the slab are waited for. A pair that has not connected is given up."""
    monkeypatch.setattr(transport, "data_deadline", lambda size: 1.0 if size == w.SLAB else PATIENCE_S)
    late, reader = ByHand(nccl, sender), ByHand(nccl, sender).connect()
    eventually(sender.nccl._sending[reader.name].ready.done)
    reader.ask()
    with pytest.raises(TimeoutError, match="still sends to 1"):
        sender.nccl.withdraw(0)
    reader.receive()
    sender.nccl.withdraw(0)
    reader.ask()
    reader.receive()
    late.connect()
    assert late.of_sender.aborted.wait(PATIENCE_S)


def test_questions_that_make_no_sense(nccl: Any, sender: Node) -> None:
    """Otherwise a send could exceed its slot, or a pair be made that nobody can join."""
    reader, sizes = ByHand(nccl, sender).connect(), locations(FROM)
    sizes["bytes"][1] = 2 * SIZE
    for question in (
        ("send", reader.name, reader.unique, sizes.tobytes(), keys().tobytes()),
        ("send", reader.name, reader.unique, b"", b""),
        ("send", reader.name, reader.unique, locations(FROM).tobytes(), b""),
        ("join", "another", b"short"),
        ("abolish",),
    ):
        with pytest.raises(ValueError, match=r"[a-z]"):
            reader.serve(*question)
    reader.ask()
    reader.receive()


def test_a_send_by_a_pair_that_was_replaced(nccl: Any, sender: Node) -> None:
    reader = ByHand(nccl, sender).connect()
    reader.serve("join", reader.name, nccl.get_unique_id())
    with pytest.raises(ConnectionError, match="no such pair"):
        reader.ask()
    with pytest.raises(ConnectionError, match="no such pair"):
        reader.ask("another reader")


@pytest.mark.parametrize("closing", ["reader", "sender"])
def test_close_during_a_transfer(
    nccl: Any, sender: Node, reader: Node, closing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "data_deadline", lambda size: 1000.0 if size else 1.0)
    reached = threading.Event()

    def before_move(communicator: Any, number: int) -> None:
        if communicator.rank == SENDER and number == 4:
            reached.set()
            communicator.aborted.wait()

    nccl.before_move = before_move
    with ThreadPoolExecutor(1) as pool:
        pull = pool.submit(reader.pull_from, sender, seconds=100.0)
        assert reached.wait(PATIENCE_S)
        {"reader": reader, "sender": sender}[closing].nccl.close()
        with pytest.raises(ConnectionError):
            pull.result(30.0)
    assert reader.arena.write(locations(TO), keys(), blocks()).all()


class Child:
    """A node in a process of its own, which sends, and answers questions one by one."""

    def __init__(self) -> None:
        self._pipe, theirs = w.fork.Pipe()
        self._turn = threading.Lock()
        self.process = w.fork.Process(target=self._run, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.offer, self._path = self._pipe.recv()
        self.peer = peer(self._serve)

    def _run(self, pipe: Any) -> None:
        self._pipe.close()
        node = Node(1).put()
        pipe.send((node.nccl.offer(), node.arena.path))
        while True:
            pipe.send(node.nccl.serve(*pipe.recv()))

    def _serve(self, *args: Any) -> Any:
        try:
            with self._turn:
                self._pipe.send(args)
                return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RayActorError from error

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        if os.path.exists(self._path):
            os.unlink(self._path)


@pytest.fixture
def child(nccl: Any) -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def make() -> Child:
        children.append(Child())
        return children[-1]

    yield make
    for each in children:
        each.end()


@pytest.mark.full
@pytest.mark.parametrize("silent", [True, False])
def test_a_process_that_is_killed_during_a_transfer(
    nccl: Any, child: Callable[[], Child], reader: Node, silent: bool
) -> None:
    first, second = child(), child()

    def before_move(communicator: Any, number: int) -> None:
        if number == 4:
            first.process.kill()
            first.process.join()

    nccl.before_move, nccl.silent = before_move, silent
    begin = time.monotonic()
    with pytest.raises(ConnectionError):
        reader.pull(first.peer, first.offer, seconds=4.0 if silent else 1000.0)
    assert not silent or time.monotonic() - begin < 3.5
    assert reader.arena.write(locations(TO), keys(), blocks()).all()
    nccl.before_move = stalls(READER, -1)
    with pytest.raises(ConnectionError, match="actor"):
        reader.pull(first.peer, first.offer, ELSEWHERE)
    assert reader.pull(second.peer, second.offer, ELSEWHERE) == [PULLED] * 6
    assert all(reader.holds(ELSEWHERE))
