"""`raykv.start`: ask every node whether it can take its part of a pool, then start the actors."""

import json
import os
import secrets
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv import registry
from raykv.actors.demoter import open_external
from raykv.actors.supervisor import START_DEADLINE_S, Supervisor
from raykv.arena.files import SHM, left_behind
from raykv.client.pool import KVPool, connect, stop
from raykv.config import PoolConfig, Size, capacity_bytes, fingerprint
from raykv.errors import CapacityError
from raykv.protocol import VERSION
from raykv.system import free_memory
from raykv.tiers import parse, tier_for
from raykv.tiers.registry import registered
from raykv.transports import nixl

ASK_DEADLINE_S = 60.0


def start(config: PoolConfig | None = None) -> KVPool:
    """Start a pool on every node of the Ray cluster, or attach to it if it runs.

    Joins the cluster that runs on this machine if this process has no Ray yet. Raises CapacityError where a node can't
    afford the memory, and nothing is started then; PoolNotFound if there is no Ray cluster; ValueError for a secret
    that is bad, or is not the running pool's, and for an external tier that some node can't use.
    """
    config = config or PoolConfig()
    if config.external:
        tier_for(parse(config.external))
    connect(config.name)
    secret = config.explicit_secret()
    running = registry.settings(config.name)
    if running is None:
        if config.external and secret is None:
            raise ValueError(
                "external= outlives the pool, and keys that are derived from a random secret would not be found there "
                "again: give secret=, or RAYKV_SECRET"
            )
        secret = secret or secrets.token_bytes(32)
        maker = registered(parse(config.external).scheme) if config.external else None
        tier = ray.cloudpickle.dumps(maker) if maker else None
        mark = fingerprint(config.name, secret)
        check_nodes(config.name, config.cpu_memory, config.transport, config.external, mark, tier)
        values = {
            "protocol": VERSION,
            "secret": secret.hex(),
            "cpu_memory": config.cpu_memory,
            "gpu_memory": config.gpu_memory,
            "locality": config.locality,
            "transport": config.transport,
            "external": config.external,
            "write": config.write,
            "min_hits": config.min_hits,
        }
        if tier:
            registry.put(config.name, "tier", tier)
        registry.put(config.name, "settings", json.dumps(values).encode(), overwrite=False)
    elif secret is not None and secret.hex() != running["secret"]:
        raise ValueError(f"pool {config.name!r} runs with another secret: leave it out, or stop that pool first")
    supervisor: Any = (
        ray.remote(Supervisor)
        .options(**registry.options(registry.supervisor_name(config.name), _head(), pinned=False, threads=4))
        .remote(config.name)
    )
    try:
        failed = ray.get(supervisor.ready.remote(), timeout=2 * START_DEADLINE_S)
    except RayError:
        if running is None:
            stop(config.name)
        raise
    if failed and running is None:  # a pool that runs is not ended for a node that is restarting, or can't join it
        stop(config.name)
        raise CapacityError("\n".join(f"node {node_id[:16]}: {why}" for node_id, why in failed.items()))
    return KVPool(config.name)


def _head() -> str:
    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return str(node["NodeID"])
    return str(ray.get_runtime_context().get_node_id())


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
