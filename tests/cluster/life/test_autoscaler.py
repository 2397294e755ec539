"""A pool in a cluster that Ray's autoscaler makes larger and smaller."""

import subprocess
import sys
import time
from typing import Any

import pytest
import ray
from helpers.cluster.fake_cloud import autoscaled
from helpers.pools import BLOCK, MIB, PATIENCE_S, Worker, eventually, holds, kill, locations, served, shm_files, tokens

import raykv
from raykv import cluster
from raykv.cluster import internal_kv


class Engine(Worker):
    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


@pytest.mark.parametrize("v2", [False, True], ids=["autoscaler v1", "autoscaler v2"])
def test_a_node_that_only_the_pool_keeps_busy_is_taken_away(v2: bool) -> None:
    with autoscaled(v2) as address:
        subprocess.run([sys.executable, "-m", "test_autoscaler", address], check=True, timeout=280)


def main(address: str) -> None:
    """The test's program, a driver of the autoscaled cluster."""

    def joined() -> bool:
        try:
            ray.init(address, log_to_driver=False)
        except ConnectionError:
            time.sleep(0.5)
        return ray.is_initialized()

    eventually(joined)
    pool = raykv.start(raykv.PoolConfig("scaled", 64 * MIB, deadline=PATIENCE_S, idle_node_s=2.0))
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
    head = pool.node_id

    def with_engine(seed: int) -> tuple[str, raykv.Keys]:
        """Have an engine on a node of its own store 20 blocks, and end. Returns (node id, keys)."""
        keys = cache.keys(tokens(seed, 20))
        engine: Any = ray.remote(Engine).options(num_cpus=2).remote(pool.name)
        node_id: str = ray.get(engine.node_id.remote())
        assert node_id != head
        eventually(lambda: served(pool, len(cluster.living())))
        ray.get(engine.keep.remote(keys))
        assert set(locations(pool, cache, keys)["node"]) == {pool.stats()["nodes"][node_id]["index"]}
        ray.kill(engine)
        return node_id, keys

    first, keys = with_engine(1)
    eventually(lambda: first not in cluster.living())
    assert holds(cache, keys), "the head has them now"
    eventually(lambda: pool.stats()["nodes"].keys() == {head} and not internal_kv.idle_nodes(pool.name))

    second, keys = with_engine(2)
    assert second != first
    eventually(lambda: internal_kv.left_nodes(pool.name) == {second})
    again, more = with_engine(3)  # before Ray takes the node away
    assert again == second and holds(cache, keys) and holds(cache, more)
    eventually(lambda: internal_kv.left_nodes(pool.name) == {second})
    kill(pool, "supervisor")  # a new supervisor reads from Ray's KV what this one did
    eventually(lambda: cluster.living() == {head})
    assert holds(cache, keys) and holds(cache, more)
    pool.stop()
    assert not shm_files(pool.name)


if __name__ == "__main__":
    main(sys.argv[1])
