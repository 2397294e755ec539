"""Copies go through bounce buffers in batches, on a stand-in for CuPy; with `-m gpu`, on a GPU."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.arena.gpu_arenas import has, memory_arena, some
from helpers.arena.gpu_rows import on_gpu, read_to_gpu
from helpers.arena.gpus import noise, refuse
from hypothesis import given
from hypothesis import strategies as st

from raykv.arena import checksum
from raykv.arena.gpu import device as devices
from raykv.arena.gpu import host_copy
from raykv.arena.gpu.device import BOUNCE_BYTES, Device

pytestmark = pytest.mark.usefixtures("nothing_left", "locked")

LENGTHS = st.one_of(st.integers(0, 5), st.integers(BOUNCE_BYTES - 2, 3 * BOUNCE_BYTES), st.integers(0, BOUNCE_BYTES))


@given(st.lists(LENGTHS, max_size=12))
def test_batches(lengths: list[int]) -> None:
    """Batches copy every byte once, and are as few as BOUNCE_BYTES allows."""
    table = np.zeros((len(lengths), 3), np.int64)
    table[:, 2] = lengths
    table[:, 0] = 1_000_000 + np.cumsum(lengths) - lengths
    table[:, 1] = 5_000_000_000 - 2 * table[:, 0]  # in reverse order
    before = table.copy()
    batches = list(host_copy.batches(table))
    sizes = [int(batch[2].sum()) for batch in batches]
    assert (table == before).all() and all(0 < size <= BOUNCE_BYTES for size in sizes) and sum(sizes) == sum(lengths)
    assert all(a + b > BOUNCE_BYTES - max(lengths) for a, b in itertools.pairwise(sizes))
    pieces = np.concatenate([np.zeros((3, 0), np.int64), *batches], axis=1).T
    assert (pieces[:, 2] > 0).all() and (np.diff(pieces[:, 0]) == pieces[:-1, 2]).all()
    of = {int(start): (int(source), int(length)) for start, source, length in table.tolist() if length}
    for start, source, length in pieces.tolist():
        first = max(at for at in of if at <= start)
        assert source - of[first][0] == start - first and start + length <= first + of[first][1]


def test_big_blocks_through_the_bounce_buffer(cupy: Any, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "register", refuse)
    monkeypatch.setattr(host_copy, "BOUNCE_BYTES", 70_001)
    arena = memory_arena()
    at, keys, blocks = some(3, 300_001)
    assert arena.write(at, keys, on_gpu(cupy, blocks)).all() and has(arena, at, keys, blocks)
    ok, found = read_to_gpu(cupy, arena, at, keys)
    assert ok.all() and (found == blocks).all()
    arena.close(unlink=True)


@pytest.mark.parametrize("to_gpu", [True, False])
def test_a_bounce_buffer_is_filled_while_the_other_is_emptied(
    on_host: Any, monkeypatch: pytest.MonkeyPatch, to_gpu: bool
) -> None:
    """The test holds each copy out of a buffer until the next copy into the other buffer has begun."""
    monkeypatch.setattr(host_copy, "BOUNCE_BYTES", 70_001)
    gpu = devices.device(devices.visible()[0])
    blocks = noise(4 * 70_001).reshape(4, -1)
    far = on_host.asarray(blocks if not to_gpu else np.zeros_like(blocks))
    near = np.zeros_like(blocks) if not to_gpu else blocks
    far_rows, near_rows = far.data.ptr + 70_001 * np.arange(4), near.ctypes.data + 70_001 * np.arange(4)
    begun = [threading.Event() for _ in range(5)]
    begun[4].set()  # after the last copy there is no next one
    fills, empties = itertools.count(), itertools.count()

    def filled(copy: Callable[..., object]) -> Callable[..., object]:
        def begin(*args: Any) -> None:
            begun[next(fills)].set()
            copy(*args)

        return begin

    def emptied(copy: Callable[..., object]) -> Callable[..., object]:
        def wait(*args: Any) -> None:
            assert begun[next(empties) + 1].wait(20.0), "the next copy waits for this one"
            copy(*args)

        return wait

    here, there = (filled, emptied) if to_gpu else (emptied, filled)
    monkeypatch.setattr(checksum, "copy", here(checksum.copy))
    monkeypatch.setattr(Device, "copy", there(Device.copy))
    target, source = (far_rows, near_rows) if to_gpu else (near_rows, far_rows)
    table = np.stack([target, source, np.full(4, 70_001)], axis=1)
    host_copy.copy(gpu.uuid, table, registered=False, to_gpu=to_gpu)
    monkeypatch.undo()
    assert (far.get() == blocks).all() and (near == blocks).all()
