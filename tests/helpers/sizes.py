"""How large a node is, as the directory and its memory have it."""

import os
from typing import Any

import raykv

MIB = 1 << 20
SIZE = 64 * MIB


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
