"""Faults of a pool's own actors and nodes, under load: users see misses, and afterwards all blocks again."""

import math
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import (
    BLOCK,
    a_cache,
    both_ways_at_once,
    come_back,
    eventually,
    hurry,
    keep,
    kill,
    load,
    node_store,
    other_node,
    pid,
    read,
    served,
    settled,
    stopped,
    store,
    tokens,
    totals,
    worker,
)

import raykv
from raykv.cluster import internal_kv, named_actors
from raykv.protocol.location import LOCATION, epoch_of


@pytest.fixture
def start(start: Callable[..., raykv.KVPool]) -> Callable[..., raykv.KVPool]:
    """Pools whose directory this process calls with the short deadline of engines."""
    return lambda **settings: hurry(start(**settings))


def both_directories(pool: raykv.KVPool) -> list[int]:
    """The pids of both directories; none while there is only one directory."""
    try:
        return [pid(named_actors.find(named_actors.directory_name(pool.name, number))) for number in (1, 2)]
    except ValueError:
        return []


def on_both(pool: raykv.KVPool) -> tuple[raykv.KVCache, list[raykv.Keys], list[Any]]:
    """(cache, a prompt stored on each node, a worker on each node)."""
    cache = a_cache(pool)
    workers = [worker(pool, node_id, be_patient=False) for node_id in (pool.node_id, other_node(pool))]
    prompts = [cache.keys(tokens(100 + i, 40)) for i in range(2)]
    for there, keys in zip(workers, prompts, strict=True):
        ray.get(there.keep.remote(keys))
    return cache, prompts, workers


@pytest.mark.promise
@both_ways_at_once
def test_no_block_is_read_wrong_while_stores_and_directory_are_killed(
    start: Callable[..., raykv.KVPool], transport: str
) -> None:
    pool = start(transport=transport)
    cache, prompts, workers = on_both(pool)
    epoch = pool.stats()["epoch"]
    with load(workers, prompts=4, blocks=20):
        for part in (pool.node_id, "directory", other_node(pool)):
            kill(pool, part)
            come_back(cache, prompts)
    come_back(cache, prompts, workers)
    eventually(lambda: settled(pool), seen=pool.stats)
    assert pool.stats()["epoch"] > epoch and pool.stats()["corrupt"] == 0
    # a process that attaches now finds stores whose indices are right
    for node_id in (pool.node_id, other_node(pool)):
        newcomer = worker(pool, node_id)
        assert ray.get(newcomer.read.remote(prompts[0]))[1:3] == (40, 0)


