"""Blocks are copied between an arena on a GPU and another arena, on a stand-in for CuPy; with `-m gpu`, on a GPU."""

from typing import Any

import numpy as np
import pytest
from helpers.arena.gpu_arenas import SIZE, SIZES, gpu_arena, granted, has, header_of, some, sums_of
from helpers.arena.gpu_rows import on_gpu
from helpers.arena.gpus import meanwhile, put, refuse
from helpers.arena.worker import key_of

from raykv.arena import header
from raykv.arena.arena import Arena
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import Device
from raykv.arena.gpu_arena import GpuArena, copy_between
from raykv.protocol.transfers import ALTERED, FAILED, PULLED

pytestmark = pytest.mark.usefixtures("nothing_left", "locked")


@pytest.fixture(params=["up", "down", "down, bounced"])
def pair(
    request: pytest.FixtureRequest, host: Arena, ours: GpuArena, monkeypatch: pytest.MonkeyPatch
) -> tuple[Arena, Arena]:
    """(source, target)."""
    if "bounced" in request.param:
        monkeypatch.setattr(Device, "register", refuse)
    return (host, ours) if request.param == "up" else (ours, host)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("written", ["in memory", "on a GPU"])
def test_copy_between_gpu_and_host(cupy: Any, pair: tuple[Arena, Arena], size: int, written: str) -> None:
    source, target = pair
    at, keys, blocks = some(4, size)
    assert source.write(at, keys, on_gpu(cupy, blocks) if written == "on a GPU" else blocks, np.arange(7, 11)).all()
    keys[2] ^= 1  # the key of another block
    verdicts = copy_between(source, at, keys, target, granted(at))
    assert verdicts.tolist() == [PULLED, PULLED, ALTERED, PULLED]
    there = verdicts == PULLED
    assert has(target, granted(at)[there], keys[there], blocks[there])
    sums, positions, ok = target.read_headers(granted(at), keys)
    assert (ok == there).all() and positions[ok].tolist() == [7, 8, 10] and sums[ok].tolist() == sums_of(blocks[ok])


@pytest.mark.parametrize("size", SIZES)
def test_copy_between_gpus(on_host: Any, size: int) -> None:
    first, second = (gpu_arena(devices.device(uuid)) for uuid in devices.visible())
    at, keys, blocks = some(3, size)
    assert copy_between(first, at, keys, second, granted(at)).tolist() == [ALTERED] * 3, "nothing is there"
    assert first.write(at[:1], keys[:1], on_gpu(on_host, blocks[:1])).all()
    assert first.write(at[1:], keys[1:], blocks[1:], np.array([8, 9])).all()
    put(devices.device(first.gpu), int(first.addresses(at)[2]), ~blocks[2, :1])
    assert copy_between(first, at, keys, second, granted(at)).tolist() == [PULLED, PULLED, ALTERED]
    assert has(second, granted(at)[:2], keys[:2], blocks[:2])
    sums, positions, _ = second.read_headers(granted(at)[:2], keys[:2])
    assert sums.tolist() == sums_of(blocks[:2]) and positions.tolist() == [0, 8]
    for arena in (first, second):
        arena.close(unlink=True)


def test_blocks_altered_on_a_gpu_are_not_demoted(gpu: Device, host: Arena, ours: GpuArena) -> None:
    at, keys, blocks = some(3)
    assert ours.write(at, keys, blocks).all()
    put(gpu, int(ours.addresses(at)[1]) + SIZE - 1, ~blocks[1, -1:])
    assert copy_between(ours, at, keys, host, granted(at)).tolist() == [PULLED, ALTERED, PULLED] and host.corrupt == 1


def test_blocks_evicted_during_copy_between(pair: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted block fails, the rest of the batch does not, and the slot can be written again."""
    source, target = pair
    at, keys, blocks = some(3)
    assert source.write(at, keys, blocks).all()
    new = granted(at, slab=1)[1:2]
    meanwhile(monkeypatch, lambda: source.write(new, key_of(9), blocks[2:]))
    assert copy_between(source, at, keys, target, granted(at)).tolist() == [PULLED, FAILED, PULLED]
    assert target.corrupt == 0 and not len(target.inventory().writing)
    assert copy_between(source, new, key_of(9), target, granted(at)[1:2]).tolist() == [PULLED]
    assert has(target, granted(at)[1:2], key_of(9), blocks[2:])


def test_copy_between_into_slots_that_are_not_granted(pair: tuple[Arena, Arena]) -> None:
    source, target = pair
    at, keys, blocks = some(3)
    assert source.write(at, keys, blocks).all() and target.write(granted(at)[:1], key_of(9), blocks[:1]).all()
    stale, other = granted(at, gen=50), Arena.attach(target.path, target.nonce)
    with other._locks.locked(target._lock_numbers(target._find(stale).headers)[2:]):
        assert copy_between(source, at, keys, target, stale).tolist() == [FAILED, PULLED, FAILED]
    assert has(target, granted(at)[:1], key_of(9), blocks[:1])
    other.close()


def test_demotion_is_no_use_of_a_block(pair: tuple[Arena, Arena]) -> None:
    source, target = pair
    at, keys, blocks = some(2)
    assert source.write(at, keys, blocks).all()
    source._clock_base -= 1000
    stamps = [int(header_of(source, slot)[header.STAMP]) for slot in at["slot"]]
    assert (copy_between(source, at, keys, target, granted(at), used=False) == PULLED).all()
    assert [int(header_of(source, slot)[header.STAMP]) for slot in at["slot"]] == stamps
    assert (copy_between(source, at, keys, target, granted(at, gen=200)) == PULLED).all()
    assert all(header_of(source, slot)[header.STAMP] >= 1000 for slot in at["slot"])


def test_an_arena_closed_during_copy_between(pair: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may stop while it copies. It must not crash."""
    source, target = pair
    at, keys, blocks = some(2)
    assert source.write(at, keys, blocks).all()
    claims = source.read_headers

    def then_close(*args: Any) -> Any:
        found = claims(*args)
        source.close()
        return found

    monkeypatch.setattr(source, "read_headers", then_close)
    assert (copy_between(source, at, keys, target, granted(at)) == FAILED).all() and not len(target.inventory().writing)
