"""Whether every node can afford its arena, and use its external tier: asked before anything is started."""

import os
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.actors.demoter import open_external
from raykv.arena.files import SHM, left_behind
from raykv.config import Size, capacity_bytes
from raykv.errors import CapacityError
from raykv.system import free_memory
from raykv.tiers import parse
from raykv.transports import nixl

ASK_DEADLINE_S = 60.0


def check_nodes(
    pool: str, cpu_memory: Size, transport: str, external: str | None, fingerprint: bytes, maker: bytes | None
) -> None:
    """CapacityError if some node can't afford it; nodes that share a machine's memory are added up.

    ValueError if some node can't use its external tier, or the transport. maker: see `open_external`.
    """
    ask = ray.remote(num_cpus=0, max_retries=0)(_ask)
    living = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    here = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in living]
    question = (pool, cpu_memory, transport, external, fingerprint, maker)
    asked = [ask.options(scheduling_strategy=strategy).remote(*question) for strategy in here]
    refusals: dict[str, list[str]] = {}  # node ids by what is wrong
    machines: dict[str, list[dict[str, Any]]] = {}
    end = time.monotonic() + ASK_DEADLINE_S
    for node_id, reference in zip(living, asked, strict=True):
        try:
            answer = ray.get(reference, timeout=max(0.0, end - time.monotonic()))
        except RayError:  # a node that was lost meanwhile
            continue
        machines.setdefault(answer["machine"], []).append(answer)
        for what in filter(None, answer["refusals"]):
            refusals.setdefault(what, []).append(node_id[:16])
    if refusals:
        raise ValueError("\n".join(f"{what} (on nodes {', '.join(nodes)})" for what, nodes in refusals.items()))
    for nodes in machines.values():
        wanted = sum(node["asked"] for node in nodes)
        if wanted > nodes[0]["free"]:
            raise CapacityError(free_memory.refusal(wanted, nodes[0]["room"], len(nodes)))


def _ask(
    pool: str, cpu_memory: Size, transport: str, external: str | None, fingerprint: bytes, maker: bytes | None
) -> dict[str, Any]:
    found = free_memory.free_bytes()
    adoptable = sum(os.stat(path).st_blocks * 512 for path in left_behind(pool))
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        machine = f"{boot_id.read().strip()}-{os.stat(SHM).st_dev}"
    return {
        "machine": machine,
        "room": found,
        "free": found.free + adoptable,
        "asked": capacity_bytes(cpu_memory, free_memory.total_bytes()),
        "refusals": [
            _refusal(pool, external, fingerprint, maker) if external else "",
            f"transport='nixl': {missing}" if transport == "nixl" and (missing := nixl.why_not()) else "",
        ],
    }


def _refusal(pool: str, external: str, fingerprint: bytes, maker: bytes | None) -> str:
    """Why this node can't use its external tier, if it can't."""
    try:
        tier, _ = open_external(pool, fingerprint, external, maker)
        try:
            tier.check()
        finally:
            tier.close()
    except Exception as error:  # a library's own, too
        text = str(error)
        return text if "external=" in text else f"external={parse(external).text}: {text}"
    return ""
