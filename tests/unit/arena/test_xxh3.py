"""A checksum that is computed during a copy equals the xxhash library's, and the copy is right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from raykv.arena import block_copy, checksum
from raykv.arena.xxh3 import ROW, SHORTEST, STRIPE
from raykv.system.jit import compile_all

MARGIN = 2 * STRIPE  # around each copy; must not change
Bytes = NDArray[np.uint8]
stripes = st.integers(0, 40).map(lambda number: number * STRIPE)
parts = st.one_of(st.lists(stripes, min_size=1, max_size=6), st.lists(st.integers(0, 3000), min_size=1, max_size=6))
offsets = st.sampled_from([0, 8, STRIPE - 1])


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile the kernels before an example is timed."""
    compile_all("raykv.arena")


def buffers(n: int, size: int, offset: int) -> Bytes:
    """(n, size) rows, each `offset` bytes after a multiple of STRIPE, in a buffer with a margin on both sides."""
    pitch = -(-(size + STRIPE + 2 * MARGIN) // STRIPE) * STRIPE
    memory = np.full(n * pitch + STRIPE, 255, np.uint8)
    start = -memory.ctypes.data % STRIPE
    return memory[start : start + n * pitch].reshape(n, pitch)[:, MARGIN + offset :][:, :size]


def root(view: Bytes) -> Bytes:
    """The whole buffer of a view."""
    return view if view.base is None else root(view.base)


def table_of(targets: Bytes, sources: Bytes, lengths: list[int]) -> NDArray[np.int64]:
    starts = np.cumsum([0, *lengths[:-1]])
    rows = [
        [(t.ctypes.data + o, s.ctypes.data + o, n) for o, n in zip(starts, lengths, strict=True)]
        for t, s in zip(targets, sources, strict=True)
    ]
    return np.array(rows, np.int64)


@given(parts, offsets, offsets, st.booleans(), st.integers(0, 1 << 32))
def test_copies_are_equal_and_their_checksum_is_the_librarys(
    lengths: list[int], to: int, from_: int, stream: bool, seed: int
) -> None:
    size = sum(lengths)
    sources, targets = buffers(2, size, from_), buffers(2, size, to)
    sources[:] = np.random.default_rng(seed).integers(0, 256, sources.shape, np.uint8)
    before = sources.copy()
    expected = [xxh3_64_intdigest(source.tobytes()) for source in sources]
    assert checksum.copy_summed(table_of(targets, sources, lengths), stream) == expected
    assert np.array_equal(targets, before) and np.array_equal(sources, before)
    targets[:] = 255
    assert (root(targets) == 255).all(), "written beside the copy"


@given(parts, offsets, offsets, st.booleans(), st.integers(0, 1 << 32))
def test_copies_without_a_checksum_are_equal(lengths: list[int], to: int, from_: int, stream: bool, seed: int) -> None:
    sources, targets = buffers(2, sum(lengths), from_), buffers(2, sum(lengths), to)
    sources[:] = np.random.default_rng(seed).integers(0, 256, sources.shape, np.uint8)
    before = sources.copy()
    checksum.copy(table_of(targets, sources, lengths).reshape(-1, 3), stream)
    assert np.array_equal(targets, before) and np.array_equal(sources, before)
    targets[:] = 255
    assert (root(targets) == 255).all(), "written beside the copy"


@given(parts, offsets, st.integers(0, 1 << 32))
def test_nothing_is_written_where_only_the_checksum_is_asked(lengths: list[int], offset: int, seed: int) -> None:
    blocks = buffers(3, sum(lengths), offset)
    blocks[:] = np.random.default_rng(seed).integers(0, 256, blocks.shape, np.uint8)
    before = blocks.copy()
    assert checksum.copy_summed(table_of(blocks, blocks, lengths)) == [xxh3_64_intdigest(b.tobytes()) for b in before]
    assert np.array_equal(blocks, before)


@pytest.mark.parametrize("size", [SHORTEST - 1, SHORTEST, 4 * STRIPE, ROW, ROW + STRIPE, 64 * ROW, 2 << 20])
def test_sizes_at_which_the_algorithm_changes(size: int) -> None:
    source = np.arange(size, dtype=np.uint64).view(np.uint8)[None, :size]
    target = np.zeros_like(source)
    assert checksum.copy_summed(table_of(target, source, [size])) == [xxh3_64_intdigest(source.tobytes())]
    assert np.array_equal(target, source)


@pytest.mark.parametrize("length", [1 << 20, (1 << 20) + 8])
def test_long_copies_over_threads_are_equal(length: int) -> None:
    sources = np.random.default_rng(0).integers(0, 256, (16, length), np.uint8)
    assert sources.nbytes >= block_copy.SPLIT
    targets = np.zeros_like(sources)
    table = table_of(targets, sources, [length])
    block_copy.copy(table)
    assert np.array_equal(targets, sources)
    targets[:] = 0
    assert block_copy.copy_summed(table) == [xxh3_64_intdigest(source.tobytes()) for source in sources]
    assert np.array_equal(targets, sources)
