"""The program that test_stress.py runs. Its last line is its result as JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

import raykv
from helpers.pools import MIB, eventually, node_store, other_node, pid, served, settled, totals, worker
from raykv.cluster import named_actors

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 256 * MIB}
ROUNDS = 20
PROMPTS, BLOCKS = 40, 40  # up to 1600 blocks, for a pool with room for about 480


def main(seconds: float) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        second = cluster.add_node(wait=True, **NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        pool = raykv.start(raykv.PoolConfig(name=f"t{os.getpid()}-stress", cpu_memory=64 * MIB))
        try:
            print(json.dumps(stress(pool, cluster, second, seconds)))
        finally:
            pool.stop()
    finally:
        ray.shutdown()
        cluster.shutdown()


def stress(pool: raykv.KVPool, cluster: Any, second: Any, seconds: float) -> dict[str, Any]:
    eventually(lambda: served(pool, 2))
    nodes = (pool.node_id, other_node(pool))
    workers = [worker(pool, nodes[i % 2], be_patient=False) for i in range(4)]
    pids = ray.get([each.pid.remote() for each in workers])
    begin = time.monotonic()
    running = [  # many short rounds: those that a worker finishes before it is killed count
        (i, each.churn.remote(seconds / ROUNDS, seed=ROUNDS * i + j, prompts=PROMPTS, blocks=BLOCKS))
        for j in range(ROUNDS)
        for i, each in enumerate(workers)
    ]
    killed: list[str] = []
    evicted = remote = 0  # sampled before each kill: a directory that dies takes its counters along

    def kill(when: float, what: str, process: int) -> None:
        nonlocal evicted, remote
        time.sleep(max(0.0, begin + when * seconds - time.monotonic()))
        stats = pool.stats()
        evicted, remote = max(evicted, stats.get("evicted", 0)), max(remote, stats.get("remote_hits", 0))
        os.kill(process, signal.SIGKILL)
        killed.append(what)

    kill(0.2, "worker", pids[1])
    kill(0.35, "node store", pid(node_store(pool, pool.node_id)))
    kill(0.5, "directory", pid(named_actors.find_directory(pool.name)))
    time.sleep(max(0.0, begin + 0.75 * seconds - time.monotonic()))
    stats = pool.stats()
    evicted, remote = evicted + stats.get("evicted", 0), remote + stats.get("remote_hits", 0)
    cluster.remove_node(second, allow_graceful=False)
    killed.append("raylet")

    errors, results = [], []
    for i, answer in running:
        try:
            results.append(ray.get(answer, timeout=seconds + 60))
        except RayError as error:
            if i % 2 == 0:  # the other workers were killed, or their node was
                errors.append(f"worker {i}: {error}")
    eventually(lambda: list(pool.stats().get("nodes", ())) == [pool.node_id])
    for each in workers[::2]:
        ray.kill(each)
    eventually(lambda: settled(pool))
    stats = pool.stats()
    return {
        "pool": pool.name,
        "errors": errors,
        "killed": killed,
        "stored": sum(result[0] for result in results),
        "read": sum(result[1] for result in results),
        "wrong": sum(result[2] for result in results),
        "remote": remote,
        "evicted": evicted,
        "slots": totals(pool),
        "leases": stats["leases"],
        "reservations": stats["reservations"],
        "corrupt": stats["corrupt"],
        "faults": stats["faults"],
    }


if __name__ == "__main__":
    main(float(sys.argv[1]))
