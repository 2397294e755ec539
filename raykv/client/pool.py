"""A pool, from the process that uses it."""

import contextlib
import secrets
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raykv import keys, registry
from raykv.arena.gpu.device import uuid_of
from raykv.client.cache import KVCache
from raykv.client.session import Session, connect
from raykv.client.stop import stop_pool
from raykv.config import Size, memory_size
from raykv.errors import CapacityError
from raykv.protocol import CONTENT_BYTES, host_of
from raykv.system import free_memory

RECOMPUTE_TOKENS_PER_S = 10_000.0  # a model of 8B parameters on a fast GPU
ADMIN_DEADLINE_S = 10.0
TRANSPORTS_DEADLINE_S = 1.0  # a store that is stopped is not waited for
STOP_DEADLINE_S = 60.0


class KVPool:
    """A pool of blocks that the nodes of a Ray cluster share. Get one from `start` or `attach`. Thread-safe.

    It survives restarts of the pool's actors. It pickles to its name, and attaches where it arrives.
    name: the pool's. node_id: of the Ray node that this process is on. session: this process's part in the pool.
    """

    def __init__(self, name: str, node_id: str | None = None, gpu: str | None = None) -> None:
        """For `start` and `attach`. gpu: UUID. Raises as `attach`."""
        self.session = Session(name, node_id, gpu)
        self.name, self.node_id = name, self.session.node_id

    def __reduce__(self) -> tuple[Any, ...]:
        return attach, (self.name,)

    def __repr__(self) -> str:
        return f"KVPool(name={self.name!r}, node={self.node_id[:8]})"

    def cache(
        self,
        *,
        model: str,
        block_tokens: int,
        block_bytes: int,
        revision: str = "",
        dtype: str = "",
        layout: str = "",
        parallel: str = "",
        part: int = 0,
        salt: str = "",
        recompute_tokens_per_s: float = RECOMPUTE_TOKENS_PER_S,
    ) -> KVCache:
        """A key space of blocks of `block_tokens` tokens and `block_bytes` bytes.

        Equal arguments give equal caches, in every process of the cluster. Whatever makes KV differ must be in them, or
        one engine reads bytes that are no KV of its own: model, revision, dtype, layout (of a block's bytes), parallel
        (shape), part (index of a piece of a model that spans nodes). salt separates tenants that cooperate.
        recompute_tokens_per_s: how fast the engine prefills, which limits waits for an external tier. It is no part of
        what the cache is.
        Raises ValueError for arguments that are missing or make no block.
        """
        if not model or block_tokens < 1 or block_bytes < 1:
            raise ValueError(f"model={model!r}, block_tokens={block_tokens}, block_bytes={block_bytes}: all are needed")
        if not recompute_tokens_per_s > 0:
            raise ValueError(f"recompute_tokens_per_s={recompute_tokens_per_s}: give the engine's prefill rate")
        local = self.session.local
        if local and block_bytes > local.arena.slab_bytes:
            raise ValueError(
                f"block_bytes={block_bytes} is more than a slab of this pool ({local.arena.slab_bytes} bytes): "
                f"use fewer tokens a block, or start the pool with more cpu_memory"
            )
        root = keys.root(
            self.session.secret,
            model=model,
            revision=revision,
            dtype=dtype,
            layout=layout,
            parallel=parallel,
            part=part,
            salt=salt,
            block_tokens=block_tokens,
            block_bytes=block_bytes,
        )
        cache = keys.CacheId(model, block_tokens, block_bytes, keys.digest(root))
        return KVCache(self.session, cache, root, recompute_tokens_per_s)

    def stats(self) -> dict[str, Any]:
        """The directory's counts of the whole pool, and `faults` of this client by kind. Nothing else while it is down.

        nodes: counts by Ray node id; of a GPU by the node's id, "/" and the GPU's UUID.
        socket: host and port where the directory listens, and `connections` to it, of clients and of node stores; None
        where all calls go through Ray.
        failed: why other nodes have no store, by Ray node id.
        transports: one entry for each memory (`reader`) that has read from another (`from`): the `transport` that was
        used last, its GB/s (1e9 bytes) as `gbps`, and how often each has `failed`. Stores that do not answer in time
        are left out.
        """
        try:
            answer = ray.get(registry.find_directory(self.name).stats.remote(), timeout=ADMIN_DEADLINE_S)
        except (ValueError, RayError):
            answer = {}
        transports = self._transports(list(answer.get("nodes", ())))
        failed = registry.failures(self.name)
        return {**answer, "failed": failed, "transports": transports, "faults": dict(self.session.directory.faults)}

    def _transports(self, names: list[str]) -> list[dict[str, Any]]:
        asked = []
        for node_id in {host_of(name) for name in names}:
            with contextlib.suppress(ValueError):
                asked.append(registry.find(registry.node_store_name(self.name, node_id)).stats.remote())
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=TRANSPORTS_DEADLINE_S) if asked else ([], [])
        found: list[dict[str, Any]] = []
        for answer in answered:
            with contextlib.suppress(RayError):
                found += ray.get(answer)["transports"]
        return [entry for entry in found if entry["from"] in names]

    def clear(self) -> int:
        """Forget every block for good: no restart finds them again. Returns how many keys there were.

        Raises RayError if the pool's actors do not answer, and ValueError if it has no directory.
        """
        directory = registry.find_directory(self.name)
        floor, count = ray.get(directory.clear.remote(), timeout=ADMIN_DEADLINE_S)
        stores = []
        names = ray.get(directory.nodes.remote(), timeout=ADMIN_DEADLINE_S).values()
        for node_id in {host_of(name) for name in names}:
            with contextlib.suppress(ValueError):  # a node that was lost meanwhile
                stores.append(registry.find(registry.node_store_name(self.name, node_id)))
        content = secrets.token_bytes(CONTENT_BYTES)
        ray.get([store.clear.remote(floor, content) for store in stores], timeout=ADMIN_DEADLINE_S)
        return int(count)

    def own_node(self) -> str:
        """Ray node id of the one node of this machine. ValueError where it has several of this cluster, or none."""
        here = sorted(registry.living() & free_memory.ray_nodes())
        if len(here) != 1:
            raise ValueError(
                f"this machine runs {len(here)} nodes of the Ray cluster, so which one is meant? Give its Ray node id: "
                f"{', '.join(here) or 'see `raykv status --json`'}"
            )
        return here[0]

    def drain(self, node_id: str, deadline: float = 60.0) -> int:
        """Empty a node that is about to leave. Nothing new is stored there from now on.

        Blocks that no other node has go to an external tier that all nodes share, or to other nodes.
        node_id: Ray's. deadline: seconds.
        Returns how many blocks would still be lost with the node. Raises ValueError if no living node has that id, and
        RayError if the pool's actors do not answer.
        """
        _check_living(node_id)
        supervisor = registry.find(registry.supervisor_name(self.name))
        left: int = ray.get(supervisor.drain.remote(node_id, deadline), timeout=2 * deadline + STOP_DEADLINE_S)
        return left

    def resize(self, node_id: str, cpu_memory: Size, deadline: float = 60.0) -> int:
        """Give a node more or less memory while the pool is in use.

        A smaller node gives up its coldest blocks. Slabs with leased blocks stay until the leases end, even after the
        deadline. The size survives restarts of the node's store, and ends with the pool.
        node_id: Ray's. cpu_memory: as of PoolConfig, a fraction of the node's memory or bytes. deadline: seconds.
        Returns the bytes of the node's CPU tier then: whole slabs, and more than asked for where the deadline passed.
        Raises CapacityError where the node can't afford it, and ValueError if no living node has that id or for a bad
        `cpu_memory`; nothing is changed then. Raises RayError if the pool's actors do not answer.
        """
        cpu_memory = memory_size("cpu_memory", cpu_memory)
        _check_living(node_id)
        store = registry.find(registry.node_store_name(self.name, node_id))
        try:
            size: int = ray.get(store.resize.remote(cpu_memory, deadline), timeout=deadline + ADMIN_DEADLINE_S)
        except RayTaskError as error:
            if isinstance(error.cause, (CapacityError, ValueError)):  # without the store's traceback
                raise type(error.cause)(str(error.cause)) from None
            raise
        return size

    def stop(self) -> None:
        """End the pool on every node and give its memory back. Every process's calls find nothing from then on."""
        self.close()
        stop_pool(self.name)

    def close(self) -> None:
        """Leave the pool: its leases and reservations of this process are released. Later calls find nothing."""
        self.session.close()


def attach(name: str = "default", *, node_id: str | None = None, device: str | int | None = None) -> KVPool:
    """The pool of that name, from any driver, actor, task or Serve deployment of the cluster.

    node_id: the Ray node that this process is on, where Ray can't know: a driver that an actor started joins any raylet
    of its machine. device: the GPU whose memory is read and written, by UUID, number in this process, or as torch names
    it ("cuda:1"): blocks go to its tier first, if the pool was started with `gpu_memory`.
    Raises PoolNotFound if no such pool or no Ray cluster runs; ProtocolMismatch if another version of raykv started it;
    ArenaMismatch if this process can't see its node's shared memory; ValueError for a GPU that it can't use; RayKVError
    in a process that was forked from one that is connected to Ray.
    """
    gpu = None if device is None else uuid_of(device)
    connect(name)
    return KVPool(name, node_id, gpu)


def _check_living(node_id: str) -> None:
    living = registry.living()
    if node_id not in living:
        raise ValueError(f"node {node_id!r} is not a living node of this Ray cluster: {', '.join(living)}")
