"""Answers, before a pool starts, whether a node can take part in the pool."""

import contextlib
import importlib
import os
import re
from importlib.metadata import version
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv import cluster
from raykv.actors.store.demoter import open_external
from raykv.actors.store.gpu_memory import DRIVER
from raykv.arena.files import SHM, left_behind
from raykv.arena.gpu import device
from raykv.config import Size, capacity_bytes
from raykv.errors import reason_of
from raykv.protocol.calls import VERSION
from raykv.system import free_memory, jit
from raykv.tiers import parse
from raykv.transports import nixl


class Question(NamedTuple):
    """The question that every node is asked before a pool starts. maker: see `open_external`."""

    pool: str
    cpu_memory: Size
    gpu_memory: Size
    transport: str
    external: str | None
    fingerprint: bytes
    maker: bytes | None


def why_not_usable(node_id: str, seconds: float) -> str:
    """Return why Ray's workers on a node can't use raykv, or "" if they can or don't answer in `seconds`.

    This runs a task, because Ray reports why a task's import fails. If an actor's import fails, Ray reports nothing and
    restarts the actor forever, while the actor's calls wait.
    """
    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    try:
        ray.get(_import.options(scheduling_strategy=pinned).remote(), timeout=seconds)
    except RayTaskError as error:
        missing = re.search(r"No module named '[^']+'", str(error))
        return (
            f"Ray's workers on node {node_id[:16]} can't use raykv ({missing[0] if missing else reason_of(error)}): "
            f"{what_to_install()}"
        )
    except RayError:  # the node was lost meanwhile, or is busy
        pass
    return ""


def what_to_install() -> str:
    """Return advice for a node that lacks this version of raykv."""
    there = "in the Python environment that Ray runs in there: from the same wheel or clone"
    return f"install this raykv, {version('raykv')}, {there}"


@ray.remote(num_cpus=0, max_retries=0)
def _import() -> None:
    """Import a store's modules. Ray sends this function's code, so the function runs even on a node without raykv."""
    importlib.import_module("raykv.actors.store.node_store")


def answer(question: Question) -> dict[str, Any]:
    """Return this node's answer to the question."""
    pool, maker = question.pool, question.maker
    found = free_memory.free_bytes()
    left = left_behind_by_pool()
    return {
        "protocol": VERSION,
        "machine": machine(),
        "room": found,
        "free": found.free + left.get(pool, 0),
        "asked": capacity_bytes(question.cpu_memory, free_memory.total_bytes()),
        "left": {name: size for name, size in left.items() if size},
        "gpus": bool(question.gpu_memory and (device.visible() or os.path.exists(DRIVER))),
        "compiled": jit.is_compiled("raykv.directory"),
        "refusals": [
            _refusal(pool, question.external, question.fingerprint, maker) if question.external else "",
            f"transport='nixl': {missing}" if question.transport == "nixl" and (missing := nixl.why_not()) else "",
        ],
    }


def machine() -> str:
    """Return a name of this node's shared memory. Nodes that share the memory return the same name."""
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()}-{os.stat(SHM).st_dev}"


def left_behind_by_pool() -> dict[str, int]:
    """Return, for each pool with arenas of this user here, the bytes of shared memory that dead stores left."""
    names = (re.fullmatch(rf"raykv-([A-Za-z0-9_-]+)-{os.getuid()}-(gpu-)?\d+", name) for name in os.listdir(SHM))
    ours = cluster.identity()
    return {name: _bytes(left_behind(name, ours)) for name in {found[1] for found in names if found}}


def _bytes(paths: list[str]) -> int:
    size = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # its pool is being stopped
            size += os.stat(path).st_blocks * 512
    return size


def _refusal(pool: str, external: str, fingerprint: bytes, maker: bytes | None) -> str:
    """Return why this node can't use the external tier, or "" if it can."""
    try:
        tier, _ = open_external(pool, fingerprint, external, maker)
        try:
            tier.check()
        finally:
            tier.close()
    except Exception as error:  # including a library's own error
        text = str(error)
        return text if "external=" in text else f"external={parse(external).text}: {text}"
    return ""
