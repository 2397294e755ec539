"""The Resizer with a real directory and arena, without Ray: lost answers, lost room, restarts and errors."""

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.arena.worker import PRINT, SLAB
from helpers.directory.checks import check_invariants
from helpers.pools import eventually

from raykv.actors.store import resizer
from raykv.actors.store.node_memory import inventory_of
from raykv.actors.store.resizer import Resizer, SavedSize
from raykv.arena.arena import Arena
from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept
from raykv.directory.directory import Directory
from raykv.errors import CapacityError
from raykv.protocol.clients import Call, CommitRequest, ReserveRequest
from raykv.protocol.location import LOCATION
from raykv.protocol.stores import ArenaDescription
from raykv.system import free_memory

SLABS, LIMIT, SIZE = 12, 6, 64 << 10


class Kv(dict[str, bytes]):
    """Ray's internal KV, for one pool."""

    def ask(self, pool: str, kind: Kept, name: str = "") -> bytes | None:
        return self.get(f"{kind}/{name}")

    def put(self, pool: str, kind: Kept, value: bytes, name: str = "") -> None:
        self[f"{kind}/{name}"] = value

    def drop(self, pool: str, kind: Kept, name: str = "") -> None:
        self.pop(f"{kind}/{name}", None)


class Node:
    """A node store's arena and resizer, with the store's heartbeat."""

    def __init__(self, path: str, kv: Kv) -> None:
        self.kv = kv
        self.arena = Arena.create(path, PRINT, SLAB, SLABS)
        self.withdrawn: list[int] = []
        self.resizer = Resizer(SavedSize("p", "n"), self.arena, LIMIT, None, self.withdrawn.append)
        self.directory = Directory()
        self.join()
        self.index = self.directory.nodes["n"].index
        self.ids = 0
        self.held: list[int] = []

    def join(self) -> None:
        described = ArenaDescription(self.arena.nonce, SLAB, self.resizer.limit, self.arena.epoch)
        joined = self.directory.join("n", described, 0.0)
        assert self.arena.raise_epoch(joined.epoch)
        report = self.resizer.report()
        inventory = inventory_of(self.arena, joined.node)
        self.directory.set_slab_target("n", report, 0.0)
        self.directory.adopt("n", inventory, 0.0, report.offered)

    def heartbeat(self, lost: bool = False) -> None:
        report = self.resizer.report()
        target = self.directory.set_slab_target("n", report, 0.0)
        self.directory.heartbeat("n", report.offered, 0.0)
        check_invariants(self.directory)
        if not lost:
            self.resizer.on_directory_reply(report, target)

    def call(self) -> Call:
        self.ids += 1
        return Call(1, self.ids, np.array(self.held, np.uint64).tobytes())

    def store(self, first: int, n: int = 8) -> bool:
        """Store blocks as far as there is room. Returns whether some got a slot and all of these are read back."""
        keys = np.random.default_rng(first).integers(0, 256, (n, 16), np.uint8)
        asked = ReserveRequest(self.ids + 1, "n", keys.tobytes(), start=0, block_bytes=SIZE)
        got = self.directory.reserve(self.call(), asked, 0.0)
        at, mine = np.frombuffer(got.locations, LOCATION), keys[np.frombuffer(got.indices, np.int32)]
        rows = np.repeat(mine, SIZE // 16, axis=0).reshape(len(mine), SIZE)
        written = self.arena.write(at, mine, rows)
        done = CommitRequest(asked.reservation, got.locations, mine.tobytes(), bytes(written))
        self.directory.commit(self.call(), done, 0.0)
        return len(at) > 0 and bool(written.all() and self.arena.read(at, mine, rows.copy()).all())

    def settle(self, slabs: int) -> None:
        """Wait until the arena and the directory have so many slabs."""

        def done() -> bool:
            self.heartbeat()
            known = self.directory.nodes["n"]
            return self.resizer.at_limit and len(known.slabs) + len(known.spare) == slabs == self.arena.available

        eventually(done, 20.0)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    kv = Kv()
    for name, function in (("get", kv.ask), ("put", kv.put), ("drop", kv.drop)):
        monkeypatch.setattr(internal_kv, name, function)
    monkeypatch.setattr(resizer, "data_deadline", lambda _: 0.05)
    path = f"/dev/shm/raykv-test-resizer-{os.getpid()}"
    node = Node(path, kv)
    node.settle(LIMIT)
    yield node
    node.resizer.stop()
    node.arena.close(unlink=True)


def resize(node: Node, slabs: int) -> Any:
    """The result or error of `resize`, while heartbeats go on."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(node.resizer.resize(slabs * SLAB, 20.0))
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


def test_a_node_can_be_resized_down_and_up(node: Node) -> None:
    assert node.store(1) and node.store(2)
    for slabs in (2, 9, 1, SLABS):
        assert resize(node, slabs) == slabs * SLAB and kept(node) == b"%d" % (slabs * SLAB)
        assert all(node.store(100 * slabs + i, 30) for i in range(12)), "every slab that is had can be written to"


def test_lost_answers_only_delay_a_resize(node: Node) -> None:
    assert all(node.store(i, 60) for i in range(5))
    node.resizer.limit = 3
    for _ in range(3):
        node.heartbeat(lost=True)
    assert node.arena.available == LIMIT
    node.settle(3)
    assert all(node.store(100 + i, 60) for i in range(5))


def test_slabs_that_an_earlier_directory_named_are_not_given_back(node: Node) -> None:
    """The next directory may be using these slabs."""
    assert all(node.store(i, 60) for i in range(5))
    node.resizer.limit = 3
    report = node.resizer.report()
    target = node.directory.set_slab_target("n", report, 0.0)
    assert target.numbers
    node.directory = Directory(node.directory.epoch + 1)
    node.resizer._full = "nothing is offered meanwhile"
    node.join()
    node.resizer.on_directory_reply(report, target)
    eventually(lambda: not node.resizer._to_give_back, 20.0)
    assert node.arena.available == LIMIT
    node.settle(3)
    assert all(node.store(100 + i, 60) for i in range(5))


def test_no_slab_is_granted_while_its_memory_is_about_to_go(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(node.store(i, 60) for i in range(5))
    original, asked, go_on = node.arena.give_back, threading.Event(), threading.Event()

    def give_back(slab: int, generation: int) -> bool:
        asked.set()
        assert go_on.wait(60)
        return original(slab, generation)

    monkeypatch.setattr(node.arena, "give_back", give_back)
    node.resizer.limit = 3
    node.heartbeat()
    assert asked.wait(60)
    for i in range(4):
        node.heartbeat()
        assert node.store(100 + i, 60)
        assert len(node.directory.nodes["n"].withdrawn) == 3
    node.resizer.limit = LIMIT
    node.heartbeat()
    assert len(node.directory.nodes["n"].withdrawn) == 3, "though it is to stay: that is not known yet"
    go_on.set()
    node.settle(LIMIT)
    assert all(node.store(200 + i, 60) for i in range(8))


def taken(node: Node) -> int:
    return os.stat(node.arena.path).st_blocks * 512


def test_memory_goes_only_when_nobody_can_be_reading_it(node: Node) -> None:
    full = taken(node)
    node.resizer._grace = 1000.0
    node.resizer.limit = 3
    node.settle(3)
    assert node.resizer.resize(3 * SLAB, 0.2) == 3 * SLAB and taken(node) == full, "it would wait for that"
    node.resizer.limit = LIMIT
    node.resizer._loop.wake()
    node.settle(LIMIT)
    eventually(lambda: not node.resizer._to_discard, 20.0)
    assert all(node.store(i, 60) for i in range(8)), "offered again"
    node.resizer._grace = 0.05
    assert resize(node, 2) == 2 * SLAB and taken(node) < full - (LIMIT - 2) * SLAB
    left = taken(node)
    node.arena._populate(node.arena._memory[1], {*node.arena.given_back()})
    assert taken(node) > left, "somebody mapped it late"
    eventually(lambda: taken(node) == left, 20.0)


def test_memory_stays_while_a_tier_may_still_read_it(node: Node) -> None:
    """A write to the tier may go on after its call has returned."""
    full, external = taken(node), SimpleNamespace(storing=True)
    node.resizer._demoter = SimpleNamespace(read_guard=threading.Lock(), external=external)  # type: ignore[assignment]
    node.resizer.limit = 3
    node.settle(3)
    time.sleep(0.3)
    assert taken(node) == full
    external.storing = False
    eventually(lambda: taken(node) < full - 3 * SLAB, 20.0)


def test_memory_that_a_dead_owner_was_about_to_give_back_goes(node: Node) -> None:
    node.resizer.stop()
    node.resizer._loop.join()
    assert node.arena.give_back(1, node.directory.size_classes.next_gen())
    full = taken(node)
    again = Resizer(SavedSize("p", "n"), node.arena, LIMIT - 1, None, node.withdrawn.append)
    eventually(lambda: taken(node) < full - SLAB, 20.0)
    again.stop()


def test_a_give_back_that_fails_once_is_tried_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    original, fails = node.arena.give_back, [OSError(37, "no locks available")]

    def give_back(slab: int, generation: int) -> bool:
        if fails:
            raise fails.pop()
        return original(slab, generation)

    monkeypatch.setattr(node.arena, "give_back", give_back)
    assert resize(node, 3) == 3 * SLAB and not fails


def test_two_resizes_at_once_happen_one_after_the_other(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first resize fails, and restores the size before it."""
    original, full, failed = node.arena.offer_next, threading.Event(), []

    def offer() -> bool:
        if node.arena.available >= 8:
            full.set()
            raise CapacityError("the file system is full")
        return original()

    def run() -> None:
        with pytest.raises(CapacityError):
            node.resizer.resize(10 * SLAB, 20.0)
        failed.append(True)

    monkeypatch.setattr(node.arena, "offer_next", offer)
    first = threading.Thread(target=run)
    first.start()
    assert full.wait(20.0)
    assert resize(node, 4) == 4 * SLAB and kept(node) == b"%d" % (4 * SLAB)
    first.join()
    assert node.resizer.limit == 4 and failed


def test_a_slab_is_kept_if_the_limit_rises_before_it_goes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.arena, "give_back", pytest.fail)
    node.resizer.limit = 3
    report = node.resizer.report()
    target = node.directory.set_slab_target("n", report, 0.0)
    node.resizer.limit = LIMIT
    node.resizer.on_directory_reply(report, target)
    node.settle(LIMIT)
    assert all(node.store(i, 60) for i in range(8)) and node.arena.given_back() == []


