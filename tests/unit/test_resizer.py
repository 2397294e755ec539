"""A node store's size, against a directory and an arena without Ray: answers that are lost, and room that is."""

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.arena_worker import PRINT, SLAB
from helpers.directory_checks import check_invariants
from helpers.pools import eventually

from raykv import registry
from raykv.actors import resizer
from raykv.actors.resizer import Resizer, size_of
from raykv.arena.arena import Arena
from raykv.directory.directory import Directory
from raykv.errors import CapacityError
from raykv.protocol import LOCATION, Call
from raykv.system import free_memory

SLABS, LIMIT, SIZE = 12, 6, 64 << 10


class Kv(dict[str, bytes]):
    """Of one pool."""

    def ask(self, pool: str, key: str) -> bytes | None:
        return self.get(key)

    def put(self, pool: str, key: str, value: bytes) -> bool:
        self[key] = value
        return True

    def drop(self, pool: str, key: str) -> None:
        self.pop(key, None)


class Node:
    """A node store's arena and size, and what its heartbeat does."""

    def __init__(self, path: str, kv: Kv) -> None:
        self.kv = kv
        self.arena = Arena.create(path, PRINT, SLAB, SLABS)
        self.withdrawn: list[int] = []
        self.sizing = Resizer("p", "n", self.arena, LIMIT, None, self.withdrawn.append)
        self.directory = Directory()
        self.join()
        self.index = self.directory.nodes["n"].index
        self.ids = 0
        self.held: list[int] = []

    def join(self) -> None:
        _, epoch = self.directory.join("n", self.arena.nonce, SLAB, self.sizing.limit, self.arena.epoch, 0.0)
        assert self.arena.raise_epoch(epoch)
        offered, limit, gone = self.sizing.report()
        found = self.arena.inventory()
        found.blocks["node"] = found.busy["node"] = self.directory.nodes["n"].index
        self.directory.set_slab_target("n", limit, gone, 0.0)
        columns = found.positions.tobytes(), found.stamps.tobytes(), found.busy.tobytes()
        self.directory.adopt("n", found.blocks.tobytes(), found.keys.tobytes(), *columns, 0.0, offered)

    def heartbeat(self, lost: bool = False) -> None:
        report = self.sizing.report()
        offered, limit, gone = report
        closed = self.directory.set_slab_target("n", limit, gone, 0.0)
        self.directory.heartbeat("n", offered, 0.0)
        check_invariants(self.directory)
        if not lost:
            self.sizing.on_directory_reply(report, *closed)

    def call(self) -> Call:
        self.ids += 1
        return Call(1, self.ids, np.array(self.held, np.uint64).tobytes())

    def store(self, first: int, n: int = 8) -> bool:
        """Whether all of the blocks that it stores, as far as there is room, are there."""
        keys = np.random.default_rng(first).integers(0, 256, (n, 16), np.uint8)
        got = self.directory.reserve(self.call(), self.ids, "n", keys.tobytes(), 0, SIZE, 0.0)
        at, mine = np.frombuffer(got.locations, LOCATION), keys[np.frombuffer(got.indices, np.int32)]
        rows = np.repeat(mine, SIZE // 16, axis=0).reshape(len(mine), SIZE)
        written = self.arena.write(at, mine, rows)
        self.directory.commit(self.call(), self.ids - 1, got.locations, mine.tobytes(), bytes(written), 0.0)
        return len(at) > 0 and bool(written.all() and self.arena.read(at, mine, rows.copy()).all())

    def settle(self, slabs: int) -> None:
        """As many as there are to be, for the arena and the directory."""

        def done() -> bool:
            self.heartbeat()
            known = self.directory.nodes["n"]
            return self.sizing.settled and len(known.slabs) + len(known.spare) == slabs == self.arena.available

        eventually(done, 20.0)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    kv = Kv()
    for name, function in (("get", kv.ask), ("put", kv.put), ("drop", kv.drop)):
        monkeypatch.setattr(registry, name, function)
    monkeypatch.setattr(resizer, "data_deadline", lambda _: 0.05)
    path = f"/dev/shm/raykv-test-sizing-{os.getpid()}"
    node = Node(path, kv)
    node.settle(LIMIT)
    yield node
    node.sizing.stop()
    node.arena.close(unlink=True)


def resize(node: Node, slabs: int) -> Any:
    """What `resize` returned or raised, with heartbeats meanwhile."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(node.sizing.resize(slabs * SLAB, 20.0))
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        node.heartbeat()
        thread.join(0.01)
    return got[0]


def kept(node: Node) -> Any:
    return node.kv.get("memory/n")


def test_down_and_up(node: Node) -> None:
    assert node.store(1) and node.store(2)
    for slabs in (2, 9, 1, SLABS):
        assert resize(node, slabs) == slabs * SLAB and kept(node) == b"%d" % (slabs * SLAB)
        assert all(node.store(100 * slabs + i, 30) for i in range(12)), "every slab that is had can be written to"


def test_answers_that_are_lost(node: Node) -> None:
    assert all(node.store(i, 60) for i in range(5))
    node.sizing.limit = 3
    for _ in range(3):
        node.heartbeat(lost=True)
    assert node.arena.available == LIMIT
    node.settle(3)
    assert all(node.store(100 + i, 60) for i in range(5))


def test_a_directory_that_restarts_in_the_middle(node: Node) -> None:
    """What the one before closed is not given back any more: the next may be using it."""
    assert all(node.store(i, 60) for i in range(5))
    node.sizing.limit = 3
    report = node.sizing.report()
    closed = node.directory.set_slab_target("n", 3, report[2], 0.0)
    assert closed[1]
    node.directory = Directory(node.directory.epoch + 1)
    node.sizing._full = "nothing is offered meanwhile"
    node.join()
    node.sizing.on_directory_reply(report, *closed)
    eventually(lambda: not node.sizing._closed, 20.0)
    assert node.arena.available == LIMIT
    node.settle(3)
    assert all(node.store(100 + i, 60) for i in range(5))


def test_nobody_writes_where_the_memory_is_about_to_go(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(node.store(i, 60) for i in range(5))
    original, asked, go_on = node.arena.give_back, threading.Event(), threading.Event()

    def give_back(slab: int, generation: int) -> bool:
        asked.set()
        assert go_on.wait(60)
        return original(slab, generation)

    monkeypatch.setattr(node.arena, "give_back", give_back)
    node.sizing.limit = 3
    node.heartbeat()
    assert asked.wait(60)
    for i in range(4):
        node.heartbeat()
        assert node.store(100 + i, 60)
        assert len(node.directory.nodes["n"].withdrawn) == 3
    node.sizing.limit = LIMIT
    node.heartbeat()
    assert len(node.directory.nodes["n"].withdrawn) == 3, "though it is to stay: that is not known yet"
    go_on.set()
    node.settle(LIMIT)
    assert all(node.store(200 + i, 60) for i in range(8))


def taken(node: Node) -> int:
    return os.stat(node.arena.path).st_blocks * 512


def test_memory_goes_when_nobody_can_be_reading_it(node: Node) -> None:
    full = taken(node)
    node.sizing._grace = 1000.0
    node.sizing.limit = 3
    node.settle(3)
    assert node.sizing.resize(3 * SLAB, 0.2) == 3 * SLAB and taken(node) == full, "it would wait for that"
    node.sizing.limit = LIMIT
    node.sizing._changed.set()
    node.settle(LIMIT)
    eventually(lambda: not node.sizing._going, 20.0)
    assert all(node.store(i, 60) for i in range(8)), "offered again"
    node.sizing._grace = 0.05
    assert resize(node, 2) == 2 * SLAB and taken(node) < full - (LIMIT - 2) * SLAB
    left = taken(node)
    node.arena._populate(node.arena._memory[1], {*node.arena.given_back()})
    assert taken(node) > left, "somebody mapped it late"
    eventually(lambda: taken(node) == left, 20.0)


def test_memory_stays_while_a_tier_may_still_read_it(node: Node) -> None:
    """Though the call that it is for has returned."""
    full, external = taken(node), SimpleNamespace(storing=True)
    node.sizing._demoter = SimpleNamespace(read_guard=threading.Lock(), external=external)  # type: ignore[assignment]
    node.sizing.limit = 3
    node.settle(3)
    time.sleep(0.3)
    assert taken(node) == full
    external.storing = False
    eventually(lambda: taken(node) < full - 3 * SLAB, 20.0)


def test_memory_that_a_dead_owner_was_about_to_give_back_goes(node: Node) -> None:
    node.sizing.stop()
    node.sizing._thread.join()
    assert node.arena.give_back(1, node.directory._size_classes.next_gen())
    full = taken(node)
    again = Resizer("p", "n", node.arena, LIMIT - 1, None, node.withdrawn.append)
    eventually(lambda: taken(node) < full - SLAB, 20.0)
    again.stop()


def test_what_fails_once_is_tried_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    original, fails = node.arena.give_back, [OSError(37, "no locks available")]

    def give_back(slab: int, generation: int) -> bool:
        if fails:
            raise fails.pop()
        return original(slab, generation)

    monkeypatch.setattr(node.arena, "give_back", give_back)
    assert resize(node, 3) == 3 * SLAB and not fails


def test_two_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the first fails, and puts back what was before."""
    original, full, failed = node.arena.offer_next, threading.Event(), []

    def offer() -> bool:
        if node.arena.available >= 8:
            full.set()
            raise CapacityError("the file system is full")
        return original()

    def run() -> None:
        with pytest.raises(CapacityError):
            node.sizing.resize(10 * SLAB, 20.0)
        failed.append(True)

    monkeypatch.setattr(node.arena, "offer_next", offer)
    first = threading.Thread(target=run)
    first.start()
    assert full.wait(20.0)
    assert resize(node, 4) == 4 * SLAB and kept(node) == b"%d" % (4 * SLAB)
    first.join()
    assert node.sizing.limit == 4 and failed


def test_bigger_again_before_anything_was_given_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.arena, "give_back", pytest.fail)
    node.sizing.limit = 3
    report = node.sizing.report()
    closed = node.directory.set_slab_target("n", 3, report[2], 0.0)
    node.sizing.limit = LIMIT
    node.sizing.on_directory_reply(report, *closed)
    node.settle(LIMIT)
    assert all(node.store(i, 60) for i in range(8)) and node.arena.given_back() == []


