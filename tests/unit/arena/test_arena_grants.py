"""An arena takes each grant once, and refuses old grants and a second writer of a slot."""

import threading

import numpy as np
import pytest
from helpers.arena import worker as w
from helpers.arena.worker import GEN, block_of, get, key_of, locations, put

from raykv.arena import block_copy
from raykv.arena.arena import Arena


def test_grants_of_the_past_are_refused(arena: Arena, client: Arena) -> None:
    assert put(client, 0, 5)
    assert not put(client, 0, 4) and not put(client, 0, 5), "given away meanwhile"
    assert arena.raise_epoch(w.EPOCH + 1) and not arena.raise_epoch(w.EPOCH) and arena.raise_epoch(w.EPOCH + 1)
    assert client.epoch == w.EPOCH + 1
    assert not put(client, 0, 6) and not put(client, 1, 6), "of a past epoch"
    assert not put(client, 0, 7, slab=1), "nor does it format"
    assert get(client, 0, 5), "blocks outlive the epoch they were written in"


def test_failed_copy_is_never_ready(arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put(client, 0, 2)

    def fail(table: block_copy.Copies) -> list[int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(block_copy, "copy_summed", fail)
        put(client, 0, 3)
    assert not get(arena, 0, 2) and not get(arena, 0, 3)
    assert len(arena.inventory().writing) == len(arena.inventory().ready) == 0
    assert not put(client, 0, 2), "a grant from before"
    assert put(client, 0, 3) and get(arena, 0, 3), "another try"


def test_two_threads_of_one_process_on_one_slot(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's file locks don't keep threads apart, because threads share the open file."""
    original, inside, go_on = block_copy.copy_summed, threading.Event(), threading.Event()
    first: list[bool] = []

    def write(table: block_copy.Copies) -> list[int]:
        inside.set()
        assert go_on.wait(30)
        return original(table)

    monkeypatch.setattr(block_copy, "copy_summed", write)
    thread = threading.Thread(target=lambda: first.append(put(arena, 3, 2)))
    thread.start()
    assert inside.wait(30)
    monkeypatch.setattr(block_copy, "copy_summed", original)
    assert not put(arena, 3, 3)
    assert arena.sweep(locations([3], [3])).tolist() == [0]
    assert arena.inventory().writing["slot"].tolist() == [3]
    assert not put(arena, 40, 12, size=8 << 10, slab_gen=GEN + 10), "nor is the slab formatted under it"
    assert put(arena, 4, 4) and put(arena, 2, 5), "neighbours are free"
    assert arena.sweep(locations([3], [3])).tolist() == [0], "and leave the lock alone"
    go_on.set()
    thread.join()
    assert first == [True] and get(arena, 3, 2)


def test_close_waits_for_a_copy_under_way(arena: Arena, client: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    original = block_copy.copy_summed

    def write(table: block_copy.Copies) -> list[int]:
        client.close()
        assert arena.sweep(locations([0], [2])).tolist() == [0], "still locked"
        return original(table)

    with monkeypatch.context() as patch:
        patch.setattr(block_copy, "copy_summed", write)
        assert put(client, 0, 2)
    assert get(arena, 0, 2) and arena.sweep(locations([0], [2])).tolist() == [2]
    assert not get(client, 0, 2) and not put(client, 1, 3) and client.offered == 0


def test_one_slot_twice_in_a_batch(arena: Arena) -> None:
    keys = np.concatenate([key_of(2), key_of(3)])
    rows = np.concatenate([block_of(key_of(2)), block_of(key_of(3))])
    assert arena.write(locations([0, 0], [2, 3]), keys, rows).tolist() == [True, False]
    assert get(arena, 0, 2)
