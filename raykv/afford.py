"""Whether every node can afford its arena, asked before anything is started."""

import os
import re
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv import room
from raykv.arena import SHM
from raykv.config import capacity_bytes
from raykv.errors import CapacityError

ASK_DEADLINE_S = 60.0


def check_nodes(pool: str, cpu_memory: float | int) -> None:
    """CapacityError if some node can't; nodes that share a machine's memory are added up."""
    ask = ray.remote(num_cpus=0, max_retries=0)(_ask)
    living = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    answers = ray.get(
        [
            ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
                pool, cpu_memory
            )
            for node_id in living
        ],
        timeout=ASK_DEADLINE_S,
    )
    machines: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        machines.setdefault(answer["machine"], []).append(answer)
    for nodes in machines.values():
        asked = sum(node["asked"] for node in nodes)
        if asked > nodes[0]["free"]:
            raise CapacityError(room.refusal(asked, nodes[0]["room"], len(nodes)))


def _ask(pool: str, cpu_memory: float | int) -> dict[str, Any]:
    found = room.free_bytes()
    ours = re.compile(rf"raykv-{pool}-{os.getuid()}-\d+")
    left_behind = sum(entry.stat().st_blocks * 512 for entry in os.scandir(SHM) if ours.fullmatch(entry.name))
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        machine = f"{boot_id.read().strip()}-{os.stat(SHM).st_dev}"
    return {
        "machine": machine,
        "room": found,
        "free": found.free + left_behind,
        "asked": capacity_bytes(cpu_memory, room.total_bytes()),
    }
