"""An arena page-locks its memory for a GPU, and unlocks the memory in time."""

from typing import Any

import numpy as np
import pytest
from helpers.arena.gpu_arenas import granted, has, memory_arena, some
from helpers.arena.gpu_rows import on_gpu, read_to_gpu
from helpers.arena.gpus import meanwhile
from helpers.arena.worker import GEN, SLAB, fork

from raykv.arena.arena import Arena
from raykv.arena.buffers import rows_of
from raykv.arena.gpu.device import Device

pytestmark = pytest.mark.usefixtures("nothing_left", "locked")


def discarded(host: Arena, slab: int) -> Any:
    """Discard a slab's pages, and offer the slab again. Returns locations of three new blocks there."""
    assert host.give_back(slab, GEN + 1000)
    host.discard(slab)
    assert host.offer_next()
    new = granted(some(3)[0], slab=slab, gen=2000)
    new["slab_gen"] = GEN + 1001
    return new


def test_only_discarded_slabs_are_locked_again(cupy: Any, gpu: Device, host: Arena, locked: dict[int, int]) -> None:
    """GPUs would go on using the old pages, which the client has page-locked. Other slabs stay as they are."""
    client = Arena.attach(host.path, host.nonce)
    at, keys, blocks = some(3)
    stays = granted(at, slab=0, gen=10)
    assert client.write(at, keys, on_gpu(cupy, blocks)).all() and client.write(stays, keys, on_gpu(cupy, blocks)).all()
    mapped = client._memory[1].ctypes.data
    both = [client.region(slab)[0] for slab in (0, 1)]
    assert sorted(locked) == both and list(locked) != both, "slab 1 was locked first"
    new = discarded(host, 1)
    assert client.write(new, keys, on_gpu(cupy, blocks)).all() and has(host, new, keys, blocks)
    assert client._memory[1].ctypes.data == mapped
    assert list(locked) == both, "slab 1 was locked again, after slab 0"
    ok, found = read_to_gpu(cupy, client, new, keys)
    assert ok.all() and (found == blocks).all()
    client.close()
    assert not locked


