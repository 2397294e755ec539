"""Seconds in which a client finds nothing after its pool loses a part, for several losses of each kind.

    python benchmarks/takeover.py [--times 5] [--json]

A client matches one prompt about 200 times per second. There are three kinds of loss: SIGKILL ends the directory's
process; SIGKILL ends all processes of the node that runs the directory and the supervisor; or the processes of that
node are stopped, as if its network had failed. The figure is the time from the loss to the first full hit after a miss.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray

from raykv.bench.testbed import local_cluster, local_pool
from raykv.cluster import internal_kv, named_actors
from raykv.config import MIB

BLOCKS, BLOCK_BYTES = 64, 256 << 10
MOST_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = {
        "directory_killed_s": [lost(kill_directory) for _ in range(arguments.times)],
        "node_killed_s": [lost(kill_node, nodes=3) for _ in range(arguments.times)],
        "node_silent_s": [lost(stop_node, nodes=3) for _ in range(arguments.times)],
    }
    if arguments.json:
        print(json.dumps(found))
    for name, times in found.items():
        print(f"{name:<20} median {statistics.median(times):6.2f}   {' '.join(f'{each:.2f}' for each in times)}")


def lost(loss: Callable[[Any], list[int]], nodes: int = 2) -> float:
    """Seconds without a full hit, for a client on the first node. loss: returns ids of processes that it stopped."""
    with local_cluster(nodes) as names:
        # The directory and the supervisor start on the head. The head must not be lost, since this process runs there.
        # So `raykv.start` is made to treat another node as the head.
        here = ray.get_runtime_context().get_node_id()
        there = next(name for name in names if name != here)
        sys.modules["raykv.start"]._head = lambda: there  # type: ignore[attr-defined]
        return lost_of_pool(loss)


def lost_of_pool(loss: Callable[[Any], list[int]]) -> float:
    with local_pool("takeover", 256 * MIB) as pool:
        cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK_BYTES)
        keys = cache.keys(np.arange(BLOCKS * 16))
        stored = 0
        while (stored := stored + cache.store(keys, np.zeros((BLOCKS, BLOCK_BYTES), np.uint8), wait=True)) < BLOCKS:
            time.sleep(0.1)  # a node stores no blocks while it prepares its memory
        await_successor(pool)
        stopped = loss(pool)
        try:
            return seconds_without(cache, keys)
        finally:
            for process in stopped:
                os.kill(process, signal.SIGCONT)


def seconds_without(cache: Any, keys: Any) -> float:
    begin, missed = time.monotonic(), False
    while time.monotonic() < begin + MOST_S:
        with cache.match(keys) as match:
            hit = match.num_blocks == BLOCKS
        missed |= not hit
        if missed and hit:
            return time.monotonic() - begin
        time.sleep(0.005)
    return 0.0 if not missed else float("inf")


def await_successor(pool: Any) -> None:
    """Wait until the other directory is ready, on a different node than the directory in charge."""
    in_charge = internal_kv.in_charge(pool.name).name
    other = f"{in_charge[:-1]}{3 - int(in_charge[-1])}"
    here = ray.get(named_actors.find(in_charge).node_id.remote())
    while True:
        try:
            if ray.get(named_actors.find(other).node_id.remote(), timeout=5) != here:
                break
        except (ValueError, ray.exceptions.RayError):
            pass
        time.sleep(0.2)
    time.sleep(3.0)  # time for the successor to hear of the directory in charge


def kill_directory(pool: Any) -> list[int]:
    os.kill(ray.get(named_actors.find_directory(pool.name).ping.remote()), signal.SIGKILL)
    return []


def processes_of_directory_node(pool: Any) -> list[psutil.Process]:
    """Return the raylet of the directory's node, and all processes that this raylet started."""
    raylet = psutil.Process(ray.get(named_actors.find_directory(pool.name).ping.remote())).parent()
    assert raylet is not None and "raylet" in raylet.name()
    return [raylet, *raylet.children(recursive=True)]


def kill_node(pool: Any) -> list[int]:
    for process in processes_of_directory_node(pool):
        process.kill()
    return []


def stop_node(pool: Any) -> list[int]:
    stopped = processes_of_directory_node(pool)
    for process in stopped:
        process.suspend()
    return [process.pid for process in stopped]


if __name__ == "__main__":
    main()
