"""A directory with well-behaved external tiers, for tests by example."""

import struct

from helpers.directory.checks import rows_of
from helpers.directory.pool import KEYS, PAGE, Pool
from raykv.directory.kernels import columns
from raykv.protocol.location import is_tier
from raykv.protocol.tiers import ExistingBlocks, TierReport

SLAB = 8 * PAGE  # of a tier: room for 4 blocks of a page, which take two pages each there


def heartbeat(
    pool: Pool, node: str = "a", slabs: int = 4, shared: bool = False, reached: bool = True, lost: bytes = b""
) -> bool:
    """A node reports its tier. Returns whether the node must list the tier's blocks."""
    answer = pool.directory.tier_heartbeat(node, TierReport(slabs * SLAB, shared, reached, lost), pool.now)
    assert answer and is_tier(answer.tier)
    return answer.list_it


def list_existing(pool: Pool, keys: list[bytes], node: str = "a", size: int = PAGE, last: bool = True) -> None:
    sizes = struct.pack(f"<{len(keys)}q", *[size] * len(keys))
    pool.directory.report_existing(node, ExistingBlocks(b"".join(keys), sizes, last), pool.now)


def tiered(slabs: int = 4, shared: bool = False, slots: int = 8, nodes: str = "a", **how: float | int) -> Pool:
    """A pool with empty tiers of so many slabs. By default a node has room for 7 blocks beside its window."""
    pool = Pool(slots=slots, nodes=nodes, **how)  # type: ignore[arg-type]
    for node in nodes:
        if heartbeat(pool, node, slabs, shared):
            list_existing(pool, [], node)
    return pool


def tier(pool: Pool, owner: str = "a") -> dict[str, int | str]:
    return dict(pool.directory.stats(pool.now)["tiers"][owner])


def in_external_tier(pool: Pool, keys: list[bytes], state: int = columns.EXTERNAL) -> list[bool]:
    rows = pool.directory.c.rows
    return [any(rows[row]["state"] == state for row in rows_of(pool.directory, key)) for key in keys]


def only_in_tier(pool: Pool, keys: list[bytes], node: str = "a") -> None:
    """Store at most 7 keys and demote them. Then store other keys, which evict the first from memory."""
    pool.store(node, keys)
    pool.demote_all(node, whole=True)
    pool.store(node, KEYS[900:907])
    assert not any(pool.has(keys)) and all(in_external_tier(pool, keys))
