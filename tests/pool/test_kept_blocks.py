"""Blocks that a client keeps: swapped-out blocks of preempted requests, and pinned blocks."""

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pools import BLOCK, a_cache, eventually, holds, keep, read, settled, store, tokens
from numpy.typing import NDArray

import raykv
import raykv.actors.directory.server
import raykv.client.directory_client
import raykv.client.held
import raykv.client.leases.match
import raykv.client.reservation
from raykv.client.leases.joint_match import JointMatch, Part

ROOM = 224  # blocks on each of two nodes of 64 MiB, beside the staging window


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module()


@pytest.fixture
def cache(pool: raykv.KVPool) -> raykv.KVCache:
    pool.clear()
    return pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)


def pages(seed: int, blocks: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (blocks, BLOCK), np.uint8)


def fill(cache: raykv.KVCache, seed: int) -> None:
    """Store more than the pool has room for."""
    for i in range(2 * ROOM * 2 // 64):
        store(cache, cache.keys(tokens(1000 * seed + i, 64)))


def test_a_preempted_request_comes_back_whatever_was_stored_meanwhile(cache: raykv.KVCache, pool: raykv.KVPool) -> None:
    paged = pages(1, 64)
    before = paged.copy()
    swapped = pool.stats()["num_cumulative_preemption"]
    assert cache.swap_out(paged, range(8, 48), "a").result() == 40
    assert cache.swap_out(paged, range(8), "b").result() == 8
    paged[:] = 0
    fill(cache, 1)
    assert cache.swap_in(paged, range(8), "b").result() == 8
    assert cache.swap_in(paged, range(8, 48), "a").result() == 40
    assert (paged[:48] == before[:48]).all() and not paged[48:].any()
    assert cache.swap_in(paged, range(40), "a").result() == 0, "it is back, and forgotten"
    assert pool.stats()["num_cumulative_preemption"] == swapped + 2
    eventually(lambda: settled(pool))


def test_blocks_that_come_back_are_forgotten_at_once(cache: raykv.KVCache, pool: raykv.KVPool) -> None:
    paged = pages(2, 40)
    assert cache.swap_out(paged, range(40), "a").result() == 40
    assert cache.swap_in(paged, range(40), "a").result() == 40
    eventually(lambda: pool.stats()["keys"] == 0)
    assert cache.swap_out(paged, range(40), "b").result() == 40
    cache.swap_drop("b")
    eventually(lambda: pool.stats()["keys"] == 0 and settled(pool))


def test_a_request_that_is_swapped_out_again_has_its_last_blocks(cache: raykv.KVCache, pool: raykv.KVPool) -> None:
    for seed in range(20, 30):
        cache.swap_out(pages(seed - 1, 40), range(40), "a")
        paged, back = pages(seed, 40), np.zeros((40, BLOCK), np.uint8)
        assert cache.swap_out(paged, range(40), "a").result() == 40
        assert cache.swap_in(back, range(40), "a").result() == 40 and (back == paged).all()
    eventually(lambda: pool.stats()["keys"] == pool.stats()["pinned"] == 0 and settled(pool))


def test_a_request_that_finds_no_room_is_left_to_be_computed(cache: raykv.KVCache, pool: raykv.KVPool) -> None:
    blocks = 2 * ROOM + 100
    assert cache.swap_out(pages(3, blocks), range(blocks), "big").result() == 0
    eventually(lambda: settled(pool) and pool.stats()["keys"] == 0)
    assert cache.swap_in(pages(3, blocks), range(blocks), "big").result() == 0


def test_requests_that_memory_is_too_small_for_are_demoted_and_come_back(
    start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    tiered = start(external=f"file://{tmp_path}?capacity=1GiB", secret=b"s")
    cache = tiered.cache(
        model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK, recompute_tokens_per_s=20.0
    )
    requests = {str(i): pages(10 + i, 64) for i in range(3 * ROOM // 64)}  # memory has room for two thirds
    for name, paged in requests.items():
        eventually(lambda name=name, paged=paged: cache.swap_out(paged, range(64), name).result())  # type: ignore[misc]
    assert all(value["evicted"] == 0 for value in tiered.stats()["tiers"].values())
    assert sum(value["blocks"] for value in tiered.stats()["tiers"].values()) > 0
    for name, paged in requests.items():
        back = np.zeros_like(paged)
        assert cache.swap_in(back, range(64), name).result() == 64 and (back == paged).all()
    eventually(lambda: settled(tiered) and tiered.stats()["keys"] == tiered.stats()["pinned"] == 0)


def test_bad_arguments_are_refused_before_a_byte_moves(cache: raykv.KVCache) -> None:
    paged = pages(4, 10)
    with pytest.raises(ValueError, match="block_ids from 0 to 10"):
        cache.swap_out(paged, range(11), "a")
    assert cache.swap_out(paged, range(10), "a").result() == 10
    with pytest.raises(ValueError, match="9 block_ids for request 'a', which has 10"):
        cache.swap_in(paged, range(9), "a")
    assert cache.swap_in(paged, range(10), "a").result() == 10, "nothing was lost by it"


@pytest.mark.parametrize("what", ["match", "joint match", "reservation"])
def test_what_was_dropped_unreleased_is_released(cache: raykv.KVCache, pool: raykv.KVPool, what: str) -> None:
    """Otherwise the blocks would be held until this process ends."""
    directory, memory = pool.session.directory, pool.session.memory_name
    keys, new = cache.keys(tokens(50, 9)), cache.keys(tokens(51, 4))
    keep(cache, keys)
    directory.heartbeat()
    ask: dict[str, Callable[[], Any]] = {
        "match": lambda: cache.match(keys),
        "joint match": lambda: JointMatch(pool.session, [Part(memory, keys)] * 2, 1e4).ask(computes=True),
        "reservation": lambda: cache.reserve(new),
    }
    before = directory.faults["dropped"]
    held = ask[what]()
    stats = pool.stats()
    assert stats["leases"] + stats["reservations"] == (2 if what == "joint match" else 1)
    assert stats["holders"][0]["client"] == f"{directory.client:016x}"
    del held
    gc.collect()
    eventually(lambda: not directory.held and settled(pool))
    assert pool.stats()["intents"] == 0 and directory.faults["dropped"] == before + 1
    held = ask[what]()
    held.release()
    if what == "joint match":
        held.end_intent()
    del held
    gc.collect()
    eventually(lambda: settled(pool))
    assert directory.faults["dropped"] == before + 1
    cold = JointMatch(pool.session, [Part(memory, new)], 1e4).ask(computes=True)
    assert not cold.tokens and pool.stats()["intents"] == 1
    del cold
    gc.collect()
    eventually(lambda: pool.stats()["intents"] == 0 and not directory.held)


@pytest.mark.parametrize("again", [False, True])
def test_an_ended_session_leaves_before_others_its_end_first(
    cache: raykv.KVCache, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Two sessions share a beginning. Keys go to the directory seven at a time."""
    monkeypatch.setattr(raykv.client.directory_client, "KEYS_PER_JOINT_CALL", 7)
    beginning = tokens(70, 20)
    goes, stays = (cache.keys(np.concatenate([beginning, tokens(seed, 100)])) for seed in (71, 72))
    for keys in (stays, goes):
        keep(cache, keys)
    assert cache.done(goes[20:], again=again) == 100
    for seed in range(2 * ROOM - 220 + 40):  # 40 blocks more than the pool has room for
        store(cache, cache.keys(tokens(1000 + seed, 1)))
    assert read(cache, stays).matched == 120 and 20 + 50 <= read(cache, goes).matched <= 20 + 60


def test_a_session_that_a_tool_holds_up_outlives_younger_ones(cache: raykv.KVCache) -> None:
    stays, goes = (cache.keys(tokens(seed, 100)) for seed in (81, 82))
    for keys in (stays, goes):
        keep(cache, keys)
    assert cache.touch(stays, until=time.time() + 600) == 100
    assert cache.touch(goes) == 100
    for seed in range(4 * ROOM):
        store(cache, cache.keys(tokens(1000 + seed, 1)))
    assert read(cache, stays).matched == 100 and read(cache, goes).matched == 0
    for wrong in (60, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"give a time like time.time\(\) \+ 60, not a number of seconds"):
            cache.touch(stays, until=wrong)
    assert cache.touch(stays, until=time.time() - 1) == 100, "too late, so a use like others"
    fill(cache, 9)
    assert read(cache, stays).matched == 0


def test_many_keys_are_kept_in_steps(cache: raykv.KVCache, pool: raykv.KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So other clients' calls are answered between two steps."""
    clients = raykv.client.directory_client, raykv.client.held, raykv.client.leases.match, raykv.client.reservation
    for module in (*clients, raykv.actors.directory.server):
        monkeypatch.setattr(module, "KEYS_PER_CALL", 7)
    keys = cache.keys(tokens(60, 20))
    keep(cache, keys)
    assert cache.pin(keys) == 20 and pool.stats()["pinned"] == 20
    cache.unpin(keys)
    assert pool.stats()["pinned"] == 0
    paged = pages(61, 40)
    before = paged.copy()
    assert cache.swap_out(paged, range(40), "a").result() == 40 and pool.stats()["pinned"] == 40
    paged[:] = 0
    assert cache.swap_in(paged, range(40), "a").result() == 40 and (paged == before).all()
    eventually(lambda: pool.stats()["pinned"] == 0 and pool.stats()["keys"] == 20)
    blocks = 2 * ROOM + 100
    assert cache.swap_out(pages(62, blocks), range(blocks), "big").result() == 0
    eventually(lambda: settled(pool) and pool.stats()["pinned"] == 0)


def test_what_is_pinned_stays_until_it_is_unpinned(cache: raykv.KVCache, pool: raykv.KVPool) -> None:
    keys = cache.keys(tokens(6, 20))
    keep(cache, keys)
    pinned: Any = np.concatenate([keys, cache.keys(tokens(7, 5))])
    assert cache.pin(pinned) == 20 and cache.pin(keys) == 20
    fill(cache, 6)
    assert read(cache, keys)[:3] == (20, 20, 0) and pool.stats()["pinned"] == 20
    cache.unpin(keys)
    fill(cache, 7)
    assert read(cache, keys).matched == 0 and pool.stats()["pinned"] == 0
    eventually(lambda: settled(pool))


def test_clear_forgets_what_is_pinned(cache: raykv.KVCache, pool: raykv.KVPool) -> None:
    keys = cache.keys(tokens(8, 20))
    keep(cache, keys)
    cache.pin(keys)
    pool.clear()
    assert pool.stats()["pinned"] == 0 and read(cache, keys).matched == 0
    eventually(lambda: settled(pool))


def test_nothing_is_held_for_a_client_that_asks_while_it_leaves(cache: raykv.KVCache, pool: raykv.KVPool) -> None:
    keys = cache.keys(tokens(9, 4))
    store(cache, keys)
    leaving = raykv.attach(pool.name)
    same = a_cache(leaving)
    directory = leaving.session.directory
    asks = threading.Thread(target=same.match, args=(keys,))

    def is_about_to_ask() -> bool:
        frame = sys._current_frames().get(asks.ident or 0)
        return frame is not None and frame.f_code.co_name == "_send"

    with directory.lock:
        asks.start()
        eventually(is_about_to_ask)
        leaving.close()
    asks.join()
    assert pool.stats()["leases"] == 0


def test_when_a_client_has_left_it_holds_nothing_and_has_offered_all(cache: raykv.KVCache, pool: raykv.KVPool) -> None:
    keys = cache.keys(tokens(10, 4))
    store(cache, keys)
    stored = [cache.keys(tokens(100 + turn, 1)) for turn in range(20)]
    for last in stored:
        leaving = raykv.attach(pool.name)
        same = a_cache(leaving)
        match = same.match(keys)
        assert match.num_blocks == 4 and store(same, last) == 1
        leaving.close()
        assert pool.stats()["leases"] == 0
    assert all(holds(cache, last) for last in stored)
