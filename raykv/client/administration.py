"""Administration of a pool, and the pool's counts. These calls do not make the process a client of the pool."""

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from ray.exceptions import RayError, RayTaskError

from raykv import cluster
from raykv.client.session import settings_of
from raykv.cluster import internal_kv, named_actors, ray_calls
from raykv.cluster.internal_kv import Kept
from raykv.config import Quota, Size, check_tenant, memory_size
from raykv.errors import CapacityError
from raykv.protocol.location import CONTENT_BYTES, host_of
from raykv.system import raylets

ADMIN_DEADLINE_S = 10.0  # deadline for each answer to an administrator; `resize` waits for its deadline plus this time
STORES_DEADLINE_S = 1.0  # deadline for all stores to send their counts; stores that hang are left out
DRAIN_GRACE_S = 60.0  # a caller of `drain` waits twice the drain's deadline, plus this time


class Administration:
    """Calls that a process can make without being a client. They map no memory and open no line to the directory.

    name: name of the pool. Every method raises PoolNotFound if the pool does not run, and RayKVError in a process that
    has left its Ray cluster.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def stats(self) -> dict[str, Any]:
        """Like KVPool.stats, but without `faults`: only a client counts faults."""
        settings_of(self.name)
        counts = directory_stats(self.name)
        names = list(counts.get("nodes", ()))
        stores = store_stats(self.name, {host_of(name) for name in names})
        failed = internal_kv.failures(self.name)
        return {**counts, "failed": failed, "transports": transports_among(names, stores)}

    def clear(self) -> int:
        """Remove all blocks for good: no restart brings them back. Returns the number of keys that the pool had.

        Raises RayError if the pool's actors do not answer, and ValueError if the pool has no directory.
        """
        directory = self._directory()
        floor, count = ray_calls.get(directory.clear.remote(), timeout=ADMIN_DEADLINE_S)
        names = ray_calls.get(directory.nodes.remote(), timeout=ADMIN_DEADLINE_S).values()
        stores = named_actors.find_stores(self.name, set(map(host_of, names))).values()
        internal_kv.drop_other_tokens(self.name)
        content = secrets.token_bytes(CONTENT_BYTES)
        internal_kv.put(self.name, Kept.SEED, content)  # for a restarted store whose external tier has no marker
        ray_calls.get([store.clear.remote(floor, content) for store in stores], timeout=ADMIN_DEADLINE_S)
        return int(count)

    def own_node(self) -> str:
        """Return this machine's Ray node id. ValueError unless the machine runs exactly one node of this cluster."""
        here = sorted(cluster.living() & raylets.nodes())
        if len(here) != 1:
            raise ValueError(
                f"this machine runs {len(here)} nodes of the Ray cluster, so which one is meant? Give its Ray node id: "
                f"{', '.join(here) or 'see `raykv status --json`'}"
            )
        return here[0]

    def drain(self, node_id: str, deadline: float = 60.0, *, force: bool = False) -> int:
        """Move the blocks off a node that is about to leave. The node gets no new blocks until `cancel_drain`.

        Blocks that no other node has are copied to an external tier that all nodes share, or to other nodes.
        node_id: Ray's id of the node. deadline: seconds. force: drain even the last node that accepts blocks.
        Returns the number of blocks that would still be lost with the node. Raises ValueError if no living node has
        that id. Without `force`, also raises ValueError if no other node accepts blocks. Raises RayError if the pool's
        actors do not answer.
        """
        supervisor = self._supervisor_of(node_id)
        with _plainly(ValueError):
            asked = supervisor.drain.remote(node_id, deadline, force)
            left: int = ray_calls.get(asked, timeout=2 * deadline + DRAIN_GRACE_S)
        return left

    def cancel_drain(self, node_id: str) -> None:
        """Undo `drain`: the pool stores blocks on the node again. A running drain ends.

        Raises ValueError if no living node has that id, or if Ray itself says that the node is about to leave. Raises
        RayError if the pool's actors do not answer.
        """
        supervisor = self._supervisor_of(node_id)
        with _plainly(ValueError):
            ray_calls.get(supervisor.cancel_drain.remote(node_id), timeout=2 * ADMIN_DEADLINE_S)

    def resize(self, node_id: str, cpu_memory: Size, deadline: float = 60.0) -> int:
        """Change the memory of a node while the pool is in use.

        If a node gets less memory, it loses its coldest blocks. Slabs with leased blocks stay until the leases end,
        even after the deadline. The new size survives restarts of the node's store, but not the end of the pool.
        node_id: Ray's id of the node. cpu_memory: as in PoolConfig, a fraction of the node's memory or bytes.
        deadline: seconds. Returns the new size of the node's CPU tier in bytes, a multiple of the slab size. If the
        deadline passes, returns the size at that time. Raises CapacityError if the node does not have the memory.
        Raises ValueError for a bad `cpu_memory`, or if no living node has that id. Both errors leave the size
        unchanged. Raises RayError if the pool's actors do not answer.
        """
        settings_of(self.name)
        cpu_memory = memory_size("cpu_memory", cpu_memory)
        _check_living(node_id)
        store = named_actors.find_store(self.name, node_id)
        with _plainly(CapacityError, ValueError):
            size: int = ray_calls.get(store.resize.remote(cpu_memory, deadline), timeout=deadline + ADMIN_DEADLINE_S)
        return size

    def set_quota(self, tenant: str, minimum: float = 0.0, maximum: float = 1.0) -> None:
        """Set a tenant's minimum and maximum share of the pool's memory, while the pool is in use.

        Other tenants may use the part of the minimum that the tenant does not use, but they never evict the tenant's
        blocks within its minimum. At the maximum, each new block of the tenant evicts another block of the tenant. The
        pool keeps both shares until it stops.
        tenant: the name given to `cache`, or `pool.tenant_of(salt)` for a cache without a named tenant.
        minimum, maximum: shares of the memory of all nodes (GPUs do not count), 0 to 1.
        Raises ValueError for a bad name, for impossible shares, if the minima of all tenants would add up to more than
        1, and for a 16th tenant with a quota. Raises RayError if the directory does not answer.
        """
        directory, tenant, quota = self._directory(), check_tenant(tenant), Quota(minimum, maximum)
        with _plainly(ValueError):
            ray_calls.get(directory.set_quota.remote(tenant, quota.minimum, quota.maximum), timeout=ADMIN_DEADLINE_S)

    def remove_quota(self, tenant: str) -> bool:
        """Remove a tenant's quota: the tenant then competes for memory with all tenants without a quota.

        Returns whether the tenant had a quota. Raises RayError if the directory does not answer.
        """
        removed = self._directory().remove_quota.remote(tenant)
        return bool(ray_calls.get(removed, timeout=ADMIN_DEADLINE_S))

    def quotas(self) -> dict[str, dict[str, Any]]:
        """Return quota and memory use of each tenant with a quota. The entry "" counts all other tenants together.

        used: bytes of the tenant's blocks in memory, each block counted once. minimum, maximum: as in `set_quota`.
        minimum_bytes, maximum_bytes: these shares in bytes. evicted: number of the tenant's blocks that were evicted
        since this directory took charge. Raises RayError if the directory does not answer.
        """
        asked = self._directory().quotas.remote()
        answer: dict[str, dict[str, Any]] = ray_calls.get(asked, timeout=ADMIN_DEADLINE_S)
        return answer

    def _directory(self) -> Any:
        """Return the directory in charge of the running pool. ValueError if the pool has none."""
        settings_of(self.name)
        return named_actors.find_directory(self.name)

    def _supervisor_of(self, node_id: str) -> Any:
        """Return the running pool's supervisor. ValueError if `node_id` is not the id of a living node."""
        settings_of(self.name)
        _check_living(node_id)
        return named_actors.find(named_actors.supervisor_name(self.name))