@pytest.mark.parametrize("again", [False, True], ids=["given back", "offered again"])
def test_a_slab_that_is_locked_before_its_pages_go_is_locked_again(
    gpu: Device, host: Arena, locked: dict[int, int], monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Between the moment when a slab is given back, and the moment when its pages go, a late reader may lock it."""
    client = Arena.attach(host.path, host.nonce)
    slots = client.addresses(some(3)[0])
    assert host.give_back(1, GEN + 1000)
    assert client.register(gpu.uuid, slots) and locked
    host.discard(1)
    if again:
        assert host.offer_next()
    first = next(iter(locked))
    unlock, gone = Device.unregister, list[int]()

    def unregister(self: Device, address: int) -> None:
        gone.append(address)
        unlock(self, address)

    monkeypatch.setattr(Device, "unregister", unregister)
    assert client.register(gpu.uuid, slots)
    assert gone == [first] == list(locked)
    client.close()


def test_a_slab_is_not_unlocked_during_a_copy(
    cupy: Any, gpu: Device, host: Arena, locked: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy goes on with the pages that it has. Whoever comes next finds another mapping of the file."""
    client = Arena.attach(host.path, host.nonce)
    at, keys, blocks = some(3)
    assert client.write(at, keys, on_gpu(cupy, blocks)).all()
    old, slots = client._memory[1].ctypes.data, client.addresses(at)

    def shrink() -> None:
        discarded(host, 1)
        assert len(locked) == 1 and not client.register(gpu.uuid, slots)
        assert client._memory[1].ctypes.data != old and len(locked) == 1

    meanwhile(monkeypatch, shrink)
    ok, _ = read_to_gpu(cupy, client, at, keys)
    assert not ok.any(), "the blocks were evicted"
    assert not client.register(gpu.uuid, slots) and not locked, "the old mapping is not registered"
    assert client.register(gpu.uuid, client.addresses(at)) and list(locked) == [client.region(1)[0]]
    client.close()
    assert not locked


def test_another_slab_is_unlocked_during_a_copy(
    cupy: Any, gpu: Device, host: Arena, locked: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Arena.attach(host.path, host.nonce)
    at, keys, blocks = some(3)
    stays = granted(at, slab=0, gen=10)
    assert client.write(at, keys, on_gpu(cupy, blocks)).all() and client.write(stays, keys, on_gpu(cupy, blocks)).all()
    slots, mapped = client.addresses(at), client._memory[1].ctypes.data

    def shrink() -> None:
        discarded(host, 1)
        assert client.register(gpu.uuid, slots) and client._memory[1].ctypes.data == mapped

    meanwhile(monkeypatch, shrink)
    ok, found = read_to_gpu(cupy, client, stays, keys)
    assert ok.all() and (found == blocks).all() and list(locked) == [client.region(slab)[0] for slab in (0, 1)]
    client.close()
    assert not locked


def test_the_owner_discards_no_slab_that_a_gpu_reads(
    cupy: Any, gpu: Device, host: Arena, locked: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was stopped for long may read a slab that was given back since."""
    at, keys, blocks = some(3)
    assert host.write(at, keys, on_gpu(cupy, blocks)).all()

    def shrink() -> None:
        assert host.give_back(1, GEN + 1000)
        host.discard(1)
        assert locked and host.refilled() == [1]

    meanwhile(monkeypatch, shrink)
    ok, _ = read_to_gpu(cupy, host, at, keys)
    assert not ok.any(), "the blocks were evicted"
    host.discard(1)
    assert not locked and not host.refilled()


def test_an_arena_that_closes_while_a_slab_is_locked(
    cupy: Any, gpu: Device, host: Arena, locked: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, lock = Arena.attach(host.path, host.nonce), Device.register
    slots = client.addresses(some(3)[0])

    def register(self: Device, address: int, length: int) -> None:
        client.close()
        lock(self, address, length)

    monkeypatch.setattr(Device, "register", register)
    assert not client.register(gpu.uuid, slots) and not locked


def test_a_closed_arena_stays_closed(gpu: Device, host: Arena, locked: dict[int, int]) -> None:
    client = Arena.attach(host.path, host.nonce)
    at, keys, blocks = some(3)
    assert client.write(at, keys, blocks).all()
    slots, mapped = client.addresses(at), client._memory
    assert host.give_back(0, GEN + 1000)
    host.discard(0)
    client.close()
    assert not client.register(gpu.uuid, slots) and not len(client._memory[1]) and not locked
    del mapped


def test_the_owner_unregisters_slabs_that_it_discards(
    cupy: Any, gpu: Device, host: Arena, locked: dict[int, int]
) -> None:
    at, keys, blocks = some(2)
    assert host.write(at, keys, on_gpu(cupy, blocks)).all() and locked.keys() == {host.region(1)[0]}
    assert host.give_back(1, GEN + 1000) and locked
    host.discard(1)
    assert not locked
    assert host.write(granted(at), keys, on_gpu(cupy, blocks)).all() and locked.keys() == {host.region(0)[0]}


@pytest.mark.parametrize("kind", ["host", "ours"])
def test_a_close_during_a_copy(
    request: pytest.FixtureRequest,
    cupy: Any,
    gpu: Device,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    locked: dict[int, int],
) -> None:
    """Memory is unlocked or freed only when the copy is done."""
    free = gpu._memory()[0]
    arena: Arena = request.getfixturevalue(kind)
    at, keys, blocks = some(2)
    assert arena.write(at, keys, blocks).all()
    meanwhile(monkeypatch, lambda: arena.close(unlink=True))
    out = cupy.zeros(blocks.shape, np.uint8)
    ok = arena.read(at, keys, rows_of([out]))
    assert ok.all() and (out.get() == blocks).all()
    assert not locked
    del out
    if kind == "ours":
        assert gpu._memory()[0] >= free - SLAB
    assert not arena.read(at, keys, np.zeros_like(blocks)).any()


def test_a_forked_child_unregisters_nothing(on_host: Any, locked: dict[int, int]) -> None:
    host = memory_arena()
    at, keys, blocks = some(2)
    assert host.write(at, keys, on_gpu(on_host, blocks)).all()
    asked, answer = fork.Pipe(duplex=False)

    def child() -> None:
        host.close()
        answer.send(len(locked))

    process = fork.Process(target=child)
    process.start()
    process.join()
    assert asked.recv() == 1
    assert len(locked) == 1 and host.read(at, keys, on_gpu(on_host, blocks)).all()
    host.close(unlink=True)
    assert not locked
