"""Writers, readers and the owner of an arena stop and die at bad moments."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers.arena import worker as w
from helpers.arena.worker import GEN, PRINT, SLAB, STEPS, Child, at_step, get, locations, put

from raykv.arena import block_copy, superblock
from raykv.arena.arena import Arena
from raykv.arena.buffers import rows_of


@pytest.fixture
def arena(path: str) -> Iterator[Arena]:
    arena = Arena.create(path, PRINT, SLAB, 2)
    arena.offer_next()
    arena.raise_epoch(w.EPOCH)
    yield arena
    arena.close(unlink=True)


def writer(step: str, act: Callable[[], None], slot: int, gen: int, **location: int) -> Callable[[Arena], bool]:
    def run(arena: Arena) -> bool:
        at_step(step, act)
        return put(arena, slot, gen, **location)

    return run


@pytest.mark.parametrize("step", STEPS)
def test_writer_killed(arena: Arena, step: str) -> None:
    assert put(arena, 0, 2) and put(arena, 1, 3)
    child = Child(arena, writer(step, w.die_here, 0, 4))
    with pytest.raises(EOFError):
        child.result()
    done = step in ("ready", "unlocked")
    assert get(arena, 0, 4) == done, "only a finished block is read"
    assert get(arena, 0, 2) == (step in ("before lock", "locked")), "the old block stays until it is overwritten"
    assert get(arena, 1, 3)
    assert arena.sweep(locations([0], [4])).tolist() == [2 if done else 1]
    assert get(arena, 0, 4) == done and (done or not get(arena, 0, 2))
    assert put(arena, 0, 5) and get(arena, 0, 5) and not get(arena, 0, 4)


@pytest.mark.parametrize("step", ["locked", "writing", "first tile", "copied"])
def test_writer_stopped_while_it_holds_the_slot(arena: Arena, step: str) -> None:
    assert put(arena, 0, 2)
    child = Child(arena, writer(step, w.stop_here, 0, 3))
    child.wait_stopped()
    assert arena.sweep(locations([0], [3])).tolist() == [0]
    found = arena.inventory()
    assert found.writing["slot"].tolist() == [0] and len(found.ready) == 0, "not offered: about to be overwritten"
    other = Child(arena, lambda arena: put(arena, 0, 4))  # the slot is wrongly granted again
    assert other.result() is False
    assert not get(arena, 0, 4) and not get(arena, 0, 3)
    child.resume()
    assert child.result() is True
    assert get(arena, 0, 3) and not get(arena, 0, 4)
    assert arena.read(locations([0], [3]), w.key_of(3), np.zeros((1, 64 << 10), np.uint8), verify=True).all()


@pytest.mark.parametrize("meanwhile", ["written", "sweep_result", "epoch"])
def test_writer_stopped_before_it_holds_the_slot(arena: Arena, meanwhile: str) -> None:
    assert put(arena, 0, 2)
    child = Child(arena, writer("before lock", w.stop_here, 0, 3))
    child.wait_stopped()
    if meanwhile == "written":
        assert put(arena, 0, 4)
    elif meanwhile == "sweep_result":
        assert arena.sweep(locations([0], [3])).tolist() == [1]
    else:
        assert arena.raise_epoch(w.EPOCH + 1)
    child.resume()
    assert child.result() is False
    assert not get(arena, 0, 3)
    assert get(arena, 0, 4) == (meanwhile == "written")
    assert get(arena, 0, 2) == (meanwhile == "epoch")


def test_reader_without_lease_races_a_writer(arena: Arena) -> None:
    size, reads = 256 << 10, 3000
    at = w.fork.Value("q", 0, lock=False)

    def rewrite(client: Arena) -> int:
        gen = 2
        while at.value >= 0:
            assert put(client, 0, gen, size=size)
            at.value = gen if at.value >= 0 else -1
            gen += 1
        return gen

    child = Child(arena, rewrite)
    valid = invalid = 0
    try:
        while valid + invalid < reads or not (valid and invalid):
            gen = at.value
            if gen > 0 and get(arena, 0, gen, size=size):  # `get` asserts that the bytes are right
                valid += 1
            else:
                invalid += gen > 0
    finally:
        at.value = -1
        assert child.result() > 2


def test_formatter_refused_while_the_old_format_is_written(arena: Arena) -> None:
    assert put(arena, 1, 2)
    child = Child(arena, writer("first tile", w.stop_here, 0, 3))
    child.wait_stopped()
    assert not put(arena, 5, 11, size=8 << 10, slab_gen=GEN + 10)
    assert get(arena, 1, 2), "nothing was formatted"
    child.resume()
    assert child.result() is True
    assert put(arena, 5, 11, size=8 << 10, slab_gen=GEN + 10)
    assert not get(arena, 1, 2) and not get(arena, 0, 3)


@pytest.mark.parametrize("step", ["formatting", "formatted"])
def test_a_writer_waits_while_another_one_formats_the_slab(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Formatting locks all slots. Ranks of an engine may begin the same slab at once."""
    new, wrote, waits = {"size": 8 << 10, "slab_gen": GEN + 10}, list[bool](), threading.Event()
    sleep = time.sleep

    def wait(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    child = Child(arena, writer(step, w.stop_here, 1, 11, **new))
    child.wait_stopped()
    monkeypatch.setattr(time, "sleep", wait)
    monkeypatch.setattr("raykv.arena.arena.FORMAT_S", 60.0)
    thread = threading.Thread(target=lambda: wrote.append(put(arena, 2, 12, **new)))
    thread.start()
    assert waits.wait(60), "it gave up"
    child.resume()
    assert child.result() is True
    thread.join()
    assert wrote == [True] and get(arena, 1, 11, **new) and get(arena, 2, 12, **new)


def test_writer_of_the_old_format_wakes_after_the_reformat(arena: Arena) -> None:
    assert put(arena, 1, 2)
    child = Child(arena, writer("before lock", w.stop_here, 9, 3))
    child.wait_stopped()
    new = {"size": 8 << 10, "slab_gen": GEN + 10}
    written = [slot for slot in range(60, 100) if put(arena, slot, 11 + slot, **new)]  # covers the place of old slot 9
    child.resume()
    assert child.result() is False
    assert written == list(range(60, 100))
    assert all(get(arena, slot, 11 + slot, **new) for slot in written)


def test_formatter_stopped_past_an_epoch(arena: Arena) -> None:
    assert put(arena, 0, 2)

    def stale(client: Arena) -> bool:
        original = client._reformat  # the child stops after it has looked, and before it locks

        def reformat(*args: object) -> None:
            w.stop_here()
            original(*args)  # type: ignore[arg-type]

        client._reformat = reformat  # type: ignore[assignment, method-assign]
        return put(client, 5, 11, size=8 << 10, slab_gen=GEN + 10)

    child = Child(arena, stale)
    child.wait_stopped()
    assert arena.raise_epoch(w.EPOCH + 1)
    child.resume()
    assert child.result() is False
    assert get(arena, 0, 2), "a grant of a past epoch formats nothing"


def owner_that_dies(path: str) -> None:
    arena = Arena.create(path, PRINT, SLAB, 2)
    arena.offer_next()
    arena.raise_epoch(w.EPOCH)
    assert all(put(arena, slot, 2 + slot) for slot in range(8))
    os.kill(os.getpid(), signal.SIGKILL)


def test_adoption_after_the_owner_died(path: str) -> None:
    owner = w.fork.Process(target=owner_that_dies, args=(path,))
    owner.start()
    owner.join()
    with open(path, "rb") as file:
        words = superblock.read(file.fileno())
    assert words is not None
    client = Arena.attach(path, superblock.nonce_of(words))
    child = Child(client, writer("first tile", w.stop_here, 3, 20))
    child.wait_stopped()
    dead = Child(client, writer("first tile", w.die_here, 4, 21))
    with pytest.raises(EOFError):
        dead.result()

    arena = Arena.adopt(path, PRINT, SLAB, 2)
    assert arena is not None and (arena.incarnation, arena.offered, arena.epoch) == (2, 1, w.EPOCH)
    assert arena.nonce == client.nonce, "its clients need not attach again"
    found = arena.inventory()
    assert found.ready["slot"].tolist() == [0, 1, 2, 5, 6, 7]
    assert found.writing["slot"].tolist() == [3, 4]
    for location, key in zip(found.ready, found.keys, strict=True):
        out = np.zeros((1, 64 << 10), np.uint8)
        assert arena.read(location[None], key[None], out, verify=True).all()
        assert np.array_equal(out, w.block_of(key[None]))
    assert arena.sweep(found.writing).tolist() == [0, 1]
    os.kill(child.pid, signal.SIGKILL)
    child.end()
    assert arena.sweep(found.writing).tolist() == [1, 1]
    assert put(client, 3, 30) and put(client, 4, 31) and get(arena, 3, 30)
    client.close()
    arena.close(unlink=True)


def test_an_arena_with_a_living_owner_is_not_adopted(arena: Arena) -> None:
    put(arena, 0, 2)
    child = Child(arena, lambda client: Arena.adopt(client.path, PRINT, SLAB, 2) is None)
    assert child.result() is True
    assert get(arena, 0, 2) and arena.incarnation == 1 and os.path.exists(arena.path)


def test_forked_child_does_not_keep_its_parents_locks(arena: Arena) -> None:
    """If an engine that forked workers is killed, its slots must not stay locked while the workers live."""
    pid_from, pid_to = os.pipe()

    def fork_and_stop(client: Arena) -> None:
        def act() -> None:
            if os.fork() == 0:
                os.write(pid_to, os.getpid().to_bytes(4, "little"))
                signal.pause()
            w.stop_here()

        at_step("first tile", act)
        put(client, 0, 2)

    child = Child(arena, fork_and_stop)
    child.wait_stopped()
    grandchild = int.from_bytes(os.read(pid_from, 4), "little")
    try:
        assert arena.sweep(locations([0], [2])).tolist() == [0]
        child.end()
        assert arena.sweep(locations([0], [2])).tolist() == [1]
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(pid_from)
        os.close(pid_to)


def test_forked_child_writes_through_its_parents_arena(arena: Arena) -> None:
    client = Arena.attach(arena.path, arena.nonce)
    rows = np.concatenate([w.block_of(w.key_of(gen), 1 << 20) for gen in range(16)])
    keys = np.concatenate([w.key_of(gen) for gen in range(16)])
    where = locations(range(4), range(2, 6), size=1 << 20)

    def write() -> None:  # a block too large for one copy thread: the child lacks the parent's threads
        os._exit(0 if client.write(where, keys[:4], rows[:4]).all() else 1)

    big = np.zeros((4, 4 << 20), np.uint8)
    table = block_copy.copies(rows_of([big[:2]]), big.ctypes.data + np.array([2, 3]) * big.shape[1], out=True)
    block_copy.copy(table)  # starts the parent's copy threads
    process = w.fork.Process(target=write)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert arena.read(where, keys[:4], np.zeros((4, 1 << 20), np.uint8)).all()
    client.close()
