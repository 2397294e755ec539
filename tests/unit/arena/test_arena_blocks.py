"""An arena in one process gives back the blocks that were written, and refuses arrays of a wrong form."""

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.arena.worker import GEN, block_of, get, key_of, locations, put
from xxhash import xxh3_64_intdigest

from raykv.arena import block_copy, checksum
from raykv.arena.arena import Arena
from raykv.arena.buffers import rows_of
from raykv.protocol.location import LOCATION


@pytest.mark.parametrize("size", [1, 4095, 4096, 10_000, 300_001, 1 << 20])
def test_round_trip(arena: Arena, client: Arena, size: int) -> None:
    where = locations([1, 0, 3], [2, 3, 4], size=size, slab=1)
    keys = np.concatenate([key_of(seed) for seed in range(3)])
    rows = np.random.default_rng(0).integers(0, 256, (3, size), np.uint8)
    assert client.write(where, keys, rows, np.arange(7, 10)).all()
    for verify in (False, True):
        out = np.zeros_like(rows)
        assert arena.read(where, keys, out, verify=verify).all()
        assert np.array_equal(out, rows)
    sums, positions, ok = arena.read_headers(where, keys)
    assert ok.all() and positions.tolist() == [7, 8, 9]
    assert sums.tolist() == [xxh3_64_intdigest(row.tobytes()) for row in rows]
    assert arena.views(where[:1])[0].tobytes() == rows[0].tobytes()
    found = client.inventory()
    order = np.argsort(where["slot"])
    assert np.array_equal(found.ready, where[order]) and np.array_equal(found.keys, keys[order])
    assert found.positions.tolist() == [8, 7, 9] and len(found.writing) == 0


def test_blocks_in_several_parts(arena: Arena) -> None:
    """A block is gathered from several places in memory, or scattered to them. A piece may be empty or span tiles."""
    size = 1_400_000
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    cuts = [0, 5, 5, 300_000, 1_399_999, size]
    pieces = [source[a:b].copy() for a, b in itertools.pairwise(cuts)]
    where = locations([0], [2], size=size)
    assert arena.write(where, key_of(1), rows_of([piece[None] for piece in pieces])).all()
    for verify in (False, True):
        out = [np.zeros(n, np.uint8) for n in (1, 1_000_000, 399_999)]
        assert arena.read(where, key_of(1), rows_of([piece[None] for piece in out]), verify=verify).all()
        assert np.array_equal(np.concatenate(out), source)


def test_big_batches_are_shared_between_threads(arena: Arena) -> None:
    where = locations([0, 1, 2, 3] * 2, range(2, 10), size=1 << 20)
    where["slab"][4:] = 1
    rows = np.random.default_rng(2).integers(0, 256, (8, 1 << 20), np.uint8)
    keys = np.concatenate([key_of(seed) for seed in range(8)])
    assert rows.nbytes >= block_copy.SPLIT and arena.write(where, keys, rows).all()
    for verify in (False, True):
        out = np.zeros_like(rows)
        assert arena.read(where, keys, out, verify=verify).all() and np.array_equal(out, rows)


def test_a_thread_that_fails_fails_the_copy_after_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = np.random.default_rng(3).integers(0, 256, (16, 1 << 20), np.uint8)
    slots = np.zeros_like(blocks)
    table = block_copy.copies(rows_of([blocks]), slots.ctypes.data + np.arange(16) * slots.shape[1], out=False)
    original = checksum.copy

    def fail(part: block_copy.Copies) -> None:
        if part is failing:
            raise MemoryError
        original(part)

    shares = list(table)
    failing = shares[9]
    monkeypatch.setattr(checksum, "copy", fail)
    with pytest.raises(MemoryError):
        block_copy._run(checksum.copy, shares)
    after = slots.copy()
    monkeypatch.undo()
    assert np.array_equal(after, slots), "a thread still copied"
    assert not slots[9].any()
    block_copy.copy(table)
    assert np.array_equal(slots, blocks)


def test_reads_stamp_headers(arena: Arena, client: Arena) -> None:
    assert put(arena, 0, 2)
    client._clock_base -= 100  # so the next read seems 100 s later
    assert get(client, 0, 2) and not get(client, 0, 3)
    assert 100 <= arena.inventory().stamps[0] < 200
    client._clock_base -= 100
    client.read_headers(locations([0], [2]), key_of(2))  # a store does this before another node reads the block
    assert 200 <= arena.inventory().stamps[0] < 300


def test_wrong_arrays_are_refused(arena: Arena) -> None:
    where, key, block = locations([0], [2]), key_of(2), block_of(key_of(2))
    frozen = block.copy()
    frozen.flags.writeable = False
    wrong: list[Any] = [
        block[:0],
        block[:, :-1],
        rows_of([block, block]),
        block.view(np.int8),
        np.zeros((1, 128 << 10), np.uint8)[:, ::2],
    ]
    for given in wrong:
        with pytest.raises(ValueError, match="row"):
            arena.write(where, key, given)
        with pytest.raises(ValueError, match="row"):
            arena.read(where, key, given)
    with pytest.raises(ValueError, match="read-only"):
        arena.read(where, key, frozen)
    with pytest.raises(ValueError, match="keys"):
        arena.write(where, key[:, :8], block)
    with pytest.raises(ValueError, match="locations"):
        arena.write(np.zeros(1, np.int64), key, block)
    assert arena.write(where, key, frozen).all()
    assert len(arena.read(np.zeros(0, LOCATION), np.zeros((0, 16), np.uint8), block[:0])) == 0


def test_neighbouring_slots_are_one_view(arena: Arena) -> None:
    slots = [3, 4, 5, 9, 1, 2]
    assert all(put(arena, slot, 2 + slot) for slot in slots)
    views = arena.views(locations(slots, [2 + slot for slot in slots]))
    assert [len(view) // (64 << 10) for view in views] == [3, 1, 2]
    blocks = b"".join(block_of(key_of(2 + slot)).tobytes() for slot in slots)
    assert b"".join(view.tobytes() for view in views) == blocks
    odd = locations([0, 1], [40, 41], size=10_000, slab=1, slab_gen=GEN + 30)
    assert len(arena.views(odd)) == 2, "slots are padded: their bytes do not touch"
    assert arena.views(locations([], [])) == []
