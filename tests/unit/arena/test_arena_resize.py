"""An arena gives slabs back, and takes them up again."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.arena import worker as w
from helpers.arena.worker import (
    GEN,
    PRINT,
    SLAB,
    Child,
    at_step,
    block_of,
    die_here,
    get,
    key_of,
    locations,
    put,
    stop_here,
)

from raykv.arena import block_copy
from raykv.arena.arena import Arena, open_own

NEWER = GEN + 1000  # newer than all grants before


@pytest.fixture
def arena(path: str) -> Iterator[Arena]:
    """The owner's arena of eight slabs, three of them offered, with epoch 1."""
    arena = Arena.create(path, PRINT, SLAB, 8)
    assert all(arena.offer_next() for _ in range(3))
    arena.raise_epoch(w.EPOCH)
    yield arena
    arena.close(unlink=True)


def shed(arena: Arena, slab: int, generation: int = NEWER) -> bool:
    """Give a slab back, and discard its memory at once."""
    given_back = arena.give_back(slab, generation)
    arena.discard(slab)
    return given_back


def taken(path: str) -> int:
    return os.stat(path).st_blocks * 512


def test_a_slab_is_given_back_discarded_and_offered_again(arena: Arena, client: Arena, path: str) -> None:
    assert put(client, 0, 2) and put(client, 0, 3, slab=1) and put(client, 0, 4, slab=2)
    before = taken(path)
    assert arena.give_back(1, NEWER) and taken(path) == before and arena.refilled() == [1]
    arena.discard(1)
    assert taken(path) == before - SLAB - SLAB // 64 and arena.refilled() == [], "slots and headers"
    assert (arena.offered, arena.available, arena.given_back()) == (3, 2, [1]) == (3, client.available, [1])
    assert get(client, 0, 2) and get(client, 0, 4, slab=2)
    assert not get(client, 0, 3, slab=1) and not client.read_headers(locations([0], [3], slab=1), key_of(3))[2].any()
    assert {*client.inventory().ready["slab"].tolist()} == {0, 2}
    assert not arena.give_back(1, NEWER), "it was"
    assert arena.offer_next() and taken(path) == before
    assert (arena.offered, arena.available, arena.given_back()) == (3, 3, [])
    assert not get(client, 0, 3, slab=1), "nothing is left of it"
    assert put(client, 0, 2000, slab=1, slab_gen=NEWER + 1) and get(arena, 0, 2000, slab=1, slab_gen=NEWER + 1)
    assert arena.offer_next() and arena.offered == 4, "then those that never were offered"


