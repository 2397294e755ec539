"""How large a node is, as the directory and its memory have it."""

import os
from typing import Any

import raykv
from helpers.pools import MIB, eventually, other_node, served

SIZE = 64 * MIB


def as_started(shared: raykv.KVPool) -> raykv.KVPool:
    """The pool with nodes of SIZE again, and empty."""
    for node_id in (shared.node_id, other_node(shared)):
        assert shared.resize(node_id, SIZE) == SIZE
    shared.clear()
    eventually(lambda: served(shared, 2))
    return shared


def node_of(pool: raykv.KVPool, node_id: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = pool.stats()["nodes"][node_id or pool.node_id]
    return found


def has(pool: raykv.KVPool, node_id: str | None = None) -> int:
    """Bytes of a node, as the directory has it."""
    node = node_of(pool, node_id)
    return int((node["slabs"] + node["spare_slabs"]) * node["slab_bytes"])


def taken(pool: raykv.KVPool) -> int:
    """Bytes of the arena beside this process that are really there."""
    assert pool.session.local
    return os.stat(pool.session.local.arena.path).st_blocks * 512
