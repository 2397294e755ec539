"""A user's cluster and pool. Of the tests only the platform that lets vLLM run without a GPU is on PYTHONPATH."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster.outside import outside
from helpers.engines import left_over
from helpers.faces.shell import typed
from helpers.pools import MIB, free_port
from helpers.project.pages import ROOT

import raykv

CPU_ONLY = str(Path(__file__).parents[1] / "helpers" / "engines" / "vllm" / "ray_cpu")
# vLLM's own settings for machines without a GPU or a network
ENVIRONMENT = {
    "PYTHONPATH": CPU_ONLY,
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_CI_ENV": "1",  # compiles nothing
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default half of the machine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two raylets with a dashboard. Each claims a GPU, which `deploy/serve.yaml` asks for."""
    import ray
    from ray.cluster_utils import Cluster

    room = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 256 * MIB}
    with outside():
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ENVIRONMENT.items():
                patch.setenv(name, value)
            head = {**room, "include_dashboard": True, "dashboard_port": free_port()}
            cluster = Cluster(initialize_head=True, head_node_args=head)
            cluster.add_node(wait=True, **room)
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def pool(cluster: Any) -> Iterator[raykv.KVPool]:
    """The pool of docs and examples, with a long deadline, so that a busy machine does not turn hits into misses."""
    typed("raykv start --cpu-memory 512MiB --deadline 10", ROOT, RAY_ADDRESS=cluster.address)
    with left_over.removed():
        yield raykv.attach("default")
    typed("raykv stop --yes", ROOT, RAY_ADDRESS=cluster.address)
