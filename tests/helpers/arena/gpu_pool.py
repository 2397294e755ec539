"""A pool with a GPU tier in a Ray cluster of its own: the program of test_gpu_pool.py, on CuPy or on the stand-in."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

import raykv
from helpers.pools import (
    BLOCK,
    PATIENCE_S,
    Reading,
    Worker,
    eventually,
    kill,
    other_node,
    payload,
    shm_files,
    store,
    tokens,
    worker,
)
from raykv.arena.gpu import cuda
from raykv.arena.gpu_arena import GpuArena
from raykv.bench.testbed import local_cluster

MIB = 1 << 20
CPU, GPU = 64 * MIB, 24 * MIB
FAR = "nccl" if "cupy_on_host" in cuda.cupy().__file__ else "tcp"  # NCCL refuses two ranks on one real GPU
Keys = raykv.Keys


class Engine(Worker):
    """An engine whose KV is on a GPU."""

    def __init__(self, pool: str) -> None:
        self.pool = raykv.attach(pool, device=0)

    def store(self, keys: Keys, **cache: Any) -> int:
        return self.cache(**cache).store(keys, cuda.cupy().asarray(payload(keys, BLOCK)))

    def read(self, keys: Keys, **cache: Any) -> Reading:
        with self.cache(**cache).match(keys) as match:
            out = cuda.cupy().zeros((max(1, match.num_blocks), BLOCK), cuda.cupy().uint8)
            n = match.read(out)
            wrong = int((out.get()[:n] != payload(keys[:n], BLOCK)).any(axis=1).sum())
            return Reading(match.num_blocks, n, wrong, match.nodes)

    def where(self) -> tuple[str, bool]:
        assert self.pool.session.local
        return self.pool.session.memory_name, isinstance(self.pool.session.local.arena, GpuArena)

    def look_again(self) -> None:
        """Look for the node's store, as after a directory's takeover."""
        self.pool.session._renew()

    def maps(self) -> bool:
        """Whether this process has a store's GPU memory open."""
        assert self.pool.session.local
        return bool(len(self.pool.session.local.arena._memory[1]))


class World:
    def __init__(self, pool: raykv.KVPool) -> None:
        self.pool = pool
        self.cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
        self.engine = worker(pool, pool.node_id, Engine)
        self.far = worker(pool, other_node(pool), Engine)
        eventually(lambda: self.serves(2))

    def serves(self, nodes: int) -> bool:
        states = [(node["tier"], node["state"]) for node in self.pool.stats().get("nodes", {}).values()]
        return states.count(("cpu", "alive")) == nodes and states.count(("gpu", "alive")) == nodes

    def keys(self, seed: int, blocks: int) -> Keys:
        return self.cache.keys(tokens(seed, blocks))

    def counts(self) -> dict[str, int]:
        stats = self.pool.stats()
        return {name: stats[name] for name in ("gpu_hits", "promoted", "gpu_demoted", "remote_hits", "corrupt")}


def do(reference: Any) -> Any:
    return ray.get(reference)


def whole(found: Reading, keys: Keys) -> bool:
    assert not found.wrong
    return found.read == len(keys)


def first_to_the_gpu(world: World) -> None:
    """An engine's blocks go to its GPU's tier. Any engine reads them: to a GPU or to memory, here or elsewhere."""
    home, on_gpu = do(world.engine.where.remote())
    assert home.startswith(f"{world.pool.node_id}/GPU-") and on_gpu
    keys = world.keys(1, 20)
    assert do(world.engine.store.remote(keys)) == 20
    nodes = world.pool.stats()["nodes"]
    assert nodes[home]["ready"] == 20 and nodes[world.pool.node_id]["ready"] == 0
    assert whole(do(world.engine.read.remote(keys)), keys) and world.counts()["gpu_hits"] == 20
    assert whole(do(world.far.read.remote(keys)), keys), "on the GPU of another node"
    singles = iter(range(1000, 2000))

    def by_nccl() -> bool:
        """Whether FAR was used: TCP reads until NCCL has connected."""
        (lane,) = world.pool.stats()["transports"]
        assert lane["from"] == home and not lane["failed"], lane
        single = world.keys(next(singles), 1)
        assert do(world.engine.store.remote(single)) == 1 and whole(do(world.far.read.remote(single)), single)
        return bool(lane["transport"] == FAR)

    eventually(by_nccl)
    with world.cache.match(keys) as match:  # reads into memory
        out = np.zeros((20, BLOCK), np.uint8)
        assert match.read(out, verify=True) == 20 and (out == payload(keys, BLOCK)).all()
    assert world.counts()["corrupt"] == 0
    assert world.cache.store(keys, payload(keys, BLOCK)) == 0, "they are there"


