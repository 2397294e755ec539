"""The supervisor: keeps one node store on every living node, and one directory that answers.

Ray restarts an actor whose process died. The supervisor does the rest. It starts a store on each node that joins, and
makes the directory forget dead nodes. It replaces a directory that does not answer. It drains nodes that are about to
leave, and ends the stores of nodes that nobody else uses.
"""

import contextlib
import functools
import logging
import os
import threading
import time
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import (  # type: ignore[attr-defined]
    GcsNodeInfo,
    NodeSnapshot,
)
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from raykv.actors.directory.directory import start_directory
from raykv.actors.directory.successor import START_DEADLINE_S, Successor, is_alive
from raykv.actors.store.node_store import start_store
from raykv.actors.store.readiness import why_not_usable
from raykv.actors.supervisor.drain import check_others, drain
from raykv.actors.supervisor.idle_nodes import IdleNodes
from raykv.cluster import internal_kv, named_actors, ray_calls
from raykv.cluster.internal_kv import Kept
from raykv.config import HEARTBEAT_S
from raykv.errors import reason_of
from raykv.line.periodic import Periodic
from raykv.metrics.exporter import EXPORT_S, Exporter
from raykv.protocol.location import host_of
from raykv.system import events

log = logging.getLogger("raykv")
LATE_S = 2.0  # a directory is exported as down after REST_S + LATE_S without an answer
REST_S = 4.0  # time between two close looks while nothing changes
REPLACE_AFTER_S = 10.0  # time without an answer after which a directory is replaced
SILENT_S = 10.0  # time without an answer after which a new store's node is checked: it may lack raykv
RETRY_S = 30.0  # pause before a store that could not start is started again
DRAIN_AGAIN_S = 10.0  # pause after a drain that left blocks
NOTICE_S = 30.0  # time for draining a leaving node if Ray names no deadline
STOP_DEADLINE_S = 10.0  # maximum time for a running look to end


