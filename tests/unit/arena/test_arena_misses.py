"""A read of a wrong location, of an altered block or of a block that is being written is a miss."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.arena.worker import block_of, get, key_of, locations, put

from raykv.arena import block_copy, header
from raykv.arena.arena import Arena
from raykv.protocol.location import ALIGN


def words_of(arena: Arena, slot: int) -> header.Words:
    """A slot's header in slab 0, as words that a test may alter."""
    first = arena._shape[1] + slot * header.HEADER_WORDS
    return arena._memory[0][first : first + header.HEADER_WORDS]


@pytest.mark.parametrize("change", ["key", "gen", "bytes", "slot", "slab not offered", "slab absent", "slot absent"])
def test_a_wrong_location_is_a_miss(arena: Arena, client: Arena, change: str) -> None:
    assert put(arena, 0, 2)
    where, key, size = locations([0], [2]), key_of(2), 64 << 10
    if change == "key":
        key = key_of(3)
    elif change == "gen":
        where["gen"] += 1
    elif change == "bytes":
        where["bytes"] = size = size - 1
    elif change == "slot":
        where["slot"] = 1
    else:
        where["slot"] = {"slot absent": 1 << 31}.get(change, 0)
        where["slab"] = {"slab not offered": 2, "slab absent": (1 << 32) - 1}.get(change, 0)
    blocks = np.zeros((1, size), np.uint8)
    assert not client.read(where, key, blocks).any()
    assert not client.read_headers(where, key)[2].any()
    if change.endswith(("offered", "absent")):
        where["gen"] += 1
        assert not client.write(where, key, blocks).any()
        assert client.sweep(where).tolist() == [1]
        with pytest.raises(ValueError, match="no slot"):
            client.views(where[:1])
    assert get(arena, 0, 2)


@pytest.mark.parametrize("word", range(7))
@pytest.mark.parametrize("value", [0, -1, 1 << 62, 12345])
def test_a_block_with_an_altered_header_is_a_miss(arena: Arena, word: int, value: int) -> None:
    """No call raises, and a block that the inventory still has is right."""
    assert put(arena, 0, 2)
    words_of(arena, 0)[word] = value
    out = np.zeros((1, 64 << 10), np.uint8)
    ok = arena.read(locations([0], [2]), key_of(2), out, verify=True)
    assert ok[0] == (word in (header.POSITION, header.STAMP))
    found = arena.inventory()
    assert len(found.ready) + len(found.writing) <= 1
    assert arena.sweep(locations([0], [2])).tolist() in ([1], [2])


def test_a_block_with_altered_bytes_is_a_miss(arena: Arena) -> None:
    assert put(arena, 0, 2) and put(arena, 1, 3)
    arena.views(locations([0], [2]))[0][40_000] ^= 1
    keys, out = np.concatenate([key_of(2), key_of(3)]), np.zeros((2, 64 << 10), np.uint8)
    assert arena.read(locations([0, 1], [2, 3]), keys, out, verify=True).tolist() == [False, True]
    assert arena.corrupt == 1


@pytest.mark.usefixtures("switching")
def test_threads_that_find_altered_blocks_count_each(arena: Arena) -> None:
    readers, times = 4, 250
    assert put(arena, 0, 2)
    arena.views(locations([0], [2]))[0][5] ^= 1

    def find(thread: int) -> None:
        out, key, wrong = np.zeros((1, 64 << 10), np.uint8), key_of(3), np.zeros(1, np.uint64)
        for gen in range(2, 2 + times):
            assert not arena.read(locations([0], [2]), key_of(2), out, verify=True).any()
            assert not arena.write(locations([1 + thread], [gen]), key, block_of(key), expected=wrong).any()

    with ThreadPoolExecutor(readers) as threads:
        list(threads.map(find, range(readers)))
    assert arena.corrupt == 2 * readers * times


def test_block_overwritten_during_the_copy(arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put(arena, 0, 2) and put(arena, 1, 3)
    original = block_copy.copy

    def copy(table: block_copy.Copies) -> None:
        original(table[:1])
        assert put(arena, 1, 4)
        original(table[1:])

    monkeypatch.setattr(block_copy, "copy", copy)
    keys, out = np.concatenate([key_of(2), key_of(3)]), np.zeros((2, 64 << 10), np.uint8)
    assert client.read(locations([0, 1], [2, 3]), keys, out).tolist() == [True, False]


def test_a_block_is_unreadable_while_it_is_written(
    arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a slot is filled, neither its old block nor its new one is read."""
    assert put(arena, 0, 2)
    original, seen = block_copy.copy_summed, []

    def write(table: block_copy.Copies) -> list[int]:
        sums = original(table)
        seen.append((get(client, 0, 2), get(client, 0, 3)))
        return sums

    monkeypatch.setattr(block_copy, "copy_summed", write)
    assert put(arena, 0, 3)
    assert seen == [(False, False)] and get(client, 0, 3)


def test_a_reader_that_is_wrong_about_the_length_is_told_from_an_altered_block(arena: Arena) -> None:
    size = 2 * ALIGN
    where, keys = locations([0, 1], [2, 3], size=size), np.concatenate([key_of(1), key_of(2)])
    assert arena.write(where, keys, np.ones((2, size), np.uint8)).all()
    for believed in (size - 1, size + 1, ALIGN, arena.slab_bytes):
        wrong = where.copy()
        wrong["bytes"] = believed
        assert not arena.read(wrong[:1], keys[:1], np.zeros((1, believed), np.uint8)).any()
        assert arena.holds_other_length(wrong, keys).all()
    assert not arena.holds_other_length(where, keys).any()
    newer, nowhere = where.copy(), where.copy()
    newer["gen"] += 1
    nowhere["slab"] = arena.slabs
    for location, key in ((newer, keys), (nowhere, keys), (wrong, keys[::-1].copy())):
        assert not arena.holds_other_length(location, key).any()
