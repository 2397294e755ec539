"""A node store that does not answer: calls that need it are misses, others go on, and it is not asked twice."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from helpers.pools import (
    BLOCK,
    come_back,
    eventually,
    node_store,
    other_node,
    payload,
    pid,
    read,
    settled,
    stopped,
    store,
    tokens,
    totals,
    worker,
)

import raykv

WAITING = 24  # reads: more than a client runs at a time


def a_cache(pool: raykv.KVPool) -> raykv.KVCache:
    return pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)


def state(pool: raykv.KVPool, node_id: str) -> str:
    return str(pool.stats()["nodes"][node_id]["state"])


def kept(pool: raykv.KVPool, cache: raykv.KVCache, node_id: str, seeds: range, blocks: int) -> list[raykv.Keys]:
    """Store prompts on one node only."""
    there = worker(pool, node_id)
    prompts = [cache.keys(tokens(seed, blocks)) for seed in seeds]
    for keys in prompts:
        ray.get(there.keep.remote(keys))
    return prompts


def pulled(pool: raykv.KVPool) -> int:
    """How many blocks this node's store has pulled."""
    return int(ray.get(node_store(pool, pool.node_id).stats.remote())["pulled"])


def test_a_reader_beside_a_stopped_store_reads_the_memory_of_its_node(start: Callable[..., raykv.KVPool]) -> None:
    """So too for blocks with a copy on another node: the reader does not fetch them through the stopped store."""
    pool = start()
    cache = a_cache(pool)
    (keys,) = kept(pool, cache, pool.node_id, range(1), 20)
    (far,) = kept(pool, cache, other_node(pool), range(1, 2), 20)
    there = worker(pool, other_node(pool))
    eventually(lambda: ray.get(there.holds.remote(keys)))
    with stopped(pid(node_store(pool, pool.node_id))):
        eventually(lambda: state(pool, pool.node_id) == "suspect")
        for _ in range(3):
            assert read(cache, keys) == (20, 20, 0, [pool.node_id])
        assert read(cache, far).matched == 0
    come_back(cache, [keys, far])
    eventually(lambda: settled(pool))


def test_a_store_that_was_late_is_not_asked_again_until_it_answers(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    cache = a_cache(pool)
    far = kept(pool, cache, other_node(pool), range(6), 1)
    out = np.zeros((1, BLOCK), np.uint8)
    matches = [cache.match(keys) for keys in far[:5]]
    assert [match.num_blocks for match in matches] == [1] * 5
    before = pulled(pool)
    with stopped(pid(node_store(pool, pool.node_id))):
        assert [match.read(out) for match in matches] == [0] * 5
        assert pool.session.directory.faults["silent"] == 4
        with cache.match(far[5]) as match:
            assert match.num_blocks == 0
    # When the stopped store goes on, it first does what it was asked before.
    eventually(lambda: pulled(pool) - before == 1)
    for match in matches:
        match.release()
    come_back(cache, far[5:])
    assert pulled(pool) - before == 2
    come_back(cache, far)
    eventually(lambda: settled(pool))


def test_a_node_that_was_late_is_left_alone(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    cache = a_cache(pool)
    far = kept(pool, cache, other_node(pool), range(5), 1)
    near = kept(pool, cache, pool.node_id, range(100, 101), 8)[0]
    out = np.zeros((1, BLOCK), np.uint8)
    matches = [cache.match(keys) for keys in far]
    assert [match.num_blocks for match in matches] == [1] * 5
    with stopped(pid(node_store(pool, other_node(pool)))):
        assert [match.read(out) for match in matches] == [0] * 5
        assert pool.session.directory.faults["silent"] == 4
        assert read(cache, near)[:3] == (8, 8, 0)
    for match in matches:
        match.release()
    come_back(cache, [near, *far])
    eventually(lambda: settled(pool))


def test_blocks_for_a_node_that_was_late_cost_no_slots_there(start: Callable[..., raykv.KVPool]) -> None:
    """Only the slots of the one call that the store got are quarantined: that call may still write there."""
    pool = start()
    cache = a_cache(pool)
    (full,) = kept(pool, cache, pool.node_id, range(100, 101), 224)  # fills the node except its staging window
    with stopped(pid(node_store(pool, other_node(pool)))):
        assert [store(cache, cache.keys(tokens(seed, 1))) for seed in range(5)] == [0] * 5
        assert pool.session.directory.faults["silent"] == 4
        assert totals(pool)["quarantined"] == 1
    come_back(cache, [full])
    eventually(lambda: settled(pool))


def test_async_callers_do_not_queue_behind_a_stopped_store(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    cache = a_cache(pool)
    far = kept(pool, cache, other_node(pool), range(WAITING), 1)
    near = kept(pool, cache, pool.node_id, range(100, 101), 8)[0]
    new = cache.keys(tokens(101, 8))
    reading = cache.match(near)
    matches = [cache.match(keys) for keys in far]
    assert [match.num_blocks for match in matches] == [1] * WAITING

    async def read_near() -> int:
        async with cache.amatch(near) as match:
            return await match.aread(np.zeros((8, BLOCK), np.uint8))

    async def go() -> tuple[list[Any], list[Any]]:
        rows = np.zeros((WAITING, 1, BLOCK), np.uint8)
        waiting = [asyncio.ensure_future(match.aread(row)) for match, row in zip(matches, rows, strict=True)]
        await asyncio.sleep(0)  # so all reads have been submitted
        others = [
            read_near(),
            reading.aread(np.zeros((8, BLOCK), np.uint8)),
            cache.astore(new, payload(new, BLOCK)),
        ]
        done = await asyncio.gather(*others)
        assert not any(task.done() for task in waiting), "what needs another was served first"
        return done, await asyncio.gather(*waiting)

    with stopped(pid(node_store(pool, pool.node_id))):
        done, late = asyncio.run(go())
    assert done[:2] == [8, 8]
    assert late == [0] * WAITING
    for match in (reading, *matches):
        match.release()
    come_back(cache, [near, *far])
    eventually(lambda: settled(pool))
