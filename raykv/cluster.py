"""The nodes of the Ray cluster."""

from typing import Any

import ray


def living() -> set[str]:
    """Ray node ids of the nodes that are alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def is_head(node: dict[str, Any]) -> bool:
    """Whether a node of `ray.nodes()` is the cluster's head."""
    return "node:__internal_head__" in node["Resources"]
