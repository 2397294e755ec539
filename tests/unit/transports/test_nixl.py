"""Blocks by NIXL between two processes: right bytes or none, whatever happens to the peer."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.arena.worker import PRINT
from helpers.pools import WITH_NIXL, eventually
from helpers.transports import nixl_peer
from numpy.typing import NDArray

import raykv.transports.nixl
from raykv.arena.arena import Arena
from raykv.protocol.location import COUNTER_BITS, LOCATION
from raykv.protocol.transfers import ALTERED, FAILED, PULLED
from raykv.transports.base import Peer, PullRequest
from raykv.transports.nixl import Nixl

pytestmark = WITH_NIXL

MIB = 1 << 20
SLAB, SLABS = 64 * MIB, 3
SIZE = 1 * MIB - 1000
SLOTS = SLAB // MIB
GEN = 1 << COUNTER_BITS | 1
FOREVER = 60.0
PEER = Peer("theirs", None)


def locations(slots: NDArray[np.int64], slab: int = 0, turn: int = 1) -> NDArray[np.void]:
    at = np.zeros(len(slots), LOCATION)
    at["slab"], at["slot"], at["bytes"], at["slab_gen"], at["gen"] = slab, slots, SIZE, GEN, GEN + turn
    return at


def some(seed: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(keys, blocks)."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 16), np.uint8), random.integers(0, 256, (count, SIZE), np.uint8)


def has(arena: Arena, at: NDArray[np.void], keys: NDArray[np.uint8], blocks: NDArray[np.uint8]) -> bool:
    out = np.zeros_like(blocks)
    ok = arena.read(at, keys, out, verify=True)
    assert (out[ok] == blocks[ok]).all()
    return bool(ok.all())


@pytest.fixture
def ours() -> Iterator[Arena]:
    yield from an_arena("ours")


@pytest.fixture
def theirs() -> Iterator[Arena]:
    yield from an_arena("theirs")


def an_arena(name: str) -> Iterator[Arena]:
    arena = Arena.create(f"/dev/shm/raykv-nixl-{os.getpid()}-{name}", PRINT, SLAB, SLABS)
    try:
        assert arena.offer_next() and arena.offer_next()
        yield arena
    finally:
        arena.close(unlink=True)


@pytest.fixture
def peer(theirs: Arena, monkeypatch: pytest.MonkeyPatch) -> Iterator[nixl_peer.Peer]:
    with a_peer(theirs, monkeypatch) as peer:
        yield peer


@contextmanager
def a_peer(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Iterator[nixl_peer.Peer]:
    peer = nixl_peer.Peer(arena)
    monkeypatch.setattr(raykv.transports.nixl, "ask", peer.ask)
    try:
        yield peer
    finally:
        peer.close()


def pull(
    nixl: Nixl,
    peer: nixl_peer.Peer,
    source: NDArray[np.void],
    keys: NDArray[np.uint8],
    arena: Arena,
    target: NDArray[np.void],
) -> list[int]:
    end = time.monotonic() + FOREVER
    verdicts: list[int] = nixl.pull(PEER, peer.offer, PullRequest(source, keys, arena, target, end)).tolist()
    return verdicts


@pytest.mark.full
def test_scattered_blocks_arrive(ours: Arena, theirs: Arena, peer: nixl_peer.Peer) -> None:
    nixl, random = Nixl(ours), np.random.default_rng(0)
    for turn, slab in enumerate((0, 1, 0), start=1):  # in between, both sides register another slab
        keys, blocks = some(turn, 30)
        source = locations(random.permutation(SLOTS)[:30], slab, turn)
        target = locations(random.permutation(SLOTS)[:30], 1 - slab, turn)
        assert theirs.write(source, keys, blocks, np.arange(30)).all()
        assert pull(nixl, peer, source, keys, ours, target) == [PULLED] * 30
        assert has(ours, target, keys, blocks)
        assert ours.read_headers(target, keys)[1].tolist() == list(range(30))


def test_blocks_that_are_gone_and_slots_that_are_not_granted(ours: Arena, theirs: Arena, peer: nixl_peer.Peer) -> None:
    nixl = Nixl(ours)
    keys, blocks = some(1, 5)
    source = target = locations(np.arange(5))
    assert theirs.write(source[:4], keys[:4], blocks[:4]).all()  # the last block is not there
    assert theirs.write(source[3:4], some(2, 4)[0][3:], blocks[3:4]).sum() == 0
    theirs._memory[1][theirs.addresses(source[1:2])[0] - theirs._memory[1].ctypes.data + 5] ^= (
        1  # the second block is altered
    )
    newer = locations(np.arange(5), turn=7)
    assert ours.write(newer[2:3], keys[2:3], blocks[2:3]).all()  # the third block's slot was granted again
    wanted = keys.copy()
    wanted[3] = 0  # the fourth block has another key
    assert pull(nixl, peer, source, wanted, ours, target) == [PULLED, ALTERED, FAILED, ALTERED, ALTERED]
    assert has(ours, target[:1], keys[:1], blocks[:1]) and ours.corrupt == 1
    assert has(ours, newer[2:3], keys[2:3], blocks[2:3])


def test_blocks_of_which_none_is_there(ours: Arena, theirs: Arena, peer: nixl_peer.Peer) -> None:
    keys, _ = some(1, 4)
    at = locations(np.arange(4))
    assert pull(Nixl(ours), peer, at, keys, ours, at) == [ALTERED] * 4


def test_a_slab_that_was_given_back(ours: Arena, theirs: Arena, peer: nixl_peer.Peer) -> None:
    """The slab is offered again with new memory, so the memory that was registered is gone."""
    nixl = Nixl(ours)
    for turn in range(1, 4):
        keys, blocks = some(turn, 8)
        at = locations(np.arange(8), 1, 2 * turn)
        at["slab_gen"] = GEN + 2 * turn - 1
        for arena in (ours, theirs):
            arena.corrupt = 0
        assert theirs.write(at, keys, blocks).all()
        assert pull(nixl, peer, at, keys, ours, at) == [PULLED] * 8
        assert has(ours, at, keys, blocks)
        for arena, withdraw in ((ours, nixl.withdraw), (theirs, peer.withdraw)):
            assert arena.give_back(1, GEN + 2 * turn)
            withdraw(1)
            arena.discard(1)
            assert arena.offer_next()


@pytest.mark.full
@pytest.mark.parametrize("over", ["all", "tcp"])
def test_the_peer_is_killed(ours: Arena, theirs: Arena, over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another transport can write the slots at once with the same grant, and the peer's next process is read."""
    monkeypatch.setenv("UCX_TLS", over)
    nixl = Nixl(ours)
    keys, blocks = some(1, SLOTS)
    source, before = locations(np.arange(SLOTS)), locations(np.arange(SLOTS), 1, 1)
    assert theirs.write(source, keys, blocks).all()
    with a_peer(theirs, monkeypatch) as peer:
        assert pull(nixl, peer, source, keys, ours, before) == [PULLED] * SLOTS
        answered = peer.ask

        def kill(*args: Any) -> Any:
            answer = answered(*args)
            peer.process.kill()
            return answer

        monkeypatch.setattr(raykv.transports.nixl, "ask", kill)
        target = locations(np.arange(SLOTS), 1, 2)
        try:  # the bytes may have come before the peer died
            assert pull(nixl, peer, source, keys, ours, target) == [PULLED] * SLOTS
            assert has(ours, target, keys, blocks)
        except ConnectionError:
            assert ours.write(target, keys, blocks).all()
        peer.process.join()
    with a_peer(theirs, monkeypatch) as peer:
        target = locations(np.arange(SLOTS), 1, 3)
        assert pull(nixl, peer, source, keys, ours, target) == [PULLED] * SLOTS
        assert has(ours, target, keys, blocks)


