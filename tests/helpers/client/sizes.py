"""How large a node is: by the directory, and by the memory that is taken."""

import os
from typing import Any

import raykv
from helpers.pools import MIB, eventually, other_node, served

SIZE = 64 * MIB


def as_started(shared: raykv.KVPool) -> raykv.KVPool:
    """The pool, empty, with its nodes resized to SIZE."""
    for node_id in (shared.node_id, other_node(shared)):
        assert shared.resize(node_id, SIZE) == SIZE
    shared.clear()
    eventually(lambda: served(shared, 2))
    return shared


def node_of(pool: raykv.KVPool, node_id: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = pool.stats()["nodes"][node_id or pool.node_id]
    return found


def has(pool: raykv.KVPool, node_id: str | None = None) -> int:
    """Bytes of a node by the directory."""
    node = node_of(pool, node_id)
    return int((node["slabs"] + node["spare_slabs"]) * node["slab_bytes"])


def taken(pool: raykv.KVPool) -> int:
    """Bytes of this node's arena that memory is allocated for."""
    assert pool.session.local
    return os.stat(pool.session.local.arena.path).st_blocks * 512
