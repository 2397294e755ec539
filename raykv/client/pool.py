"""A pool, from the process that uses it."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raykv import keys, registry
from raykv.actors.supervisor import START_DEADLINE_S, Supervisor
from raykv.arena.gpu.device import uuid_of
from raykv.client.cache import KVCache
from raykv.client.directory_client import DirectoryClient
from raykv.client.session import LocalStore
from raykv.config import FLUSH_DEADLINE_S, METADATA_DEADLINE_S, NAMESPACE, PoolConfig, Size, fingerprint, memory_size
from raykv.errors import CapacityError, PoolNotFound
from raykv.protocol import host_of
from raykv.start import check_nodes
from raykv.tiers import parse, tier_for
from raykv.tiers.guarded import CONTENT_BYTES
from raykv.tiers.registry import registered

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 16  # that serve async callers
REFRESH_S = 1.0
RECOMPUTE_TOKENS_PER_S = 10_000.0  # a model of 8B parameters on a fast GPU
ADMIN_DEADLINE_S = 10.0
LANES_DEADLINE_S = 1.0  # a store that is stopped is not waited for
STOP_DEADLINE_S = 60.0


class KVPool:
    """A pool of blocks that the nodes of a Ray cluster share. Get one from `start` or `attach`. Thread-safe.

    It survives restarts of the pool's actors. name: the pool's. node_id: of the Ray node that this process is on.
    """

    def __init__(self, name: str, node_id: str | None = None, gpu: str | None = None) -> None:
        """For `start` and `attach`."""
        settings = registry.settings(name)
        if settings is None:
            raise PoolNotFound(
                f"no pool {name!r} runs in this Ray cluster: start it with `raykv start --name {name}` "
                f"or raykv.start(raykv.PoolConfig(name={name!r}))"
            )
        self.name = name
        self.node_id: str = node_id or ray.get_runtime_context().get_node_id()
        self._gpu = gpu
        self._secret = bytes.fromhex(settings["secret"])
        self.local = self._look()
        self.link = DirectoryClient(name, lambda: self.local.arena.epoch if self.local else 0)
        self._looked = time.monotonic()
        self._names: dict[int, str] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="raykv")
        self._background = ThreadPoolExecutor(THREADS, thread_name_prefix="raykv-background")

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
        """A key space of blocks of `block_tokens` tokens and `block_bytes` bytes. Equal arguments, equal cache.

        Everything that makes KV differ must be in here: model, revision, dtype, layout (of a block's bytes), parallel
        (shape), part (which piece of a model that spans nodes). salt separates tenants that cooperate.
        recompute_tokens_per_s, of which nothing depends but patience: how fast the engine prefills.
        """
        if not model or block_tokens < 1 or block_bytes < 1:
            raise ValueError(f"model={model!r}, block_tokens={block_tokens}, block_bytes={block_bytes}: all are needed")
        if not recompute_tokens_per_s > 0:
            raise ValueError(f"recompute_tokens_per_s={recompute_tokens_per_s}: give the engine's prefill rate")
        if self.local and block_bytes > self.local.arena.slab_bytes:
            raise ValueError(
                f"block_bytes={block_bytes} is more than a slab of this pool ({self.local.arena.slab_bytes} bytes): "
                f"use fewer tokens a block, or start the pool with more cpu_memory"
            )
        root = keys.root(
            self._secret,
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
        return KVCache(self, root, block_tokens, block_bytes, recompute_tokens_per_s)

    def stats(self) -> dict[str, Any]:
        """Counts of the whole pool as the directory has them, and `faults` of this client. Empty while it is down.

        nodes: by Ray node id, or that with "/" and a GPU's UUID.
        transports: of each pair of them that has read, as the one that did says, where it answers: `reader`, `from`,
        the `transport` used last, its GB/s (1e9 bytes) as `gbps`, and how often which has `failed`.
        """
        try:
            answer = ray.get(registry.find_directory(self.name).stats.remote(), timeout=ADMIN_DEADLINE_S)
        except (ValueError, RayError):
            answer = {}
        transports = self._transports(list(answer.get("nodes", ())))
        return {**answer, "transports": transports, "faults": dict(self.link.faults)}

    def _transports(self, names: list[str]) -> list[dict[str, Any]]:
        asked = []
        for node_id in {host_of(name) for name in names}:
            with contextlib.suppress(ValueError):
                asked.append(registry.find(registry.node_store_name(self.name, node_id)).stats.remote())
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=LANES_DEADLINE_S) if asked else ([], [])
        found: list[dict[str, Any]] = []
        for answer in answered:
            with contextlib.suppress(RayError):
                found += ray.get(answer)["transports"]
        return [lane for lane in found if lane["from"] in names]

    def clear(self) -> int:
        """Forget every block, for good: a restart does not find them again. Returns how many keys there were.

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
        """Empty a node that is about to leave, within so many seconds. Nothing new is stored there from now on.

        What is nowhere else goes to a tier that all nodes share, or to other nodes.
        Returns how many blocks would still be lost with it. ValueError if no living node has that Ray node id; RayError
        if the pool's actors do not answer.
        """
        _check_living(node_id)
        supervisor = registry.find(registry.supervisor_name(self.name))
        left: int = ray.get(supervisor.drain.remote(node_id, deadline), timeout=2 * deadline + STOP_DEADLINE_S)
        return left

    def resize(self, node_id: str, cpu_memory: Size, deadline: float = 60.0) -> int:
        """Give a node more memory, or less, while the pool is in use: a fraction of what it has, or bytes.

        What is given up are its coldest blocks; those that somebody holds stay until they are let go, even if that is
        after the deadline. It outlasts restarts of the node's store, and ends with the pool.
        Returns the bytes that the node's CPU tier has then: whole slabs, and more than asked for where the deadline
        has passed. Raises CapacityError where the node can't afford it, and ValueError if no living node has that Ray
        node id, or for a bad `cpu_memory`: nothing is changed then. RayError if the pool's actors do not answer.
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
        """End the pool on every node and give its memory back."""
        self.close()
        _stop(self.name)

    def close(self) -> None:
        """This process is done with the pool; what it held is let go. Calls that come later find nothing."""
        self.link.close()
        if self.local:
            self.local.arena.close()

    # ------------------------------------------------------------------ for KVCache

    @property
    def home(self) -> str:
        """What the directory calls the memory that this process copies from and to."""
        return self.local.name if self.local else self.node_id

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what blocks beside the event loop. Cancelled, it ends first: it may be using the caller's memory."""
        running = asyncio.wrap_future(self._threads.submit(function, *args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():  # cancelled twice, too
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise

    def background(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run what may wait for a tier, behind which nothing of memory is to queue."""
        return self._background.submit(function, *args, **kwargs)

    def refresh(self) -> None:
        """The node store seems to be another one now; at most once a second."""
        if time.monotonic() - self._looked > REFRESH_S:
            self._looked = time.monotonic()
            self._threads.submit(self._renew)

    def node_names(self, indices: list[int]) -> list[str]:
        """Ray node ids of the nodes that places call so; those that are gone are left out."""
        if not set(indices) <= self._names.keys():
            with contextlib.suppress(RayError):
                nodes = self.link.directory.nodes.remote()
                self._names.update(ray.get(nodes, timeout=METADATA_DEADLINE_S))
        names = [host_of(self._names[index]) for index in indices if index in self._names]
        return list(dict.fromkeys(names))

    def _look(self) -> LocalStore | None:
        try:
            return LocalStore(self.name, self.node_id, self._gpu)
        except (ValueError, RayError):
            return None

    def _renew(self) -> None:
        found = self._look()
        if found is None:
            return
        if self.local and self.local.arena.nonce == found.arena.nonce:
            self.local.store, self.local.index = found.store, found.index
            return
        self.local = found  # the old arena is unmapped when its last reader is done


def start(config: PoolConfig | None = None) -> KVPool:
    """Start a pool on every node of the Ray cluster, or attach to it if it runs.

    Joins the cluster that runs on this machine if this process has no Ray yet. Raises CapacityError where a node can't
    afford the memory, and nothing is started then; PoolNotFound if there is no Ray cluster; ValueError for a secret
    that is bad, or is not the running pool's, and for an external tier that some node can't use.
    """
    config = config or PoolConfig()
    if config.external:
        tier_for(parse(config.external))
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
    Raises PoolNotFound if none runs, or there is no Ray cluster; ArenaMismatch if this process can't see its node's
    shared memory; ValueError for a GPU that it can't use.
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
