"""Nodes that only pools keep busy: their stores end, so that Ray's autoscaler may take the nodes away.

To Ray a node with any actor is busy, one of 0 CPUs, too. What a node's store has goes to other nodes first, as with any
drain. When something else runs on the node again before Ray takes it away, the supervisor starts its store again.
"""

import contextlib
import time

import ray
from ray._private.state import state
from ray.exceptions import RayError

from raykv import cluster, internal_kv, named_actors
from raykv.actors.drain import check_others, drain, stay
from raykv.system import events

DRAIN_S = 60.0
STOP_S = 10.0
ENDED = b"its store has ended"  # in the internal KV; before that the node is being drained


class IdleNodes:
    """Which nodes of a pool have been idle for long, and which have no store for that. Not thread-safe but `release`.

    without_store: Ray node ids of nodes whose store has ended. long: of nodes that were idle for long at the last look.
    """

    def __init__(self, pool: str, seconds: float) -> None:
        """seconds: for which a node is idle before its store ends; 0: none ever does."""
        self._pool, self._seconds = pool, seconds
        self._since: dict[str, float] = {}  # nodes that were idle at the last look, by when they began to be
        self.long = set[str]()
        self.without_store = {node_id for node_id, ended in internal_kv.idle(pool).items() if ended == ENDED}
        for node_id in self.without_store:
            self._kill_store(node_id)  # the supervisor before this one may have died before it did

    def __bool__(self) -> bool:
        """Whether there are ever any."""
        return self._seconds > 0

    def look(self, nodes: set[str]) -> set[str]:
        """Those of these idle nodes that have been idle for long."""
        now = time.monotonic()
        self._since = {node_id: self._since.get(node_id, now) for node_id in nodes}
        self.long = {node_id for node_id, since in self._since.items() if now >= since + self._seconds}
        return self.long

    def release(self, node_id: str) -> None:
        """Drain a node and end its store; not if something else runs there by then.

        Raises RayError or ValueError where the directory is down, or no other node takes blocks.
        """
        check_others(self._pool, node_id)
        internal_kv.put(self._pool, f"idle/{node_id}", b"")
        left = drain(self._pool, node_id, DRAIN_S)
        if node_id not in internal_kv.idle(self._pool):  # somebody took the drain back
            return
        if node_id in used():
            self.take_back(node_id)
            return
        events.tell("idle", node=node_id[:8], left=left)
        internal_kv.put(self._pool, f"idle/{node_id}", ENDED)
        self.without_store.add(node_id)
        with contextlib.suppress(RayError, ValueError):
            ray.get(named_actors.find(named_actors.node_store_name(self._pool, node_id)).stop.remote(), timeout=STOP_S)
        self._kill_store(node_id)

    def take_back(self, node_id: str) -> None:
        """The node is to have a store, and takes blocks again."""
        stay(self._pool, node_id)
        internal_kv.drop(self._pool, f"idle/{node_id}")
        self.without_store.discard(node_id)

    def forget(self, node_id: str) -> None:
        """Ray has taken the node away."""
        internal_kv.drop(self._pool, f"idle/{node_id}")
        self.without_store.discard(node_id)

    def _kill_store(self, node_id: str) -> None:
        with contextlib.suppress(ValueError):
            ray.kill(named_actors.find(named_actors.node_store_name(self._pool, node_id)))


def used() -> set[str]:
    """Ray node ids of nodes where something runs that is not a pool's: an actor, or what has taken resources.

    The head is one of them: Ray never takes it away.
    """
    free = state.available_resources_per_node()
    taken = {
        node["NodeID"]
        for node in ray.nodes()
        if cluster.is_head(node)
        or any(free.get(node["NodeID"], {}).get(name, 0.0) < amount for name, amount in node["Resources"].items())
    }
    actors = state.actor_table(None, actor_state_name="ALIVE").values()
    return taken | {actor["Address"]["NodeID"] for actor in actors if not named_actors.is_ours(actor["Name"])}
