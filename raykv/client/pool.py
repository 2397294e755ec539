"""A pool, from the process that uses it."""

import contextlib
import json
import secrets
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raykv import keys, registry
from raykv.actors.supervisor import START_DEADLINE_S, Supervisor
from raykv.arena.gpu.device import uuid_of
from raykv.client.cache import KVCache
from raykv.client.session import Session
from raykv.config import FLUSH_DEADLINE_S, NAMESPACE, PoolConfig, check_memory, fingerprint
from raykv.errors import CapacityError, PoolNotFound
from raykv.protocol import VERSION, host_of
from raykv.start import check_nodes
from raykv.tiers import parse
from raykv.tiers.guarded import CONTENT_BYTES
from raykv.tiers.registry import registered

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
        transports: one entry for each memory (`reader`) that has read from another (`from`): the `transport` that was
        used last, its GB/s (1e9 bytes) as `gbps`, and how often each has `failed`. Stores that do not answer in time
        are left out.
        """
        try:
            answer = ray.get(registry.find_directory(self.name).stats.remote(), timeout=ADMIN_DEADLINE_S)
        except (ValueError, RayError):
            answer = {}
        transports = self._transports(list(answer.get("nodes", ())))
        return {**answer, "transports": transports, "faults": dict(self.session.directory.faults)}

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

        Raises RayError if the pool's actors do not answer.
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

    def resize(self, node_id: str, cpu_memory: float | int, deadline: float = 60.0) -> int:
        """Give a node more or less memory while the pool is in use.

        A smaller node gives up its coldest blocks. Slabs with leased blocks stay until the leases end, even after the
        deadline. The size survives restarts of the node's store, and ends with the pool.
        node_id: Ray's. cpu_memory: as of PoolConfig, a fraction of the node's memory or bytes. deadline: seconds.
        Returns the bytes of the node's CPU tier then: whole slabs, and more than asked for where the deadline passed.
        Raises CapacityError where the node can't afford it, and ValueError if no living node has that id or for a bad
        `cpu_memory`; nothing is changed then. Raises RayError if the pool's actors do not answer.
        """
        check_memory("cpu_memory", cpu_memory)
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
        _stop(self.name)

    def close(self) -> None:
        """Leave the pool: its leases and reservations of this process are released. Later calls find nothing."""
        self.session.close()


def start(config: PoolConfig | None = None) -> KVPool:
    """Start a pool on every node of the Ray cluster, or attach to it if it runs.

    Joins the cluster that runs on this machine if this process has no Ray yet. Raises CapacityError where a node can't
    afford the memory, and nothing is started then; PoolNotFound if there is no Ray cluster; ValueError for a secret
    that is bad, or is not the running pool's, and for an external tier that some node can't use.
    """
    config = config or PoolConfig()
    _connect(config.name)
    secret = config.explicit_secret()
    running = registry.settings(config.name)
    if running is None:
        if config.external and secret is None:
            raise ValueError(
                "external= outlives the pool, and keys that are derived from a random secret would not be found there "
                "again: give secret=, or RAYKV_SECRET"
            )
        secret = secret or secrets.token_bytes(32)
        maker = registered(parse(config.external).scheme) if config.external else None
        tier = ray.cloudpickle.dumps(maker) if maker else None
        mark = fingerprint(config.name, secret)
        check_nodes(config.name, config.cpu_memory, config.transport, config.external, mark, tier)
        values = {
            "protocol": VERSION,
            "secret": secret.hex(),
            "cpu_memory": config.cpu_memory,
            "gpu_memory": config.gpu_memory,
            "locality": config.locality,
            "transport": config.transport,
            "external": config.external,
            "write": config.write,
            "min_hits": config.min_hits,
        }
        if tier:
            registry.put(config.name, "tier", tier)
        registry.put(config.name, "settings", json.dumps(values).encode(), overwrite=False)
    elif secret is not None and secret.hex() != running["secret"]:
        raise ValueError(f"pool {config.name!r} runs with another secret: leave it out, or stop that pool first")
    supervisor: Any = (
        ray.remote(Supervisor)
        .options(**registry.options(registry.supervisor_name(config.name), _head(), pinned=False, threads=4))
        .remote(config.name)
    )
    try:
        failed = ray.get(supervisor.ready.remote(), timeout=2 * START_DEADLINE_S)
    except RayError:
        if running is None:
            _stop(config.name)
        raise
    if failed and running is None:  # a pool that runs is not ended for a node that is restarting, or can't join it
        _stop(config.name)
        raise CapacityError("\n".join(f"node {node_id[:16]}: {why}" for node_id, why in failed.items()))
    return KVPool(config.name)


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
    _connect(name)
    return KVPool(name, node_id, gpu)


def _connect(name: str) -> None:
    if not ray.is_initialized():
        try:
            ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False)
        except ConnectionError as error:
            raise PoolNotFound(
                f"no Ray cluster runs here: start one with `ray start --head` (or `ray up`), "
                f"then the pool with `raykv start --name {name}`"
            ) from error


def _check_living(node_id: str) -> None:
    living = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    if node_id not in living:
        raise ValueError(f"node {node_id!r} is not a living node of this Ray cluster: {', '.join(living)}")


def _head() -> str:
    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return str(node["NodeID"])
    return str(ray.get_runtime_context().get_node_id())


def _stop(name: str) -> None:
    for _ in range(3):  # a supervisor that is killed meanwhile comes back, and goes on
        try:
            supervisor = registry.find(registry.supervisor_name(name))
        except ValueError:
            break
        try:
            ray.get(supervisor.stop.remote(), timeout=STOP_DEADLINE_S + FLUSH_DEADLINE_S)
            ray.kill(supervisor)
            break
        except RayActorError:
            continue
    registry.forget(name)
