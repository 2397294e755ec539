"""The nodes of the Ray cluster."""

from typing import Any

import ray

from raykv.cluster import ray_calls
from raykv.system.raylets import cluster_id

HEAD = "node:__internal_head__"  # a resource that Ray gives to the head node


def living() -> set[str]:
    """Return the Ray node ids of the nodes that are alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def identity() -> bytes:
    """Return 8 bytes that distinguish this process's Ray cluster from other clusters on its machine."""
    return cluster_id(ray_calls.get_runtime_context().get_session_name())


def is_head(node: dict[str, Any]) -> bool:
    """Whether a node of `ray.nodes()` is the cluster's head."""
    return HEAD in node["Resources"]
