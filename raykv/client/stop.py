"""Ends a pool. Needs only the pool's name, which is part of its actors' names."""

import contextlib
import json
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv import cluster
from raykv.arena.files import arenas_of, remove_left_behind
from raykv.cluster import internal_kv, named_actors, ray_calls
from raykv.cluster.internal_kv import Kept
from raykv.config import FLUSH_DEADLINE_S

STOP_DEADLINE_S = 10.0  # deadline for each actor to answer `stop`
DEATH_DEADLINE_S = 20.0  # deadline for actors to end: Ray takes 5 s to end an actor that does not answer
START_DEADLINE_S = 300.0  # deadline for another process to end its start or stop of the pool
LOOK_S = 0.05  # interval between two checks whether an actor has ended


def stop_pool(name: str) -> bool:
    """End the pool of that name on every node and free its memory. Returns whether there was anything to end.

    Blocks that the external tier lacks are demoted first, as far as `write` and `min_hits` allow. Raises RayKVError
    in a process that has left its Ray cluster.
    """
    ray_calls.check_connected(name)
    with internal_kv.exclusive(name, START_DEADLINE_S):
        return end_pool(name)


def end_pool(name: str) -> bool:
    """Like `stop_pool`, but inside `internal_kv.exclusive`."""
    settings = internal_kv.get(name, Kept.SETTINGS)
    there = settings is not None or bool(named_actors.names(name))
    _stop_watching(name)
    living = cluster.living()
    stores = named_actors.find_stores(name, living)
    if settings is None or json.loads(settings).get("external"):
        _flush(list(stores.values()))
    internal_kv.drop(name, Kept.SETTINGS)  # so that nobody starts an actor of this pool again
    stops = {node_id: store.stop.remote() for node_id, store in stores.items()}
    ray_calls.finished(stops.values(), STOP_DEADLINE_S)
    stopped = {node_id for node_id, answer in stops.items() if _done(answer)}
    kill_actors(name)
    removed = _clean_up(name, living - stopped, stops.keys() - stopped)
    internal_kv.forget(name)
    return there or removed > 0


def drop_unstarted(name: str) -> None:
    """End the actors of a pool whose start failed. Without settings these actors have neither memory nor tier."""
    kill_actors(name)
    internal_kv.forget(name)


def kill_actors(name: str) -> None:
    """End all actors of a pool for good, and wait until Ray has forgotten their names."""
    end = time.monotonic() + DEATH_DEADLINE_S
    while names := named_actors.names(name):
        for actor in names:
            with contextlib.suppress(ValueError):
                ray_calls.kill(named_actors.find(actor))
        if time.monotonic() > end:
            return
        time.sleep(LOOK_S)


def _stop_watching(name: str) -> None:
    """End the supervisor, which would start ended actors again."""
    with contextlib.suppress(ValueError):
        supervisor = named_actors.find(named_actors.supervisor_name(name))
        with contextlib.suppress(RayError):
            ray_calls.get(supervisor.stop.remote(), timeout=STOP_DEADLINE_S)
        ray_calls.kill(supervisor)


def _flush(stores: list[Any]) -> None:
    """Make the stores that answer demote the blocks that their external tier lacks."""
    pings = {store.ping.remote(): store for store in stores}
    answered = ray_calls.finished(pings, STOP_DEADLINE_S)
    ray_calls.finished([pings[ping].flush.remote(FLUSH_DEADLINE_S) for ping in answered], FLUSH_DEADLINE_S)


def _clean_up(name: str, unstopped: set[str], silent: set[str]) -> int:
    """Remove the arenas of stores that did not answer `stop`. Returns the number of removed arenas.

    unstopped: Ray node ids of living nodes on which no store answered `stop`. silent: nodes whose stores may still be
    dying. A store may also be dying if its raylet is gone. In this case, tasks on the other raylets of its machine
    wait for the store's death; otherwise the arena could stay for days.
    """
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    living = cluster.living() & addresses.keys()
    dying = {address for node_id, address in addresses.items() if node_id not in living or node_id in silent}
    cleans = {
        _clean.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            name, DEATH_DEADLINE_S if addresses[node_id] in dying else 0.0
        ): addresses[node_id]
        for node_id in living
        if node_id in unstopped or addresses[node_id] in dying
    }
    removed, pending, end = 0, dict(cleans), time.monotonic() + DEATH_DEADLINE_S
    while pending and time.monotonic() < end:
        for clean in ray_calls.wait(list(pending), timeout=max(0.0, end - time.monotonic()))[0]:
            address, found = pending.pop(clean), _removed(clean)
            removed += found or 0
            if found:  # this task cleaned its machine; a task may find nothing because another task came first
                pending = {other: at for other, at in pending.items() if at != address}
    return removed


@ray.remote(num_cpus=0, max_retries=0)
def _clean(pool: str, seconds: float) -> int:
    """Remove arenas of this machine whose stores are dead. seconds: time to wait for stores that may still be dying."""
    end, ours = time.monotonic() + seconds, cluster.identity()
    removed = remove_left_behind(pool, ours)
    while arenas_of(pool, ours) and time.monotonic() < end:
        time.sleep(LOOK_S)
        removed += remove_left_behind(pool, ours)
    return removed


def _done(answer: Any) -> bool:
    try:
        ray_calls.get(answer, timeout=0)
    except RayError:
        return False
    return True


def _removed(clean: Any) -> int | None:
    """Return the number of arenas that a task removed; None if the task failed."""
    try:
        return int(ray_calls.get(clean, timeout=0))
    except RayError:
        return None
