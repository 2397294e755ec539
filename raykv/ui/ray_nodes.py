"""Ray nodes, and how users name them: by a prefix of the id, by a host name, or by an address."""

from collections.abc import Sequence
from typing import NamedTuple

import ray

from raykv import cluster

SHORT = 8  # number of characters of a node id to show, if they distinguish all nodes


class RayNode(NamedTuple):
    """A living node. host: its machine's host name. name: from `ray start --node-name`, else its address."""

    node_id: str
    host: str
    address: str
    name: str
    is_head: bool


def living_nodes() -> list[RayNode]:
    """Return all living nodes of this process's Ray cluster: the head first, then the others by host name."""
    nodes = [
        RayNode(
            str(node["NodeID"]),
            str(node["NodeManagerHostname"]),
            str(node["NodeManagerAddress"]),
            str(node["NodeName"]),
            cluster.is_head(node),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (not node.is_head, node.host, node.node_id))


def short_ids(nodes: Sequence[RayNode]) -> dict[str, str]:
    """Return a unique prefix of each node id, by node id."""
    ids = sorted(node.node_id for node in nodes)
    shown = {}
    for before, node_id, after in zip(["", *ids], ids, [*ids[1:], ""], strict=False):
        same = max(_common(before, node_id), _common(node_id, after))
        shown[node_id] = node_id[: max(SHORT, same + 1)]
    return shown


def find_node(asked: str, nodes: Sequence[RayNode]) -> RayNode:
    """Return the node that a user names by its id, a prefix of its id, its host name, address or name.

    Raises ValueError, which lists the candidates, if no node or several nodes match.
    """
    exact = [node for node in nodes if asked in (node.node_id, node.host, node.address, node.name)]
    meant = exact or [node for node in nodes if asked and node.node_id.startswith(asked.lower())]
    if len(meant) == 1:
        return meant[0]
    shown = short_ids(nodes)
    there = "\n".join(f"  {shown[node.node_id]}  {node.host}  {node.address}" for node in meant or nodes)
    if meant:
        raise ValueError(f"{asked!r} may be any of {len(meant)} nodes: give more of its id\n{there}")
    raise ValueError(f"no living node of this Ray cluster is {asked!r}: give the id or the host name of one\n{there}")


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
