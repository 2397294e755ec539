"""How a pool ends: its actors are found by name, so that nothing else has to be left of it."""

import contextlib
import json
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv import registry
from raykv.arena.files import remove_left_behind
from raykv.config import FLUSH_DEADLINE_S

STOP_DEADLINE_S = 10.0
DEATH_DEADLINE_S = 20.0  # Ray takes 5 s to end an actor that does not answer
START_DEADLINE_S = 300.0  # for a start that is under way
LOOK_S = 0.05


def stop_pool(name: str) -> bool:
    """End the pool of that name on every node and give its memory back. Returns whether there was anything of it.

    What is on its way to an external tier is written first.
    """
    with registry.exclusive(name, START_DEADLINE_S):
        return end_pool(name)


def end_pool(name: str) -> bool:
    """As `stop_pool`, for a process that has the pool to itself: see `registry.exclusive`."""
    settings = registry.get(name, "settings")
    there = settings is not None or bool(registry.actor_names(name))
    _stop_watching(name)
    living = registry.living()
    stores = _stores(name, living)
    if settings is None or json.loads(settings).get("external"):
        _flush(list(stores.values()))
    registry.drop(name, "settings")  # nobody starts what ends now
    stops = {node_id: store.stop.remote() for node_id, store in stores.items()}
    if stops:
        ray.wait(list(stops.values()), num_returns=len(stops), timeout=STOP_DEADLINE_S)
    stopped = {node_id for node_id, answer in stops.items() if _done(answer)}
    kill_actors(name)
    silent = stops.keys() - stopped
    cleans = [
        _clean.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            name, DEATH_DEADLINE_S if node_id in silent else 0.0
        )
        for node_id in living - stopped
    ]
    ray.wait(cleans, num_returns=len(cleans), timeout=DEATH_DEADLINE_S) if cleans else None
    registry.forget(name)
    return there or any(_removed(clean) for clean in cleans)


def drop_unstarted(name: str) -> None:
    """End the actors of a pool that was not started after all: without settings they have neither memory nor tier."""
    kill_actors(name)
    registry.forget(name)


def kill_actors(name: str) -> None:
    """End all actors of a pool for good, and wait until Ray has forgotten their names."""
    end = time.monotonic() + DEATH_DEADLINE_S
    while names := registry.actor_names(name):
        for actor in names:
            with contextlib.suppress(ValueError):
                ray.kill(registry.find(actor))
        if time.monotonic() > end:
            return
        time.sleep(LOOK_S)


def _stop_watching(name: str) -> None:
    """End the supervisor, which would start again what ends."""
    with contextlib.suppress(ValueError):
        supervisor = registry.find(registry.supervisor_name(name))
        with contextlib.suppress(RayError):
            ray.get(supervisor.stop.remote(), timeout=STOP_DEADLINE_S)
        ray.kill(supervisor)


def _stores(name: str, living: set[str]) -> dict[str, Any]:
    found = {}
    for node_id in living:
        with contextlib.suppress(ValueError):
            found[node_id] = registry.find(registry.node_store_name(name, node_id))
    return found


def _flush(stores: list[Any]) -> None:
    """Have the stores that answer demote what is not in their external tier yet."""
    pings = {store.ping.remote(): store for store in stores}
    answered = ray.wait(list(pings), num_returns=len(pings), timeout=STOP_DEADLINE_S)[0] if pings else []
    flushes = [pings[ping].flush.remote(FLUSH_DEADLINE_S) for ping in answered]
    if flushes:
        ray.wait(flushes, num_returns=len(flushes), timeout=FLUSH_DEADLINE_S)


@ray.remote(num_cpus=0, max_retries=0)
def _clean(pool: str, seconds: float) -> int:
    """Remove what stores of this node left that could not stop. seconds: for one that may still be dying."""
    end = time.monotonic() + seconds
    while not (removed := remove_left_behind(pool)) and time.monotonic() < end:
        time.sleep(0.1)
    return removed


def _done(answer: Any) -> bool:
    try:
        ray.get(answer, timeout=0)
    except RayError:
        return False
    return True


def _removed(clean: Any) -> int:
    """How many arenas; 0 on a node that was lost meanwhile, or has no raykv."""
    try:
        return int(ray.get(clean, timeout=0))
    except RayError:
        return 0