def what_is_old_goes_down(world: World) -> None:
    """The blocks fit a GPU and memory together, but no GPU alone: none is lost, and a hit brings blocks back up."""
    before, prompts = world.counts(), [world.keys(seed, 40) for seed in range(10, 16)]  # 60 MiB, into 24 and 64
    for keys in prompts:
        assert do(world.engine.store.remote(keys)) == 40
        eventually(lambda: settled_down(world.pool))
    assert world.counts()["gpu_demoted"] - before["gpu_demoted"] > 50
    for keys in prompts:
        assert whole(do(world.engine.read.remote(keys)), keys)
    after = world.counts()
    assert after["promoted"] - before["promoted"] > 100 and after["remote_hits"] == before["remote_hits"]
    assert whole(do(world.engine.read.remote(prompts[-1])), prompts[-1])
    assert world.counts()["gpu_hits"] - after["gpu_hits"] == 40, "what was just read is on the GPU"


def settled_down(pool: raykv.KVPool) -> bool:
    """Whether a quarter of every GPU, beside its staging window, can be taken without eviction."""
    gpus = [node for node in pool.stats()["nodes"].values() if node["tier"] == "gpu"]
    return all(gpu["spare_slabs"] or gpu["ready"] <= gpu["slots"] * 5 // 8 for gpu in gpus)


def a_store_is_killed(world: World) -> None:
    """Blocks in memory survive, blocks only on the GPU are misses, and engines go on with the next process.

    On the stand-in that process finds no room on the GPU until engines have let go of the dead process's memory.
    """
    keys = world.keys(20, 30)
    assert store(world.cache, keys) == 30
    assert whole(do(world.engine.read.remote(keys)), keys)
    lost = world.keys(21, 10)
    assert do(world.engine.store.remote(lost)) == 10
    kill(world.pool, world.pool.node_id)
    eventually(lambda: whole(do(world.engine.read.remote(keys)), keys))
    eventually(lambda: world.serves(2))
    assert do(world.engine.read.remote(lost)).matched == 0
    eventually(lambda: do(world.engine.store.remote(lost)) >= 0 and whole(do(world.engine.read.remote(lost)), lost))


def many_at_once(world: World) -> None:
    """Engines on GPUs and in memory store and read for seconds: no block is wrong, and none stays held."""
    here = worker(world.pool, world.pool.node_id)
    churns = [one.churn.remote(6.0, seed, 12, 60) for seed, one in enumerate((world.engine, world.far, here))]
    for _, readings, wrong in ray.get(churns):
        assert readings and not wrong
    eventually(lambda: not world.pool.stats()["leases"] and not world.pool.stats()["reservations"])


def a_node_is_drained(world: World) -> None:
    """The drain also saves blocks that only the node's GPU has."""
    keys, home = world.keys(30, 20), do(world.far.where.remote())[0]
    assert do(world.far.store.remote(keys)) == 20
    assert world.pool.stats()["nodes"][home]["ready"] >= 20
    assert world.pool.drain(other_node(world.pool), deadline=30.0) == 0
    assert whole(do(world.engine.read.remote(keys)), keys)


def main(name: str) -> None:
    steps: list[Callable[[World], None]] = [
        first_to_the_gpu,
        what_is_old_goes_down,
        a_store_is_killed,
        many_at_once,
        a_node_is_drained,
    ]
    with local_cluster(2):
        pool = raykv.start(raykv.PoolConfig(name=name, cpu_memory=CPU, gpu_memory=GPU, deadline=PATIENCE_S))
        try:
            world = World(pool)
            for step in steps:
                begin = time.monotonic()
                step(world)
                print(f"{step.__name__}: {time.monotonic() - begin:.1f} s, {world.counts()}", flush=True)
                if step is not steps[-1]:
                    pool.clear()
            readers = [world.engine, world.far]
            assert all(do(reader.maps.remote()) for reader in readers)
        finally:
            pool.stop()
        assert not any(do(reader.maps.remote()) for reader in readers), "the stores waited for them"
        assert not shm_files(name)


def without_gpus(name: str) -> None:
    """No GPU is usable: the pool starts, serves from memory, and opens its GPU tier later.

    An engine that attached before goes on with the node's memory, which it has told others.
    """

    def tiers() -> list[str]:
        return sorted(node["tier"] for node in pool.stats().get("nodes", {}).values())

    with local_cluster(1):
        pool = raykv.start(raykv.PoolConfig(name=name, cpu_memory=CPU, gpu_memory=GPU, deadline=PATIENCE_S))
        try:
            cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
            keys = cache.keys(tokens(1, 20))
            eventually(lambda: pool.stats().get("nodes"))
            assert store(cache, keys) == 20
            assert whole(do(worker(pool, pool.node_id).read.remote(keys)), keys)
            early = worker(pool, pool.node_id, Engine)
            assert do(early.where.remote()) == (pool.node_id, False) and tiers() == ["cpu"]
            Path(os.environ["CUPY_ON_HOST_WITHOUT_HEADERS"]).unlink()
            eventually(lambda: tiers() == ["cpu", "gpu"])
            do(early.look_again.remote())
            assert do(early.where.remote()) == (pool.node_id, False)
            assert whole(do(early.read.remote(keys)), keys)
            assert do(worker(pool, pool.node_id, Engine).where.remote())[1]
        finally:
            pool.stop()


if __name__ == "__main__":
    {"all": main, "without": without_gpus}[sys.argv[2]](sys.argv[1])