def test_a_resize_without_room_raises_and_keeps_the_size_before(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resize(node, 5) == 5 * SLAB
    original = node.arena.offer_next

    def offer() -> bool:
        if node.arena.available >= 8:
            raise CapacityError("the file system is full")
        return original()

    monkeypatch.setattr(node.arena, "offer_next", offer)
    failed = resize(node, 10)
    assert isinstance(failed, CapacityError) and "full" in str(failed)
    assert kept(node) == b"%d" % (5 * SLAB) and node.resizer.limit == 5
    node.settle(5)
    assert resize(node, 7) == 7 * SLAB
    assert all(node.store(i, 60) for i in range(10))


def test_a_full_file_system_is_not_tried_again_and_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slabs that were allocated serve, and the node can be resized down."""
    calls = []

    def offer() -> bool:
        calls.append(1)
        raise CapacityError("the file system is full")

    monkeypatch.setattr(node.arena, "offer_next", offer)
    node.resizer.limit = LIMIT + 2
    node.resizer._loop.wake()
    eventually(lambda: node.resizer.at_limit, 20.0)
    node.resizer._loop.wake()
    node.heartbeat()
    assert node.store(1) and len(calls) == 1
    assert resize(node, 2) == 2 * SLAB


def test_a_size_that_the_node_cannot_afford_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def check(size: int) -> None:
        asked.append(size)
        raise CapacityError("no room")

    monkeypatch.setattr(free_memory, "check", check)
    assert isinstance(resize(node, LIMIT + 2), CapacityError) and kept(node) is None
    assert 2 * SLAB <= asked[0] < 3 * SLAB, "only for what is new"
    assert isinstance(resize(node, SLABS + 1), CapacityError) and node.resizer.limit == LIMIT
    assert resize(node, LIMIT - 2) == (LIMIT - 2) * SLAB and len(asked) == 1, "less needs no room"


def test_a_fraction_is_saved_as_a_fraction(node: Node) -> None:
    assert SavedSize("p", "n").load(0.5) == 0.5
    node.kv["memory/n"] = b"0.25"
    assert SavedSize("p", "n").load(0.5) == 0.25