@contextlib.contextmanager
def _plainly(*kinds: type[Exception]) -> Iterator[None]:
    """Raise an actor's errors again, without the actor's traceback. kinds: types of these errors."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, kinds):
            raise type(error.cause)(str(error.cause)) from None
        raise


def directory_stats(pool: str, seconds: float = ADMIN_DEADLINE_S) -> dict[str, Any]:
    """Return the counts of the directory in charge, or {} if it does not answer within `seconds`."""
    try:
        answer: dict[str, Any] = ray_calls.get(named_actors.find_directory(pool).stats.remote(), timeout=seconds)
        return answer
    except (ValueError, RayError):
        return {}


def store_stats(pool: str, node_ids: set[str]) -> dict[str, dict[str, Any]]:
    """Return the stores' counts by Ray node id. Leaves out stores that do not answer within STORES_DEADLINE_S."""
    stores = named_actors.find_stores(pool, node_ids)
    asked = {node_id: store.stats.remote() for node_id, store in stores.items()}
    done = set(ray_calls.finished(asked.values(), STORES_DEADLINE_S))
    found = {}
    for node_id, answer in asked.items():
        with contextlib.suppress(RayError):
            if answer in done:
                found[node_id] = ray_calls.get(answer)
    return found


def transports_among(names: list[str], stores: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of the stores' `transports` whose `from` is one of these names: see NodeStore.stats."""
    return [entry for store in stores.values() for entry in store["transports"] if entry["from"] in names]


def _check_living(node_id: str) -> None:
    living = cluster.living()
    if node_id not in living:
        raise ValueError(f"node {node_id!r} is not a living node of this Ray cluster: give one of {', '.join(living)}")
