"""Drains a node that is about to leave, so that its sole copies (blocks that no other node has) are not lost.

The supervisor drains nodes that Ray says are leaving, and nodes that an administrator names. The directory stops
placing blocks on such a node. If another node has a replica of a block, the replica becomes the primary. Sole copies
are copied to the external tier if all nodes share this tier. Tasks on other nodes pull the remaining sole copies.
"""

import time

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv import cluster
from raykv.client.leases.match import Match
from raykv.client.session import Session
from raykv.cluster import internal_kv, named_actors
from raykv.cluster.internal_kv import Kept
from raykv.config import KEYS_PER_CALL
from raykv.keys import CacheId, Keys
from raykv.protocol.location import KEY_BYTES
from raykv.protocol.stores import SoleCopies
from raykv.system import events

CALL_S = 10.0  # deadline of a call that transfers no blocks
ATTACH_S = 30.0  # maximum time for a task on another node to start and attach
NO_ROOM_S = 0.2  # pause after a round in which no block was pulled


def drain(pool: str, node_id: str, seconds: float) -> int:
    """Drain a node of the pool, for at most `seconds`. Returns the number of sole copies that remain on the node.

    Raises RayError or ValueError if the directory or the node's store is down.
    """
    begin = time.monotonic()
    end = begin + seconds
    events.tell("drain", node=node_id[:8], deadline=seconds)
    internal_kv.put(pool, Kept.LEAVING, b"", node_id)  # kept for a directory that restarts meanwhile
    ray.get(named_actors.find_directory(pool).leave.remote(node_id), timeout=CALL_S)
    store = named_actors.find_store(pool, node_id)
    ray.get(store.flush_to_shared.remote(seconds), timeout=seconds + CALL_S)
    left = _left(pool, node_id, 1)
    while left and time.monotonic() < end:
        alive, leaving = cluster.living(), internal_kv.names(pool, Kept.LEAVING)
        takers = alive.difference(leaving)
        if node_id not in alive or node_id not in leaving or not takers:
            break
        tasks = [
            _take_over.options(scheduling_strategy=NodeAffinitySchedulingStrategy(taker, soft=False)).remote(
                pool, node_id, taker, slice(i, None, len(takers)), end - time.monotonic()
            )
            for i, taker in enumerate(takers)
        ]
        ray.wait(tasks, num_returns=len(tasks), timeout=max(0.0, end - time.monotonic()) + ATTACH_S)
        before, left = left, _left(pool, node_id, left)
        if left >= before:
            time.sleep(NO_ROOM_S)
    events.tell("drained", node=node_id[:8], left=left, seconds=round(time.monotonic() - begin, 1))
    return left


def check_others(pool: str, node_id: str) -> None:
    """Raise ValueError if no other node accepts blocks."""
    others = cluster.living() - {node_id, *internal_kv.names(pool, Kept.LEAVING), *internal_kv.failures(pool)}
    if not others:
        raise ValueError(
            f"node {node_id[:8]} is the last one of pool {pool!r} that takes blocks: once it is drained, nothing is "
            f"stored; drain it all the same by `raykv drain --force`, or pool.drain(..., force=True)"
        )


def stay(pool: str, node_id: str) -> None:
    """Cancel a drain: blocks are stored on the node again, and a running drain ends.

    Raises RayError or ValueError if the directory is down.
    """
    events.tell("stay", node=node_id[:8])
    internal_kv.drop(pool, Kept.LEAVING, node_id)
    ray.get(named_actors.find_directory(pool).stay.remote(node_id), timeout=CALL_S)


def _left(pool: str, node_id: str, before: int) -> int:
    """Return the number of sole copies on a node, or `before` if the directory can't answer now."""
    try:
        answer = ray.get(named_actors.find_directory(pool).sole_copies.remote(node_id), timeout=CALL_S)
    except (RayError, ValueError):  # the directory is restarting
        return before
    return before if answer is None else SoleCopies(*answer).total


@ray.remote(num_cpus=0, max_retries=0)
def _take_over(pool: str, leaving: str, here: str, share: slice, seconds: float) -> None:
    """Pull a share of a leaving node's sole copies to this node, youngest first, until no more copies arrive."""
    session, end = Session(pool, here), time.monotonic() + seconds
    try:
        store = named_actors.find_store(pool, leaving)
        while time.monotonic() < end:
            directory = named_actors.find_directory(pool)
            answer = ray.get(directory.sole_copies.remote(leaving), timeout=CALL_S)
            if answer is None:
                return
            blocks = SoleCopies(*answer)
            sizes = np.frombuffer(ray.get(store.sizes.remote(blocks.locations), timeout=CALL_S), np.int64)
            keys = np.frombuffer(blocks.keys, np.uint8).reshape(-1, KEY_BYTES)
            mine = {size: keys[sizes == size][share] for size in np.unique(sizes).tolist()}
            pulled = sum(_fetch(session, part, size, end) for size, part in mine.items())
            if not pulled:
                return
    finally:
        session.close()


def _fetch(session: Session, keys: NDArray[np.uint8], block_bytes: int, end: float) -> int:
    """Pull blocks to this node until the time `end`. Returns how many blocks arrived."""
    # Match needs a CacheId. This one is a placeholder, since only the size of the blocks is known.
    pulled, cache = 0, CacheId("", 1, block_bytes, b"")
    for first in range(0, len(keys), KEYS_PER_CALL):
        part = keys[first : first + KEYS_PER_CALL]
        while len(part) and time.monotonic() < end:
            with Match(session, Keys(part, cache), tokens_per_s=1.0).ask() as match:
                pulled += match.fetch(whole=True)
                part = part[match.num_blocks + 1 :]  # skip the block at which the match ended: that block is gone
    session.directory.heartbeat()  # so that the directory counts the pulled blocks
    return pulled