@pytest.mark.full
def test_the_peer_is_stopped(ours: Arena, theirs: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer can't be called off. Until it has ended, nothing else may write its slots."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # over shared memory even a stopped peer can be read
    nixl = Nixl(ours)
    keys, blocks = some(1, SLOTS)
    source = locations(np.arange(SLOTS))
    assert theirs.write(source, keys, blocks).all()
    with a_peer(theirs, monkeypatch) as peer:
        assert pull(nixl, peer, source, keys, ours, locations(np.arange(SLOTS), 1, 1)) == [PULLED] * SLOTS
        answered, target = peer.ask, locations(np.arange(SLOTS), 1, 2)

        def stop(*args: Any) -> Any:
            answer = answered(*args)
            os.kill(peer.process.pid or 0, signal.SIGSTOP)
            return answer

        monkeypatch.setattr(raykv.transports.nixl, "ask", stop)
        with pytest.raises(TimeoutError):
            nixl.pull(PEER, peer.offer, PullRequest(source, keys, ours, target, time.monotonic() + 1.0))
        try:
            newer = locations(np.arange(SLOTS), 1, 3)
            assert not ours.write(newer, *some(2, SLOTS)).any()
            with pytest.raises(ConnectionError, match="has not ended"):  # so another transport is used meanwhile
                nixl.pull(PEER, peer.offer, PullRequest(source, keys, ours, newer, time.monotonic() + FOREVER))
        finally:
            os.kill(peer.process.pid or 0, signal.SIGCONT)
        eventually(lambda: has(ours, target, keys, blocks))
        newer_keys, newer_blocks = some(2, SLOTS)
        eventually(lambda: ours.write(newer, newer_keys, newer_blocks).all())
        monkeypatch.setattr(raykv.transports.nixl, "ask", answered)
        eventually(lambda: not nixl._remote[peer.offer].busy)
        assert has(ours, newer, newer_keys, newer_blocks), "nothing comes late"
        again = locations(np.arange(SLOTS), 0, 1)
        assert pull(nixl, peer, source, keys, ours, again) == [PULLED] * SLOTS and has(ours, again, keys, blocks)


def test_many_pulls_at_once(ours: Arena, theirs: Arena, peer: nixl_peer.Peer) -> None:
    """Several threads pull in turn through one agent."""
    nixl, turns = Nixl(ours), threading.Lock()
    keys, blocks = some(1, SLOTS)
    source = locations(np.arange(SLOTS))
    assert theirs.write(source, keys, blocks).all()
    verdicts = []

    def run(part: int) -> None:
        mine = slice(part * SLOTS // 4, (part + 1) * SLOTS // 4)
        for _ in range(3):
            with turns:  # as TransportSelector does
                verdicts.append(pull(nixl, peer, source[mine], keys[mine], ours, locations(np.arange(SLOTS)[mine], 1)))

    threads = [threading.Thread(target=run, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert has(ours, locations(np.arange(SLOTS), 1), keys, blocks)
    assert sum(verdict.count(PULLED) for verdict in verdicts) == SLOTS


@pytest.mark.full
def test_nothing_is_written_after_an_error(ours: Arena, theirs: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL reports a failed transfer at its first failed request, while other requests may be under way."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    nixl = Nixl(ours)
    keys, blocks = some(1, SLOTS)
    source = locations(np.arange(SLOTS))
    assert theirs.write(source, keys, blocks).all()
    with a_peer(theirs, monkeypatch) as peer:
        assert pull(nixl, peer, source, keys, ours, locations(np.arange(SLOTS), 1, 1)) == [PULLED] * SLOTS
        check, newer, other = nixl._agent.check_xfer_state, locations(np.arange(SLOTS), 1, 3), some(2, SLOTS)

        def fail(handle: Any) -> str:
            check(handle)
            return "ERR"

        with monkeypatch.context() as patch:
            patch.setattr(nixl._agent, "check_xfer_state", fail)
            with pytest.raises(ConnectionError, match="ended as ERR"):
                pull(nixl, peer, source, keys, ours, locations(np.arange(SLOTS), 1, 2))
        assert ours.write(newer, *other).all(), "the slots are free for another"
        time.sleep(1.0)
        assert has(ours, newer, *other)
        again = locations(np.arange(SLOTS), 1, 4)
        assert pull(nixl, peer, source, keys, ours, again) == [PULLED] * SLOTS and has(ours, again, keys, blocks)


@pytest.mark.full
def test_an_agent_that_has_nothing_to_do_takes_no_processor_time(
    ours: Arena, theirs: Arena, peer: nixl_peer.Peer
) -> None:
    nixl = Nixl(ours)
    keys, blocks = some(1, 1)
    at = locations(np.arange(1))
    assert theirs.write(at, keys, blocks).all() and pull(nixl, peer, at, keys, ours, at) == [PULLED]
    both = psutil.Process(), psutil.Process(peer.process.pid)
    before = [sum(process.cpu_times()[:2]) for process in both]
    time.sleep(2.0)
    assert all(sum(process.cpu_times()[:2]) - then < 0.1 for process, then in zip(both, before, strict=True))


def test_an_offer_of_a_dead_process_is_refused(ours: Arena, theirs: Arena) -> None:
    keys, _ = some(1, 1)
    args = locations(np.arange(1)).tobytes(), keys.tobytes(), -1
    nixl = Nixl(theirs)
    assert nixl.serve(nixl.offer(), *args)[2]
    with pytest.raises(ValueError, match="ask for the offer again"):
        nixl.serve("raykv-of-before", *args)
