"""A plugin of NCCL tests: nodes in this process, each on a GPU of the stand-in, that read from each other."""

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from helpers.arena import worker as w
from raykv.arena.arena import Arena
from raykv.arena.gpu import cuda
from raykv.arena.gpu import device as devices
from raykv.cluster import ray_calls
from raykv.transports.base import Peer, PullRequest
from raykv.transports.nccl import Nccl
from raykv.transports.nccl_pair import READER, SENDER

SIZE = 64 << 10
FROM = [0, 9, 2, 31, 3, 63]
TO = [17, 1, 40, 0, 8, 2]
ELSEWHERE = [20, 60, 21, 22, 50, 30]
GENS = [2, 3, 4, 5, 6, 7]
PATIENCE_S = 60.0
Verdicts = NDArray[np.uint8]


class Actor:
    """In place of Ray's handle of a node store. Its calls run in threads."""

    def __init__(self, serve: Callable[..., Any], offers: Callable[[], Any] = dict) -> None:
        threads = ThreadPoolExecutor(8)
        self.serve = SimpleNamespace(remote=lambda node, name, *args: threads.submit(serve, *args))
        self.offers = SimpleNamespace(remote=lambda node: threads.submit(offers))


def peer(serve: Callable[..., Any], offers: Callable[[], Any] = dict) -> Peer:
    return Peer("a node", Actor(serve, offers))


def get(answer: "Future[Any]", timeout: float) -> Any:
    try:
        return answer.result(timeout)
    except TimeoutError as error:
        raise GetTimeoutError from error
    except RayError:
        raise
    except Exception as error:
        raise RayTaskError("serve", repr(error), error) from error


class Node:
    """A node whose arena is in host memory, which the stand-in's GPUs reach."""

    count = 0

    def __init__(self, ordinal: int) -> None:
        Node.count += 1
        gpu = devices.device(devices.visible()[ordinal])
        self.arena = Arena.create(f"/dev/shm/raykv-test-nccl-{os.getpid()}-{Node.count}", w.PRINT, w.SLAB, 1)
        self.arena.offer_next()
        self.arena.raise_epoch(w.EPOCH)
        gpu.register(*self.arena.region(0))
        self.gpu = gpu
        self.start()

    def start(self) -> None:
        """Start NCCL, as a new process does that takes up its predecessor's arena."""
        self.nccl = Nccl(self.arena, self.gpu)
        self.peer = peer(self.nccl.serve, lambda: {"nccl": self.nccl.offer()})

    def put(self, slots: Sequence[int] = FROM) -> "Node":
        for slot, gen in zip(slots, GENS, strict=False):
            assert w.put(self.arena, slot, gen)
        return self

    def pull(
        self, peer: Any, offer: Any, slots: Sequence[int] = TO, seconds: float = PATIENCE_S, step: int = 1
    ) -> list[int]:
        """Pull the blocks that `put` wrote at a peer into slots here; with step=-1 in reverse order."""
        eventually(lambda: not self.nccl.connecting(peer, offer))
        source, names, target = locations(FROM)[::step], keys()[::step], locations(slots)[::step]
        verdicts = self.nccl.pull(
            peer, offer, PullRequest(source, names, self.arena, target, time.monotonic() + seconds)
        )
        return verdicts[::step].tolist()  # type: ignore[no-any-return]

    def pull_from(self, other: "Node", slots: Sequence[int] = TO, seconds: float = PATIENCE_S) -> list[int]:
        return self.pull(other.peer, other.nccl.offer(), slots, seconds)

    def connected_to(self, other: "Node") -> "Node":
        eventually(lambda: not self.nccl.connecting(other.peer, other.nccl.offer()))
        return self

    def holds(self, slots: Sequence[int] = TO) -> list[bool]:
        return [w.get(self.arena, slot, gen) for slot, gen in zip(slots, GENS, strict=False)]


def locations(slots: Sequence[int], gens: Sequence[int] = GENS) -> NDArray[np.void]:
    return w.locations(slots, gens[: len(slots)])


def keys() -> NDArray[np.uint8]:
    return np.concatenate([w.key_of(gen) for gen in GENS])


def blocks() -> NDArray[np.uint8]:
    return np.concatenate([w.block_of(w.key_of(gen)) for gen in GENS])


def eventually(ask: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not ask():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def nccl(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in's NCCL, imported anew."""
    monkeypatch.setattr(ray_calls, "get", get)
    stand_in = importlib.import_module("cupy.cuda.nccl")
    yield stand_in
    stand_in.end()
    eventually(lambda: not any(thread.name.startswith("raykv-nccl") for thread in threading.enumerate()))


@pytest.fixture
def node(nccl: Any) -> Iterator[Callable[[int], Node]]:
    nodes: list[Node] = []

    def make(ordinal: int) -> Node:
        nodes.append(Node(ordinal))
        return nodes[-1]

    yield make
    for each in nodes:
        each.nccl.close()
        each.arena.close(unlink=True)


@pytest.fixture
def sender(node: Callable[[int], Node]) -> Node:
    return node(1).put()


@pytest.fixture
def reader(node: Callable[[int], Node]) -> Node:
    return node(0)


def stalls(rank: int, at: int) -> Callable[[Any, int], None]:
    """A `before_move` in which one rank's GPU stalls at block `at` until its communicator is aborted."""

    def before_move(communicator: Any, number: int) -> None:
        if communicator.rank == rank and number == at:
            communicator.aborted.wait()

    return before_move


class ByHand:
    """A reader whose steps a test takes one by one."""

    def __init__(self, nccl: Any, sender: Node) -> None:
        self.sender, self.unique, self._nccl = sender, nccl.get_unique_id(), nccl
        self.name = self.unique.hex()
        self.serve("join", self.name, self.unique)

    def connect(self) -> "ByHand":
        self.communicator, memory = self._nccl.NcclCommunicator(2, self.unique, READER), cuda.cupy().cuda
        self._stream, self._room = memory.Stream(), memory.Memory(SIZE)
        self.communicator.room = self._room  # keeps the memory: posted blocks may come after the test
        self.post(1, 1)
        return self

    @property
    def of_sender(self) -> Any:
        return next(each for each in self._nccl.communicators if each.unique == self.unique and each.rank == SENDER)

    def serve(self, *args: Any) -> None:
        self.sender.nccl.serve(self.sender.nccl.offer()[1], *args)

    def ask(self, name: str | None = None) -> None:
        self.serve("send", name or self.name, self.unique, locations(FROM).tobytes(), keys().tobytes())

    def post(self, count: int, size: int) -> None:
        for _ in range(count):
            self.communicator.recv(self._room.ptr, size, self._nccl.NCCL_UINT8, SENDER, self._stream.ptr)

    def receive(self) -> None:
        self.post(6, SIZE)
        eventually(lambda: self._stream.done)