def test_somebody_else_takes_the_room_meanwhile(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resize(node, 5) == 5 * SLAB
    original = node.arena.offer_next

    def offer() -> bool:
        if node.arena.available >= 8:
            raise CapacityError("the file system is full")
        return original()

    monkeypatch.setattr(node.arena, "offer_next", offer)
    failed = resize(node, 10)
    assert isinstance(failed, CapacityError) and "full" in str(failed)
    assert kept(node) == b"%d" % (5 * SLAB) and node.sizing.limit == 5
    node.settle(5)
    assert resize(node, 7) == 7 * SLAB
    assert all(node.store(i, 60) for i in range(10))


def test_a_file_system_that_was_full_from_the_start(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is serves, is not tried again and again, and may be had less of."""
    calls = []

    def offer() -> bool:
        calls.append(1)
        raise CapacityError("the file system is full")

    monkeypatch.setattr(node.arena, "offer_next", offer)
    node.sizing.limit = LIMIT + 2
    node.sizing._changed.set()
    eventually(lambda: node.sizing.settled, 20.0)
    node.sizing._changed.set()
    node.heartbeat()
    assert node.store(1) and len(calls) == 1
    assert resize(node, 2) == 2 * SLAB


def test_a_node_that_cannot_afford_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def check(size: int) -> None:
        asked.append(size)
        raise CapacityError("no room")

    monkeypatch.setattr(free_memory, "check", check)
    assert isinstance(resize(node, LIMIT + 2), CapacityError) and kept(node) is None
    assert 2 * SLAB <= asked[0] < 3 * SLAB, "only for what is new"
    assert isinstance(resize(node, SLABS + 1), CapacityError) and node.sizing.limit == LIMIT
    assert resize(node, LIMIT - 2) == (LIMIT - 2) * SLAB and len(asked) == 1, "less needs no room"


def test_what_is_asked_for_by_fraction_is_kept_so(node: Node) -> None:
    assert size_of("p", "n", 0.5) == 0.5
    node.kv["memory/n"] = b"0.25"
    assert size_of("p", "n", 0.5) == 0.25