class Supervisor:
    """Watches a pool's nodes once a second, and more closely after a change. A restart loses no state."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        events.begin(named_actors.restarted(), role="supervisor", pool=pool, pid=os.getpid())
        self._stores: dict[str, Any] = {}  # by Ray node id
        self._pings: dict[str, Any] = {}  # by Ray node id: the pending answer of its store
        self._silent: dict[str, float] = {}  # by node: when its store was first seen silent, or last checked
        self._living: set[str] = set()  # nodes that were alive at the last look
        self._served: set[str] = set()  # nodes whose store has answered
        self._draining: set[str] = set()  # nodes that are being drained, or have been drained
        self._telling = threading.Lock()  # held while the directory is told which nodes leave or stay
        now, failures = time.monotonic(), internal_kv.failures(pool)  # the failures that an earlier supervisor saved
        self._failed = {node_id: (now, why) for node_id, why in failures.items()}  # by node: time and cause of failure
        self._answered, self._in_charge = now, ""  # time of the last answer; name of the directory in charge
        self._successor = Successor(pool)
        idle_node_s = (internal_kv.settings(pool) or {}).get("idle_node_s", 0.0)  # no settings: the pool is stopping
        self._idle = IdleNodes(pool, idle_node_s, self._telling)
        self._rests_until = 0.0  # no close look is due until this time, as the last close look found no problem
        self._exporter, self._exported, self._started = Exporter(pool), 0.0, time.time()
        self._loop = Periodic("raykv-supervisor", self._watch, self._on_error)
        self._loop.start()

    def __repr__(self) -> str:
        return f"Supervisor(pool={self._pool})"

    def ping(self) -> int:
        return os.getpid()

    def drain(self, node_id: str, seconds: float, force: bool) -> int:
        """Drain a node that is about to leave. Returns the number of sole copies that remain on the node.

        force: drain the node even if no other node accepts blocks. Otherwise ValueError is raised in this case.
        """
        if not force and node_id not in self._idle.without_store:
            check_others(self._pool, node_id)
        with self._telling:
            internal_kv.drop(self._pool, Kept.IDLE, node_id)  # from now on the node leaves even if it is in use
            if node_id in self._idle.without_store:
                internal_kv.put(self._pool, Kept.LEAVING, b"", node_id)
                return 0
        self._draining.add(node_id)
        left = 1
        try:
            left = drain(self._pool, node_id, seconds)
            return left
        finally:
            if left:  # so that another drain starts if Ray says, now or later, that the node leaves
                self._draining.discard(node_id)

    def cancel_drain(self, node_id: str) -> None:
        """Keep a node that was drained or is being drained. Raises ValueError if Ray says that the node leaves."""
        if node_id in _noticed():
            raise ValueError(
                f"Ray says that node {node_id[:8]} is about to leave, which raykv can't take back: see `ray status`, "
                f"and whoever drained it there"
            )
        with self._telling:
            self._idle.take_back(node_id)
            self._draining.discard(node_id)

    def stop(self) -> None:
        """Stop watching the nodes. The actor can't be used afterwards."""
        events.tell("stop")
        self._loop.stop()
        self._loop.join(STOP_DEADLINE_S)  # a running look may start a store

    def _watch(self) -> float:
        try:
            self._look()
        finally:  # export even if the look failed
            if time.monotonic() > self._exported + EXPORT_S:
                self._export()
        return self._pause()

    def _export(self) -> None:
        """Export the number of nodes, whether each node's store is up, and whether the directory is up."""
        self._exported = time.monotonic()
        self._exporter.set("start_time_seconds", self._started, role="supervisor")
        self._exporter.set("ray_nodes", len(self._living))
        for node_id in self._living - self._idle.without_store:
            up = node_id in self._served and node_id in self._stores and is_alive(self._stores[node_id])
            self._exporter.set("store_up", float(up), node=node_id)
        self._exporter.set("directory_up", float(self._exported - self._answered < REST_S + LATE_S))
        self._exporter.flush()

    def _on_error(self, error: Exception) -> float:
        # Ray may be in the middle of a change. The next look sees the completed change.
        log.error("%r: %r", self, error, exc_info=error)
        return self._pause()

    def _pause(self) -> float:
        return max(0.1, self._loop.rest_of(HEARTBEAT_S))

    def _look(self) -> None:
        """Ask Ray one question. Look closely if something changed, or REST_S after the last close look."""
        self._living, some_leave = _nodes()
        if some_leave or self._living - self._idle.without_store != self._stores.keys() or not self._at_rest():
            self._rests_until = 0.0
            self._look_closely(self._living)

    def _at_rest(self) -> bool:
        """Whether the last close look was recent and found no problem, and Ray has reported no dead store since."""
        alive = all(is_alive(store) for store in self._stores.values())
        return alive and self._served >= self._stores.keys() and time.monotonic() < self._rests_until

    def _look_closely(self, living: set[str]) -> None:
        if internal_kv.settings(self._pool) is None:  # the pool is being stopped
            return
        self._drop_failed()
        wanted = living - self._idle.without_store
        for node_id in wanted - self._stores.keys():
            if time.monotonic() - self._failed.get(node_id, (-RETRY_S, ""))[0] >= RETRY_S:
                events.tell("watch_node", node=node_id[:8])
                self._stores[node_id] = start_store(self._pool, node_id)
        directory = self._directory()  # called after `start_store`, so that stores start in parallel with a directory
        ending = living & self._idle.being_left
        for node_id in self._stores.keys() - wanted - ending:  # an actor pinned to a dead node never comes back
            ray.kill(self._stores.pop(node_id))
            self._pings.pop(node_id, None)
            self._served.discard(node_id)
        known = self._known(directory)
        for node_id in {host_of(name) for name in known.values()} - wanted:
            ray.get(directory.remove_node.remote(node_id), timeout=HEARTBEAT_S)
            events.tell("remove_node", node=node_id[:8])
            if node_id not in living:
                internal_kv.drop(self._pool, Kept.MEMORY, node_id)
        for node_id in set(internal_kv.names(self._pool, Kept.FAILED)) - living:
            internal_kv.drop(self._pool, Kept.FAILED, node_id)
        self._look_for_leaving(directory, living)
        if self._idle.seconds and self._leave_idle(directory, living):
            return
        self._keep_successor(directory, living)
        self._rests_until = time.monotonic() + REST_S if known else 0.0

    def _look_for_leaving(self, directory: Any, living: set[str]) -> None:
        with self._telling:
            for node_id in internal_kv.names(self._pool, Kept.LEAVING):
                if node_id in living:
                    ray.get(directory.leave.remote(node_id), timeout=HEARTBEAT_S)  # again: the directory may be new
                else:
                    internal_kv.drop(self._pool, Kept.LEAVING, node_id)
        for node_id, seconds in _noticed().items():
            if node_id in self._stores and node_id not in self._draining:
                self._draining.add(node_id)
                threading.Thread(target=self._drain, args=(node_id, seconds), name="raykv-drain", daemon=True).start()

    def _leave_idle(self, directory: Any, living: set[str]) -> bool:
        """Leave nodes that only pools have used for a long time. Returns whether another directory is in charge now."""
        long = self._idle.look(living, self._served)
        away = long | self._idle.without_store
        in_charge = ray.get(directory.node_id.remote(), timeout=HEARTBEAT_S) if away else ""
        for node_id in long - {in_charge}:
            self._idle.leave(node_id)
        stands_by = self._successor.stands_by(_other(self._in_charge)) and self._successor.node_id in living - away
        if in_charge in away and stands_by:
            self._start_directory(self._in_charge, "nobody else uses its node")
            return True
        return False

    def _drain(self, node_id: str, seconds: float) -> None:
        left = 1
        try:
            left = drain(self._pool, node_id, seconds)
        except (RayError, ValueError) as error:
            log.warning("%r: node %s leaves, and could not be drained yet: %r", self, node_id[:8], error)
        if left:
            self._loop.sleep(DRAIN_AGAIN_S)
            self._draining.discard(node_id)  # the next look tries again

    def _drop_failed(self) -> None:
        """Forget permanently dead stores. New stores start at once, or after RETRY_S if the old one never answered."""
        done = ray_calls.finished(self._pings.values(), 0.0)
        for node_id, store in list(self._stores.items()):
            ping = self._pings.get(node_id)
            try:
                if ping is None or ping in done:
                    self._pings[node_id] = store.ping.remote()
                if ping is not None and ping in done:
                    ray.get(ping, timeout=HEARTBEAT_S)
                    self._served.add(node_id)
                    self._silent.pop(node_id, None)
                    if self._failed.pop(node_id, None):
                        internal_kv.drop(self._pool, Kept.FAILED, node_id)
            except ActorDiedError as error:
                del self._stores[node_id], self._pings[node_id]
                if node_id not in self._served:
                    self._has_failed(node_id, reason_of(error))
                self._served.discard(node_id)
            except RayError as error:
                log.debug("%r: store of node %s: %r", self, node_id[:8], error)
            if node_id in self._stores and node_id not in self._served and ping not in done:
                self._look_at_silent(node_id)

    def _look_at_silent(self, node_id: str) -> None:
        """Kill a silent store if its node can't import raykv. Otherwise Ray would restart that store forever."""
        since = self._silent.setdefault(node_id, time.monotonic())
        if time.monotonic() < since + SILENT_S:
            return
        self._silent[node_id] = time.monotonic()
        if why := why_not_usable(node_id, HEARTBEAT_S):
            ray.kill(self._stores.pop(node_id))
            self._pings.pop(node_id, None)
            self._has_failed(node_id, why)

    def _has_failed(self, node_id: str, why: str) -> None:
        """Save why a node's store could not start, for the pool's status and for clients on that node."""
        self._failed[node_id] = (time.monotonic(), why)
        internal_kv.put(self._pool, Kept.FAILED, why.encode(), node_id)
        log.warning("%r: node %s has no store, and is asked again in %.0f s: %s", self, node_id[:16], RETRY_S, why)

    def _known(self, directory: Any) -> dict[int, str]:
        """Return the directory's nodes by index. An answer also proves that the directory is alive."""
        try:
            known: dict[int, str] = ray.get(directory.nodes.remote(), timeout=HEARTBEAT_S)
            self._answered = time.monotonic()
            return known
        except RayError:
            if time.monotonic() - self._answered > REPLACE_AFTER_S:
                self._start_directory(self._in_charge)
            return {}

    def _directory(self) -> Any:
        self._in_charge = internal_kv.in_charge(self._pool).name
        try:
            return named_actors.find(self._in_charge)
        except ValueError:
            return self._start_directory(self._in_charge)

    def _start_directory(self, old: str, why: str = "it does not answer") -> Any:
        """Put the other directory in charge instead of `old`.

        If `old` is still alive, all processes refuse it, because the new directory has a newer epoch.
        """
        if internal_kv.settings(self._pool) is None:
            raise RuntimeError(f"pool {self._pool!r} has no settings in Ray's internal KV: it was stopped")
        if internal_kv.in_charge(self._pool).name != old:  # the other directory took over by itself
            return named_actors.find_directory(self._pool)
        directory = start_directory(self._pool, _other(old), ray.get_runtime_context().get_node_id())
        stood_by = self._successor.stands_by(_other(old))
        try:
            ray.get(directory.ping.remote(), timeout=REPLACE_AFTER_S if stood_by else START_DEADLINE_S)
        except GetTimeoutError:
            if internal_kv.in_charge(self._pool).name == old:  # otherwise `directory` took over meanwhile
                self._successor.give_up(directory, "it does not answer either")
            raise
        ray.get(directory.take_charge.remote(), timeout=START_DEADLINE_S)
        self._answered = time.monotonic()
        if internal_kv.in_charge(self._pool).name != old:
            events.tell("replace_directory", name=old, why=why)
            with contextlib.suppress(ValueError):
                ray.kill(named_actors.find(old))
        return named_actors.find_directory(self._pool)

    def _keep_successor(self, directory: Any, living: set[str]) -> None:
        """Keep the other directory on standby, on another node if there is one."""
        if not self._successor.due():
            return
        node_id = ray.get(directory.node_id.remote(), timeout=HEARTBEAT_S)
        bad_places = {node_id, *internal_kv.names(self._pool, Kept.LEAVING)} | self._idle.long
        others = sorted((living & self._served) - bad_places)
        bad = self._successor.look(_other(self._in_charge), node_id, others)
        if bad is not None and internal_kv.in_charge(self._pool).name == self._in_charge:  # else `bad` took over
            self._successor.give_up(bad, "it is of no use where it is")


