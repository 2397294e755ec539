"""A vLLM engine whose workers are Ray actors on nodes of one's choice, without a GPU."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from helpers.engines.vllm.engine import ENVIRONMENT, TAKES_FUNCTIONS, Engine
from helpers.pools import MIB
from raykv.bench.engines import one_process

PLUGIN = str(Path(__file__).parent / "ray_cpu")
HEAD = "node:__internal_head__"  # a resource of the head's node


def with_platform() -> dict[str, str]:
    """Environment variables with which engines find the tests' platform."""
    return {"PYTHONPATH": os.pathsep.join((PLUGIN, os.environ["PYTHONPATH"]))}


class RayEngine(Engine):
    """An engine by vLLM's Ray executor, tensor parallel over `ranks` workers."""

    def __init__(self, pool: str, model: str, ranks: int, **extra: Any) -> None:
        """extra: for the connector's configuration."""
        super().__init__(pool, model, 64 * MIB, ranks, extra, distributed_executor_backend="ray")

    def ranks(self) -> list[tuple[str, str]]:
        """For each rank (Ray node id, name of the pool's memory that the rank reads and writes)."""
        return self.llm.collective_rpc(_where)  # type: ignore[no-any-return]

    def files(self) -> set[str]:
        """Files that the workers share, and that stay in /dev/shm when Ray kills the workers."""
        return set().union(*self.llm.collective_rpc(_shared))


def _shared(_: Any) -> set[str]:
    maps = Path("/proc/self/maps").read_text()
    return set(re.findall(r"/dev/shm/(?:psm_\w+|\S+-cpushm_\d+)$", maps, re.MULTILINE))


def _where(_: Any) -> tuple[str, str]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return ray.get_runtime_context().get_node_id(), get_kv_transfer_group().connector_worker.worker.rank.memory


def start(driver: str, places: Sequence[str], *arguments: Any, **extra: Any) -> Any:
    """A RayEngine as an actor. driver: a resource of the scheduler's node. places: a resource of each rank's node.

    arguments: those of RayEngine without `ranks`.
    """
    group = placement_group([{driver: 0.001}, *({"GPU": 1, place: 0.001} for place in places)])
    environment = {
        **ENVIRONMENT,
        **one_process.ENVIRONMENT,
        **with_platform(),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,  # or vLLM joins the machine's newest cluster
        **TAKES_FUNCTIONS,
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60",  # until vLLM gives up a rank that has died
        "VLLM_RAY_BUNDLE_INDICES": ",".join(str(i + 1) for i in range(len(places))),
    }
    options: dict[str, Any] = {
        "num_cpus": 0,
        "resources": {driver: 0.001},
        "runtime_env": {"env_vars": environment},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True),
    }
    return ray.remote(RayEngine).options(**options).remote(*arguments, len(places), **extra)