def test_any_slab_and_all_slabs_can_be_given_back(arena: Arena, client: Arena, path: str) -> None:
    empty = taken(path) - 3 * (SLAB + SLAB // 64)
    assert all(shed(arena, slab) for slab in (0, 2, 1))
    assert arena.available == 0 and taken(path) == empty
    assert not put(client, 0, 2) and len(client.inventory().ready) == 0
    assert arena.offer_next() and arena.given_back() == [1, 2]


def test_slabs_that_cannot_be_given_back(arena: Arena) -> None:
    assert put(arena, 0, 2)
    assert not arena.give_back(3, NEWER) and not arena.give_back(-1, NEWER), "not offered"
    assert not arena.give_back(0, GEN + 1), "grants of the format that it has may be out"
    arena.raise_epoch(w.EPOCH + 1)
    assert not arena.give_back(0, NEWER), "a directory of the past"
    assert get(arena, 0, 2) and arena.available == 3


def test_late_writers_are_refused_and_take_no_memory(arena: Arena, client: Arena, path: str) -> None:
    assert put(client, 0, 2, slab=1)
    stranger = Arena.attach(path, arena.nonce)  # has not touched the slab before
    assert shed(arena, 1)
    left = taken(path)
    for late in (client, stranger):
        assert not put(late, 1, 3, slab=1), "of the format before"
        assert not put(late, 1, 2000, slab=1, slab_gen=NEWER + 1), "nobody should have been sent there"
        late.populate()
        assert late.sweep(locations([1], [3], slab=1)).tolist() == [1]
        with pytest.raises(ValueError, match="no slot"):
            late.views(locations([0], [2], slab=1))
    assert taken(path) == left
    assert arena.offer_next()
    assert not put(client, 1, 3, slab=1), "nor once it is there again"
    stranger.close()


@pytest.mark.parametrize("step", ["before lock", "locked", "writing", "copied"])
def test_writer_stopped_in_the_middle(arena: Arena, step: str) -> None:
    """The slab stays while the writer may still write there."""
    assert put(arena, 0, 2, slab=1)

    def write(client: Arena) -> bool:
        at_step(step, stop_here)
        return put(client, 1, 3, slab=1)

    child = Child(arena, write)
    child.wait_stopped()
    gone = arena.give_back(1, NEWER)
    assert gone == (step == "before lock")
    child.resume()
    assert child.result() is not gone
    assert get(arena, 1, 3, slab=1) is not gone
    assert gone or arena.give_back(1, NEWER)
    assert not get(arena, 1, 3, slab=1)


def test_reader_in_the_middle_of_a_copy(arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader copies zeros, or the slab's next blocks, and then notices that the header has changed."""
    assert put(arena, 0, 2, slab=1) and put(arena, 0, 3)
    where = locations([0, 0], [2, 3])
    where["slab"] = [1, 0]
    keys, rows = np.concatenate([key_of(2), key_of(3)]), np.zeros((2, 64 << 10), np.uint8)
    original = block_copy.copy

    def copy(table: block_copy.Copies) -> None:
        assert shed(arena, 1)
        original(table)

    with monkeypatch.context() as patch:
        patch.setattr(block_copy, "copy", copy)
        assert client.read(where, keys, rows).tolist() == [False, True]
    assert np.array_equal(rows[1:], block_of(key_of(3)))
    assert arena.offer_next() and put(arena, 0, 2000, slab=1, slab_gen=NEWER + 1)

    def copy_again(table: block_copy.Copies) -> None:
        assert shed(arena, 1, NEWER + 5000) and arena.offer_next()
        assert put(arena, 0, 9000, slab=1, slab_gen=NEWER + 6000)
        original(table)

    monkeypatch.setattr(block_copy, "copy", copy_again)
    assert not get(client, 0, 2000, slab=1, slab_gen=NEWER + 1)


def test_headers_are_cleared_before_the_payload_is_discarded(
    arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a reader that still copies right bytes already knows that they are about to go."""
    sizes = {"size": 8 << 10, "slab": 1}
    slots = (0, 1, 77, SLAB // (8 << 10) - 1)
    assert all(put(arena, slot, 2 + slot, **sizes) for slot in slots)
    original = block_copy.copy

    def copy(table: block_copy.Copies) -> None:
        arena.give_back(1, NEWER)
        original(table)

    monkeypatch.setattr(block_copy, "copy", copy)
    where, keys = locations(slots, [2 + slot for slot in slots], **sizes), [key_of(2 + slot) for slot in slots]
    rows = np.zeros((len(slots), 8 << 10), np.uint8)
    assert not client.read(where, np.concatenate(keys), rows).any() and rows.any()


def test_reader_of_another_process_in_the_middle_of_a_copy(arena: Arena) -> None:
    assert put(arena, 0, 2, slab=1)

    def read(client: Arena) -> bool:
        original = block_copy.copy

        def copy(table: Any) -> None:
            stop_here()
            original(table)

        block_copy.copy = copy
        return get(client, 0, 2, slab=1)

    child = Child(arena, read)
    child.wait_stopped()
    assert shed(arena, 1)
    child.resume()
    assert child.result() is False


def test_a_restarted_store_knows_the_slabs_that_were_given_back(arena: Arena, client: Arena, path: str) -> None:
    assert put(client, 0, 2) and put(client, 0, 3, slab=1)
    assert shed(arena, 1)
    left = taken(path)
    arena.close()
    again = Arena.adopt(path, PRINT, SLAB, 8)
    assert again and (again.available, again.given_back()) == (2, [1]) and taken(path) == left
    assert again.inventory().ready["slab"].tolist() == [0] and get(client, 0, 2)
    assert again.offer_next() and put(client, 0, 2000, slab=1, slab_gen=NEWER + 1)
    again.close()


def test_owner_that_died_while_it_gave_back(arena: Arena, path: str) -> None:
    """The memory of marked slabs is still there when the next store adopts the arena, as a reader may use it."""
    assert put(arena, 0, 2, slab=1)
    before = taken(path)

    def die(client: Arena) -> None:
        client.give_back(1, NEWER)
        die_here()

    child = Child(arena, die)
    with pytest.raises(EOFError):
        child.result()
    assert arena.given_back() == [1] and taken(path) == before
    arena.close()
    again = Arena.adopt(path, PRINT, SLAB, 8)
    assert again and again.given_back() == again.refilled() == [1] and taken(path) == before
    again.discard(1)
    assert taken(path) < before - SLAB
    again.close()


def test_owner_that_died_before_it_offered_what_it_had_allocated(arena: Arena, path: str) -> None:
    before = taken(path)
    os.posix_fallocate(arena._locks.fd, *arena._payload(3))
    arena.close()
    again = Arena.adopt(path, PRINT, SLAB, 8)
    assert again and again.offered == 3 and taken(path) == before
    again.close()


def test_a_slab_that_is_offered_again_keeps_its_memory(arena: Arena, client: Arena) -> None:
    assert arena.give_back(1, NEWER) and arena.offer_next()
    assert put(client, 0, 2000, slab=1, slab_gen=NEWER + 1)
    arena.discard(1)
    assert get(client, 0, 2000, slab=1, slab_gen=NEWER + 1)


@pytest.mark.parametrize("part", ["slots", "headers"])
def test_a_slab_that_is_read_after_its_discard_is_refilled(arena: Arena, client: Arena, path: str, part: str) -> None:
    assert shed(arena, 1) and shed(arena, 2)
    left = taken(path)
    words, data = client._memory
    if part == "slots":
        client._populate(data, {1})
    else:
        assert words[client._headers(1)[0] // 8] == 0
    assert taken(path) > left and arena.refilled() == [1]
    arena.discard(1)
    assert taken(path) == left and arena.refilled() == []


def test_an_arena_is_laid_out_for_more_than_it_asks_for() -> None:
    pool, asked = f"testresize{os.getpid()}", list[int]()
    arena = open_own(pool, PRINT, SLAB, 4000, asked.append, limit=2)
    try:
        assert 2 * SLAB < asked[0] < 3 * SLAB
        assert os.stat(arena.path).st_size > 4000 * SLAB and taken(arena.path) < SLAB
    finally:
        arena.close(unlink=True)


def test_a_closed_arena_offers_and_gives_back_nothing(arena: Arena) -> None:
    arena.close()
    assert (arena.available, arena.given_back()) == (0, [])
    assert not arena.give_back(0, NEWER) and not arena.offer_next()
