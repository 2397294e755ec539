"""Ends the stores of nodes that only pools use, so that Ray's autoscaler can remove these nodes.

Ray considers a node busy if any actor runs there, even if the actor uses 0 CPUs. Before a store ends, its blocks are
moved to other nodes, as in any drain. If something else runs on the node before Ray removes it, the supervisor starts
the store again.
"""

import contextlib
import logging
import secrets
import threading
import time

import ray
from ray._private.state import state
from ray.exceptions import RayError

from raykv import cluster
from raykv.actors.supervisor.drain import check_others, drain, stay
from raykv.cluster import internal_kv, named_actors
from raykv.cluster.internal_kv import Kept
from raykv.system import events

log = logging.getLogger("raykv")
DRAIN_S = 60.0  # deadline of one drain; drains are repeated while they move blocks
STOP_S = 10.0  # maximum time for a store on an idle node to stop


class IdleNodes:
    """Finds nodes that have been idle for a long time, and leaves them: moves their blocks away, and ends their stores.

    Notes about these nodes are kept in Ray's internal KV.
    seconds: idle time after which a node is left; 0: never. The other attributes are sets of Ray node ids:
    without_store: nodes that were left; being_left: nodes that are being emptied; long: nodes that had been idle for
    `seconds` at the last look.
    """

    def __init__(self, pool: str, seconds: float, telling: threading.Lock) -> None:
        """telling: lock that is held while the directory is told which nodes leave or stay."""
        self._pool, self.seconds, self._telling = pool, seconds, telling
        self._since: dict[str, float] = {}  # by node: start of its idle time, as of the last look
        self.long, self.being_left = set[str](), set[str]()
        self.without_store = internal_kv.left_nodes(pool) if seconds else set()
        for node_id in self.without_store:
            self._end_store(node_id)  # an earlier supervisor may have died before it ended the store

    def look(self, living: set[str], served: set[str]) -> set[str]:
        """Take back nodes that are in use again. Returns the nodes idle for `seconds`, which the caller may `leave`.

        living: nodes that are alive. served: nodes whose store has answered.
        """
        used, notes = used_nodes(), internal_kv.idle_nodes(self._pool)
        self.without_store &= living
        for node_id in notes.keys() - self.being_left:
            if node_id not in living:
                internal_kv.drop(self._pool, Kept.IDLE, node_id)
            elif node_id in used or not notes[node_id]:
                with self._telling:
                    self.take_back(node_id)
        drained = set(internal_kv.names(self._pool, Kept.LEAVING))  # also nodes that are drained for another reason
        now, idle = time.monotonic(), (served & living) - used - drained - self.being_left - self.without_store
        self._since = {node_id: self._since.get(node_id, now) for node_id in idle}
        self.long = {node_id for node_id, since in self._since.items() if now >= since + self.seconds}
        return self.long

    def leave(self, node_id: str) -> None:
        """Start a thread that drains a node. The thread then ends the node's store, unless the node is in use again."""
        self.being_left.add(node_id)
        threading.Thread(target=self._leave, args=(node_id,), name="raykv-leave", daemon=True).start()

    def take_back(self, node_id: str) -> None:
        """Allow the node to have a store and to accept blocks again. The caller must hold `telling`."""
        stay(self._pool, node_id)
        internal_kv.drop(self._pool, Kept.IDLE, node_id)
        self.without_store.discard(node_id)

    def _leave(self, node_id: str) -> None:
        try:
            self._empty_and_end(node_id)
        except (RayError, ValueError) as error:  # the next look takes the node back
            log.debug("pool %s: node %s is idle, and could not be left: %r", self._pool, node_id[:8], error)
        finally:
            self.being_left.discard(node_id)

    def _empty_and_end(self, node_id: str) -> None:
        note = secrets.token_bytes(8)
        with self._telling:  # if two nodes leave at once, the second check sees the first node's note
            check_others(self._pool, node_id)
            internal_kv.put(self._pool, Kept.IDLE, note, node_id)
            internal_kv.put(self._pool, Kept.LEAVING, b"", node_id)
        left = drain(self._pool, node_id, DRAIN_S)
        while left and (again := drain(self._pool, node_id, DRAIN_S)) < left:
            left = again
        with self._telling:
            if internal_kv.get(self._pool, Kept.IDLE, node_id) != note:  # `drain` or `cancel_drain` dropped the note
                return
            if node_id in used_nodes():
                self.take_back(node_id)
                return
            internal_kv.put(self._pool, Kept.IDLE, internal_kv.LEFT, node_id)
            self.without_store.add(node_id)
        events.tell("idle", node=node_id[:8], left=left)
        self._end_store(node_id)

    def _end_store(self, node_id: str) -> None:
        with contextlib.suppress(ValueError):
            store = named_actors.find_store(self._pool, node_id)
            with contextlib.suppress(RayError):
                ray.get(store.stop.remote(), timeout=STOP_S)
            ray.kill(store)


def used_nodes() -> set[str]:
    """Return the Ray ids of nodes in use: an actor that belongs to no pool runs there, or resources are taken.

    The result includes the head node, which Ray never removes.
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
