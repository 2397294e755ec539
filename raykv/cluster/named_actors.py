"""The actors of a pool: detached, and named in Ray's namespace `raykv`."""

import contextlib
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv import cluster
from raykv.cluster import internal_kv, ray_calls
from raykv.config import NAMESPACE
from raykv.system.fork import refuse_forked

PREFIX = "raykv/"


def directory_name(pool: str, number: int) -> str:
    """Ray's name of a directory. A pool has two directories, 1 and 2: the directory in charge and its successor."""
    return f"{_actors(pool)}directory-{number}"


def supervisor_name(pool: str) -> str:
    """Ray's name of the pool's supervisor."""
    return f"{_actors(pool)}supervisor"


def node_store_name(pool: str, node_id: str) -> str:
    """Ray's name of a node's store. node_id: Ray's id of the node."""
    return f"{_actors(pool)}node-{node_id[:16]}"


def page_name(pool: str) -> str:
    """Ray's name of the actor that serves `raykv ui`."""
    return f"{_actors(pool)}ui"


def is_ours(name: str) -> bool:
    """Whether an actor of that name belongs to a pool."""
    return name.startswith(PREFIX)


def _actors(pool: str) -> str:
    """The prefix of the pool's actor names.

    It distinguishes pools in Ray's dashboard, which shows no namespace.
    """
    return f"{PREFIX}{pool}/"


def names(pool: str) -> list[str]:
    """Return the names of all actors of a pool that Ray knows."""
    ray_calls.check_connected(pool)
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = (actor["name"] for actor in named if actor["namespace"] == NAMESPACE)
    return sorted(name for name in ours if name.startswith(_actors(pool)))


def find(name: str) -> Any:
    """Return a handle of a raykv actor. ValueError if there is no such actor."""
    refuse_forked()
    return ray_calls.get_actor(name, namespace=NAMESPACE)


def find_store(pool: str, node_id: str) -> Any:
    """Return a handle of the node's store. ValueError if the node has none."""
    return find(node_store_name(pool, node_id))


def find_stores(pool: str, node_ids: Iterable[str]) -> dict[str, Any]:
    """Return handles of these nodes' stores, by Ray node id. Leaves out nodes without a store."""
    found = {}
    for node_id in node_ids:
        with contextlib.suppress(ValueError):
            found[node_id] = find_store(pool, node_id)
    return found


def find_directory(pool: str) -> Any:
    """Return a handle of the directory in charge. ValueError if the pool has none."""
    return find(internal_kv.in_charge(pool).name)


def options(name: str, node_id: str | None, threads: int = 1) -> dict[str, Any]:
    """Return options of a detached actor that stays on `node_id` (None: Ray's head). threads: maximum concurrent calls.

    The affinity is hard. With a soft affinity, Ray first asks any raylet, and an actor that needs no CPU stays there.
    """
    head = {"resources": {cluster.HEAD: 0.001}}  # like Serve's controller, the actor moves to a new head
    place = head if node_id is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        "enable_task_events": False,  # the dashboard need not list calls that come every second
        "max_concurrency": threads,
        **place,
    }


def restarted() -> bool:
    """Whether Ray has restarted the actor of this process after a death."""
    return bool(ray_calls.get_runtime_context().was_current_actor_reconstructed)
