"""`raykv bench start`: a pool on two nodes of this machine, beside an empty detached actor on each node."""

import statistics
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raykv
from raykv.bench.testbed import local_cluster, undisturbed
from raykv.config import MIB, NAMESPACE

NODES, CPU_MEMORY = 2, 64 * MIB
PAIRS = 8
PAUSE_S = 2.0  # seconds for ended processes to disappear


class Empty:
    """The smallest actor."""

    def ping(self) -> None:
        """Answer."""


def run() -> dict[str, float]:
    """Return median seconds over PAIRS pairs of empty actors and a pool. A warm-up pair comes first."""
    ours, floor = [], []
    with local_cluster(NODES) as nodes:
        for number in range(PAIRS + 1):
            floor.append(_actors(nodes, number))
            time.sleep(PAUSE_S)
            ours.append(_pool(number))
            time.sleep(PAUSE_S)
    start_s, floor_s = statistics.median(ours[1:]), statistics.median(floor[1:])
    return {"start_s": start_s, "floor_s": floor_s, "ratio": start_s / floor_s, "pairs": float(PAIRS)}


def _actors(nodes: list[str], number: int) -> float:
    """Seconds until an empty detached actor on each node answers."""
    begin = time.monotonic()
    remote: Any = ray.remote(Empty)
    actors = [
        remote.options(
            name=f"bench-start-{number}-{node_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote()
        for node_id in nodes
    ]
    ray.get([actor.ping.remote() for actor in actors])
    seconds = time.monotonic() - begin
    for actor in actors:
        ray.kill(actor)
    return seconds


def _pool(number: int) -> float:
    """Seconds of `raykv.start`."""
    with undisturbed():
        begin = time.monotonic()
        pool = raykv.start(raykv.PoolConfig(name=f"bench-start-{number}", cpu_memory=CPU_MEMORY))
        seconds = time.monotonic() - begin
        pool.stop()
    return seconds
