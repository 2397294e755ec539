"""Faults of a pool's clients and memory: a test for each row of the table in docs/reliability.md."""

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import (
    BLOCK,
    TRANSPORTS,
    Worker,
    a_cache,
    both_ways_at_once,
    eventually,
    holds,
    keep,
    locations,
    node_store,
    other_node,
    pid,
    read,
    settled,
    store,
    tokens,
    totals,
    worker,
)
from ray.exceptions import RayError

import raykv
from raykv.arena import block_copy, header, superblock
from raykv.keys import Keys

WHEN = ("granted", "half copied", "written")
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Unlucky(Worker):
    """An engine that sends itself a signal in the middle of a store."""

    def __init__(self, pool: str, when: str, what: str) -> None:
        super().__init__(pool)
        self.when, self.signal = when, SIGNALS[what]

    def strike(self) -> None:
        os.kill(os.getpid(), self.signal)

    def store_and_suffer(self, keys: Keys) -> int:
        assert self.pool.session.local
        arena, directory = self.pool.session.local.arena, self.pool.session.directory
        write, commit, copy = arena.write, directory.commit, block_copy.copy_summed

        def write_later(*args: Any) -> Any:
            self.strike()
            return write(*args)

        def copy_half(table: block_copy.Copies) -> Any:
            half = table.copy()
            half[..., 2] //= 2
            block_copy.copy(half)
            self.strike()
            return copy(table)

        def commit_later(*args: Any) -> int:
            self.strike()
            return commit(*args)

        if self.when == "granted":
            arena.write = write_later  # type: ignore[assignment,method-assign]
        elif self.when == "half copied":
            block_copy.copy_summed = copy_half
        else:
            directory.commit = commit_later  # type: ignore[assignment,method-assign]
        return self.store(keys)


def fill(pool: raykv.KVPool, cache: raykv.KVCache, seed: int) -> None:
    """Store until every slot has been granted again."""
    slots = totals(pool)["slots"]
    goal = pool.stats()["evicted"] + 3 * slots
    for i in range(10_000):
        store(cache, cache.keys(tokens(seed + i, 16)))
        if pool.stats().get("evicted", 0) > goal:
            return
    raise AssertionError(f"{pool.stats()} after 10,000 prompts")


@both_ways_at_once
def test_a_killed_writer_leaves_whole_blocks_or_none(start: Callable[..., raykv.KVPool], transport: str) -> None:
    pool = start(transport=transport)
    cache = a_cache(pool)
    victims = [worker(pool, other_node(pool), Unlucky, when=when, what="killed") for when in WHEN]
    prompts = [cache.keys(tokens(i, 8)) for i in range(len(WHEN))]
    for victim, keys in zip(victims, prompts, strict=True):
        with pytest.raises(RayError):
            ray.get(victim.store_and_suffer.remote(keys))
    eventually(lambda: settled(pool))
    found = [read(cache, keys, verify=True) for keys in prompts]
    assert [reading.wrong for reading in found] == [0, 0, 0]
    assert [reading.read for reading in found] == [0, 0, 8]  # whole blocks survive the death of their writer
    for keys in prompts:
        keep(cache, keys)


def test_leases_of_a_killed_reader_are_released(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 100))
    keep(cache, keys)
    reader = worker(pool, other_node(pool))
    assert ray.get(reader.lease.remote(keys)) == 100
    eventually(lambda: totals(pool).get("staging", 0) > 0 and pool.stats()["leases"] == 1)
    process, lookups = ray.get(reader.pid.remote()), pool.stats()["lookups"]
    reading = reader.churn.remote(60.0, seed=1, prompts=2, blocks=100)
    eventually(lambda: pool.stats()["lookups"] > lookups)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RayError):
        ray.get(reading)
    eventually(lambda: settled(pool))
    assert holds(cache, keys)


@both_ways_at_once
def test_a_stopped_writer_never_writes_into_a_slot_that_was_given_away(
    start: Callable[..., raykv.KVPool], transport: str
) -> None:
    """Writers stand still until their reservations have ended and all slots that can be granted again were."""
    pool = start(transport=transport, cpu_memory=16 << 20)
    cache = a_cache(pool)
    victims = [worker(pool, pool.node_id, Unlucky, when=when, what="stopped") for when in WHEN]
    pids = ray.get([victim.pid.remote() for victim in victims])
    prompts = [cache.keys(tokens(i, 8)) for i in range(len(WHEN))]
    storing = [victim.store_and_suffer.remote(keys) for victim, keys in zip(victims, prompts, strict=True)]
    try:
        eventually(lambda: all(map(stopped, pids)))
        eventually(lambda: totals(pool)["writing"] == 0 and pool.stats()["reservations"] == 0)
        eventually(lambda: totals(pool)["quarantined"] == 8)  # slots that one stopped writer has locked
        fill(pool, cache, 1000)
        assert totals(pool)["quarantined"] == 8
    finally:
        for process in pids:
            os.kill(process, signal.SIGCONT)
    assert ray.get(storing[0]) == 0
    assert ray.get(victims[0].faults.remote())["write"] == 1  # its slots were granted again: its write was refused
    ray.get(storing)
    eventually(lambda: settled(pool))
    latest = [cache.keys(tokens(seed, 16)) for seed in range(1000, 1200)]
    found = [read(cache, keys, verify=True) for keys in [*prompts, *latest]]
    assert sum(reading.wrong for reading in found) == 0
    assert sum(reading.read for reading in found) > 0
    assert pool.stats()["corrupt"] == 0


