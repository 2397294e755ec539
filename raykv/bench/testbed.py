"""Ray nodes on this machine, for the demo and the benches."""

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raykv
from raykv.config import MIB, PoolConfig

OFFERED_S = 120.0  # seconds for the stores to offer all their memory


@contextmanager
def local_cluster(nodes: int, object_store_memory: int = 256 * MIB) -> Iterator[list[str]]:
    """Run a Ray cluster of `nodes` raylets on this machine. This process is its driver. Yields the Ray node ids."""
    from ray.cluster_utils import Cluster  # here, as workers that import a bench need no autoscaler

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token file into the home folder
    room: dict[str, Any] = {"num_cpus": 2, "object_store_memory": object_store_memory, "include_dashboard": False}
    cluster = Cluster()
    try:
        with undisturbed():
            for _ in range(nodes):
                cluster.add_node(**room)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield [node["NodeID"] for node in ray.nodes()]
    finally:
        with undisturbed():
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def local_pool(name: str, cpu_memory: int, **settings: Any) -> Iterator[Any]:
    """Run a pool on the cluster of `local_cluster`. Yields the pool when its stores offer all their memory."""
    with undisturbed():
        pool = raykv.start(PoolConfig(name=name, cpu_memory=cpu_memory, **settings))
    try:
        _await_memory(pool)
        yield pool
    finally:
        with undisturbed():
            pool.stop()


def _await_memory(pool: Any) -> None:
    """Wait until stores offer all slabs, so that no block is evicted too early. Raises TimeoutError after OFFERED_S."""
    end = time.monotonic() + OFFERED_S
    while not _offers_all(pool):
        if time.monotonic() > end:
            raise TimeoutError(f"the stores of pool {pool.name!r} offer less than their memory after {OFFERED_S:.0f} s")
        time.sleep(0.05)


def _offers_all(pool: Any) -> bool:
    nodes = pool.stats().get("nodes", {}).values()
    return bool(nodes) and all(node["slabs"] + node["spare_slabs"] == node["limit"] for node in nodes)


def on_node(actor: type, node_id: str, *args: Any, **options: Any) -> Any:
    """Create an actor of this class on a node. options: further Ray options."""
    pinned = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return ray.remote(num_cpus=0)(actor).options(scheduling_strategy=pinned, **options).remote(*args)


def rows_cache(pool: raykv.KVPool, block_bytes: int, block_tokens: int = 16, model: str = "bench") -> raykv.KVCache:
    """A cache for blocks that are rows of uint8."""
    return pool.cache(model=model, dtype="uint8", layout="rows", block_tokens=block_tokens, block_bytes=block_bytes)


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def await_port(port: int, server: "subprocess.Popen[Any]", seconds: float) -> None:
    """Wait until a server's process listens on 127.0.0.1. Raises ValueError if it ends, or does not listen in time."""
    end = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            time.sleep(0.01)
    raise ValueError(f"{server.args!r} does not start")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends, so that nothing is left half started or half stopped."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for caught in seen:
            signal.raise_signal(caught)
