"""Whether every node can afford its arena, asked before anything is started."""

import os
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv import room
from raykv.arena import SHM, left_behind
from raykv.config import capacity_bytes
from raykv.errors import CapacityError

ASK_DEADLINE_S = 60.0


def check_nodes(pool: str, cpu_memory: float | int) -> None:
    """CapacityError if some node can't; nodes that share a machine's memory are added up."""
    ask = ray.remote(num_cpus=0, max_retries=0)(_ask)
    living = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    here = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in living]
    asked = [ask.options(scheduling_strategy=strategy).remote(pool, cpu_memory) for strategy in here]
    machines: dict[str, list[dict[str, Any]]] = {}
    end = time.monotonic() + ASK_DEADLINE_S
    for question in asked:
        try:
            answer = ray.get(question, timeout=max(0.0, end - time.monotonic()))
        except RayError:  # a node that was lost meanwhile
            continue
        machines.setdefault(answer["machine"], []).append(answer)
    for nodes in machines.values():
        wanted = sum(node["asked"] for node in nodes)
        if wanted > nodes[0]["free"]:
            raise CapacityError(room.refusal(wanted, nodes[0]["room"], len(nodes)))


def _ask(pool: str, cpu_memory: float | int) -> dict[str, Any]:
    found = room.free_bytes()
    adoptable = sum(os.stat(path).st_blocks * 512 for path in left_behind(pool))
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        machine = f"{boot_id.read().strip()}-{os.stat(SHM).st_dev}"
    return {
        "machine": machine,
        "room": found,
        "free": found.free + adoptable,
        "asked": capacity_bytes(cpu_memory, room.total_bytes()),
    }