def _other(name: str) -> int:
    """Return the number of a pool's other directory."""
    return 2 if name.endswith("-1") else 1


def _nodes() -> tuple[set[str], bool]:
    """Return the Ray node ids of living nodes, and whether any of these nodes is about to leave."""
    nodes = _gcs(ray.get_runtime_context().gcs_address).get_all_node_info().values()
    alive = [node for node in nodes if node.state == GcsNodeInfo.ALIVE]
    leaving = any(node.state_snapshot.state == NodeSnapshot.DRAINING for node in alive)
    return {node.node_id.hex() for node in alive}, leaving


def _noticed() -> dict[str, float]:
    """Return the seconds until each leaving node's deadline in Ray, or NOTICE_S if Ray names no future deadline."""
    client, now = _gcs(ray.get_runtime_context().gcs_address), time.time() * 1000
    return {
        node_id: (deadline - now) / 1000 if deadline > now else NOTICE_S
        for node_id, deadline in client.get_draining_nodes().items()
    }


@functools.cache
def _gcs(address: str) -> Any:
    return GcsClient(address=address)


def start_supervisor(pool: str) -> None:
    """Start the supervisor on Ray's head node, or find the running one. Returns at once. Ray then keeps it running."""
    options = named_actors.options(named_actors.supervisor_name(pool), None, threads=4)
    ray.remote(Supervisor).options(**options).remote(pool)
