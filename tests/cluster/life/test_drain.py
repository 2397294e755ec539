"""A node that leaves: blocks that only it had get copies elsewhere before it is gone."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.pools import BLOCK, MIB, Worker, eventually, keep, kill, load, other_node, read, store, tokens, worker

import raykv
from raykv.cluster import named_actors

Start = Callable[..., raykv.KVPool]


def cache_of(pool: raykv.KVPool) -> raykv.KVCache:
    return pool.cache(
        model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK, recompute_tokens_per_s=100
    )


def keep_there(pool: raykv.KVPool, node_id: str, seed: int) -> list[raykv.Keys]:
    """Prompts whose blocks only that node has."""
    there = worker(pool, node_id, Worker)
    prompts = [cache_of(pool).keys(tokens(seed + i, 50)) for i in range(4)]
    ray.get([there.keep.remote(keys) for keys in prompts])
    return prompts


def notice(cluster: Any, node_id: str) -> None:
    command = ["drain-node", "--address", cluster.address, "--node-id", node_id, "--reason-message", "disconnect"]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "600"]
    subprocess.run([Path(sys.executable).with_name("ray"), *command], check=True, capture_output=True, timeout=60)


def state(pool: raykv.KVPool, node_id: str) -> str | None:
    """The node's state; None if the directory does not answer or does not know the node."""
    return pool.stats().get("nodes", {}).get(node_id, {}).get("state")  # type: ignore[no-any-return]


def left(pool: raykv.KVPool, node_id: str) -> int:
    """How many blocks would be lost with a node."""
    answer = ray.get(named_actors.find_directory(pool.name).sole_copies.remote(node_id), timeout=10)
    return 1 if answer is None else int(answer[2])


@pytest.mark.promise
def test_blocks_that_only_a_leaving_node_had_are_readable_after_it_is_gone(
    cluster: Any, start: Start, third_node: Callable[[], Any], tmp_path: Path
) -> None:
    leaving = third_node()
    staying = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != leaving.node_id]
    roomy = start(cpu_memory=128 * MIB)
    tiered = start(external=f"file://{tmp_path}?capacity=1GiB&shared=1", secret=b"s")
    for i in range(10):  # fill the other nodes: blocks of the leaving node can go only to the tier
        store(cache_of(tiered), cache_of(tiered).keys(tokens(300 + i, 50)))
    prompts = {pool: keep_there(pool, leaving.node_id, 400) for pool in (roomy, tiered)}
    read(cache_of(roomy), prompts[roomy][0])  # makes replicas elsewhere, whose slots the load may take
    with load([worker(roomy, node_id) for node_id in staying], prompts=6, blocks=40):
        with pytest.raises(ValueError, match="not a living node"):
            roomy.drain("no-such-node")
        assert roomy.drain(leaving.node_id, deadline=60.0) == 0
        there = worker(roomy, leaving.node_id)
        assert not ray.get(there.store.remote(cache_of(roomy).keys(tokens(999, 5)))), "nothing new goes there"
        kill(roomy, "directory")  # the new directory learns which node leaves
        eventually(lambda: state(roomy, leaving.node_id) == "leaving")
        roomy.cancel_drain(leaving.node_id)
        eventually(lambda: state(roomy, leaving.node_id) == "alive")
        kill(roomy, "directory")  # and the next one that the node stays
        eventually(lambda: state(roomy, leaving.node_id) == "alive")
        eventually(lambda: ray.get(there.store.remote(cache_of(roomy).keys(tokens(998, 5)))) == 5)
        assert roomy.drain(leaving.node_id, deadline=60.0) == 0
        ray.kill(there)
        notice(cluster, leaving.node_id)  # the other pool's supervisor drains the node by itself
        eventually(lambda: state(tiered, leaving.node_id) == "leaving" and not left(tiered, leaving.node_id))

        cluster.remove_node(leaving, allow_graceful=False)
        for pool in (roomy, tiered):
            for keys in prompts[pool]:
                eventually(lambda pool=pool, keys=keys: read(cache_of(pool), keys)[:3] == (50, 50, 0))  # type: ignore[misc]


def test_the_last_node_that_takes_blocks_is_drained_by_force_alone(start: Start) -> None:
    pool = start()
    cache, (first, last) = cache_of(pool), (other_node(pool), pool.node_id)
    keep(cache, cache.keys(tokens(1, 5)))
    assert pool.drain(first) == 0
    with pytest.raises(ValueError, match=f"node {last[:8]} is the last one .*--force"):
        pool.drain(last)
    assert store(cache, cache.keys(tokens(2, 5))) == 5, "it was not begun"
    assert pool.drain(last, deadline=1.0, force=True) == 10, "nobody takes them"
    assert store(cache, cache.keys(tokens(3, 5))) == 0
    assert pool.session.directory.faults["refused"] and pool.stats()["refused"] >= 5
    for node_id in (first, last):
        pool.cancel_drain(node_id)
    eventually(lambda: {state(pool, node_id) for node_id in (first, last)} == {"alive"})
    keep(cache, cache.keys(tokens(3, 5)))


def test_what_ray_itself_drains_does_not_stay(cluster: Any, start: Start, third_node: Callable[[], Any]) -> None:
    leaving = third_node()
    pool = start()
    notice(cluster, leaving.node_id)
    eventually(lambda: state(pool, leaving.node_id) == "leaving")
    with pytest.raises(ValueError, match=r"Ray says that node .* is about to leave"):
        pool.cancel_drain(leaving.node_id)
    cluster.remove_node(leaving, allow_graceful=False)
