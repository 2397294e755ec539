"""One Ray cluster of two nodes for the whole session; a pool of a fresh name for every test."""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else ray.init writes a token file into the home folder
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

MIB = 1 << 20
_names = (f"t{os.getpid()}-{i}" for i in itertools.count())


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two raylets on this machine; this process is a driver on the head's."""
    import ray
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 2, "object_store_memory": 256 * MIB}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    cluster.add_node(**small)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def start(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Start a pool; it is stopped after the test."""
    import raykv

    pools = []

    def start(**settings: Any) -> Any:
        pools.append(raykv.start(raykv.PoolConfig(**{"name": next(_names), "cpu_memory": 256 * MIB, **settings})))
        return pools[-1]

    yield start
    for pool in pools:
        pool.stop()


def payload(keys: np.ndarray, block_bytes: int) -> np.ndarray:
    """The only right content of the blocks of these keys: (n, block_bytes) uint8."""
    seeds = keys.view(np.uint64).reshape(-1, 2)
    words = np.arange(block_bytes // 8, dtype=np.uint64)[None, :]
    with np.errstate(over="ignore"):
        mixed = (words + seeds[:, :1]) * np.uint64(0x9E3779B97F4A7C15) ^ seeds[:, 1:]
    return mixed.view(np.uint8).reshape(len(keys), -1)