def stopped(process: int) -> bool:
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def test_a_stopped_reader_reads_nothing_wrong_when_it_goes_on(start: Callable[..., raykv.KVPool]) -> None:
    """Its lease ends, and its blocks are evicted. Its read notices that."""
    pool = start(cpu_memory=16 << 20)
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 8))
    keep(cache, keys)
    reader = worker(pool, pool.node_id, Dozing)
    process = ray.get(reader.pid.remote())
    reading = reader.read_late.remote(keys)
    try:
        eventually(lambda: stopped(process))
        eventually(lambda: pool.stats()["leases"] == 0)
        fill(pool, cache, 1000)
    finally:
        os.kill(process, signal.SIGCONT)
    matched, count, wrong = ray.get(reading)
    assert (matched, wrong) == (8, 0) and count < 8
    eventually(lambda: settled(pool))
    assert pool.stats()["corrupt"] == 0


class Dozing(Worker):
    """An engine that is stopped between match and read."""

    def read_late(self, keys: Keys) -> tuple[int, int, int]:
        assert self.pool.session.local
        arena = self.pool.session.local.arena
        read_now = arena.read

        def read_late(*args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return read_now(*args)

        arena.read = read_late  # type: ignore[assignment,method-assign]
        return self.read(keys)[:3]


def alter(pool: raykv.KVPool, location: np.void, payload: bool) -> None:
    """Flip a bit of a block of this node, in its payload or its header's key, as a stray write would."""
    assert pool.session.local
    arena = pool.session.local.arena
    first, start, size = superblock.layout(arena.slab_bytes, arena.slabs)
    stride = -(-int(location["bytes"]) // 4096) * 4096
    if payload:
        at = (
            start
            + int(location["slab"]) * arena.slab_bytes
            + int(location["slot"]) * stride
            + int(location["bytes"]) // 2
        )
    else:
        slot = int(location["slab"]) * (arena.slab_bytes // 4096) + int(location["slot"])
        at = first + 8 * (slot * header.HEADER_WORDS + header.KEY)
    assert at < size
    with open(arena.path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module", params=TRANSPORTS)
def altered(start_for_module: Callable[..., raykv.KVPool], request: Any) -> tuple[raykv.KVPool, Any]:
    pool = start_for_module(transport=request.param)
    return pool, worker(pool, other_node(pool))


@pytest.mark.parametrize("payload", [False, True], ids=["header", "payload"])
@pytest.mark.parametrize("reader", ["here", "there"])
def test_an_altered_block_is_a_miss_and_is_not_offered_again(
    altered: tuple[raykv.KVPool, Any], payload: bool, reader: str
) -> None:
    pool, there = altered
    cache = a_cache(pool)
    pool.clear()
    keys = cache.keys(tokens(1, 10))
    keep(cache, keys)
    before, arrivals = pool.stats()["corrupt"], node_store(pool, other_node(pool)).stats
    arrived = ray.get(arrivals.remote())["corrupt"]
    alter(pool, locations(pool, cache, keys)[6], payload)
    if reader == "here":
        found = read(cache, keys, verify=payload)
    else:
        found = ray.get(there.read.remote(keys))
        assert ray.get(arrivals.remote())["corrupt"] - arrived == int(payload)
    mine, theirs = pool.session.directory.faults, ray.get(there.faults.remote())
    faults = mine["read"] if reader == "here" else theirs["pull"]
    assert found[:3] == (10, 6, 0) and faults
    eventually(lambda: pool.stats()["corrupt"] - before == 1)
    assert read(cache, keys).matched == 6  # the altered block is not offered again
    keep(cache, keys)  # the block can be stored again
    eventually(lambda: settled(pool))


class Engine(Worker):
    def swap_out(self, blocks: int) -> int:
        paged = np.ones((blocks, BLOCK), np.uint8)
        return self.cache().swap_out(paged, range(blocks), "r").result()

    def ping(self) -> int:
        return os.getpid()


def test_swapped_blocks_of_a_dead_engine_are_released(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    engine: Any = worker(pool, pool.node_id, Engine)
    assert ray.get(engine.swap_out.remote(100)) == 100
    assert pool.stats()["pinned"] == 100
    os.kill(pid(engine), signal.SIGKILL)
    eventually(lambda: settled(pool) and pool.stats()["pinned"] == pool.stats()["keys"] == 0)