def test_nothing_is_evicted_for_a_writer_that_is_yet_to_find_its_store(
    start: Callable[..., raykv.KVPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new directory gives the writer's node another index. The writer asks again and again by the old index."""
    pool = start()
    cache, prompts, _ = on_both(pool)
    with monkeypatch.context() as forgetful:
        forgetful.setattr(pool.session, "_looked", math.inf)  # this process does not look for its store meanwhile
        kill(pool, "directory")
        eventually(lambda: served_again(pool))
        before = pool.stats()
        for seed in range(500, 540):  # more blocks than all memory holds
            assert store(cache, cache.keys(tokens(seed, 16))) == 0
        assert pool.stats()["evicted"] == before["evicted"] and totals(pool)["quarantined"] == 0
    come_back(cache, prompts)
    keep(cache, cache.keys(tokens(500, 16)))
    eventually(lambda: settled(pool), seen=pool.stats)


def served_again(pool: raykv.KVPool) -> bool:
    """Whether another directory offers both nodes, and this process does not know its node's new index."""
    nodes = pool.stats().get("nodes", {})
    assert pool.session.local
    there = len(nodes) == 2 and all(node["state"] == "alive" for node in nodes.values())
    return there and nodes[pool.node_id]["index"] != pool.session.local.index


@both_ways_at_once
def test_blocks_survive_when_all_actors_are_killed_at_once(start: Callable[..., raykv.KVPool], transport: str) -> None:
    """Each new store takes up one of the machine's arenas, maybe the other node's. Clients find their blocks again."""
    pool = start(transport=transport)
    cache, prompts, workers = on_both(pool)
    for _ in range(2):
        kill(pool, "supervisor", "directory", pool.node_id, other_node(pool))
        come_back(cache, prompts, workers)
        keep(cache, cache.keys(tokens(200, 8)))
    ray.kill(named_actors.find_directory(pool.name))  # for good: the supervisor makes a new one
    come_back(cache, prompts, workers)
    keep(cache, cache.keys(tokens(201, 8)))
    ray.kill(node_store(pool, pool.node_id))
    far = cache.keys(tokens(202, 8))
    ray.get(workers[1].keep.remote(far))
    come_back(cache, [far, *prompts], workers)  # readers pull through the new store
    assert pool.stats()["corrupt"] == 0
    eventually(lambda: settled(pool), seen=pool.stats)


def test_another_directory_is_in_charge_though_both_hang(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    cache, prompts, _ = on_both(pool)
    epoch, processes = pool.stats()["epoch"], eventually(lambda: both_directories(pool))
    with stopped(processes[0]), stopped(processes[1]):
        eventually(lambda: pool.stats().get("epoch", 0) > epoch)
        come_back(cache, prompts)
        assert pid(named_actors.find_directory(pool.name)) not in processes


@both_ways_at_once
def test_a_stopped_directory_is_replaced_and_refused_when_it_goes_on(
    start: Callable[..., raykv.KVPool], transport: str
) -> None:
    pool = start(transport=transport)
    assert pool.session.local
    cache, prompts, workers = on_both(pool)
    old = named_actors.find_directory(pool.name)
    process, epoch = pid(old), pool.stats()["epoch"]
    late = cache.keys(tokens(300, 4))
    hold, grant = eventually(lambda: granted(pool, late))
    with stopped(process):
        with cache.match(prompts[0]) as match:  # a miss, within the deadline
            assert match.num_blocks == 0
        eventually(lambda: internal_kv.in_charge(pool.name).name != f"raykv/{pool.name}/directory-1")
        eventually(lambda: pool.stats().get("epoch", 0) > epoch)
        come_back(cache, prompts)
        eventually(lambda: pool.session.local and pool.session.local.arena.epoch > epoch)
        locations = np.frombuffer(grant.locations, LOCATION)
        assert epoch_of(int(locations["gen"][0])) == epoch
        blocks = np.zeros((4, BLOCK), np.uint8)
        assert not pool.session.local.arena.write(locations, late, blocks).any()
        directory = pool.session.directory
        eventually(lambda: directory.nodes())  # the new directory answers
        faults = dict(directory.faults)
        assert directory.commit(hold, grant.locations, late.tobytes(), b"\1" * 4) == 0
        assert directory.faults == faults, "it answered, and took none of them"
        now = pool.stats()["epoch"]
        with load(workers, prompts=4, blocks=20):
            os.kill(process, signal.SIGCONT)
            eventually(lambda: not os.path.exists(f"/proc/{process}"))
            come_back(cache, prompts)
    assert pool.stats()["epoch"] == now
    come_back(cache, prompts, workers)
    assert read(cache, late).matched == 0
    eventually(lambda: settled(pool), seen=pool.stats)


def granted(pool: raykv.KVPool, keys: raykv.Keys) -> Any:
    reservation, answer = pool.session.directory.reserve(pool.node_id, keys, 0)
    if answer is not None and len(answer.locations) == len(keys) * LOCATION.itemsize:
        return reservation, answer
    pool.session.directory.release(reservation)
    return None


def test_a_killed_supervisor_comes_back_and_a_raylet_dies_under_load(
    start: Callable[..., raykv.KVPool], third_node: Callable[[], Any], cluster: Any
) -> None:
    pool = start()
    cache = a_cache(pool)
    kill(pool, "supervisor")
    node = third_node()
    eventually(lambda: served(pool, 3))
    there = worker(pool, node.node_id)
    lost, kept = cache.keys(tokens(400, 20)), cache.keys(tokens(401, 20))  # prompts that the load does not store
    assert ray.get(there.store.remote(lost)) == 20
    keep(cache, kept)
    near = worker(pool, pool.node_id, be_patient=False)
    come_back(cache, [kept], [near])
    with load([near], prompts=4, blocks=20):
        cluster.remove_node(node, allow_graceful=False)
        eventually(lambda: pool.stats()["nodes"].get(node.node_id, {}).get("state") in (None, "suspect"))
        assert read(cache, lost).matched == 0  # the node is not offered any more
        eventually(lambda: node.node_id not in pool.stats()["nodes"])  # until Ray gives the node up
    come_back(cache, [kept], [near])
    keep(cache, lost)
    eventually(lambda: settled(pool), seen=pool.stats)
