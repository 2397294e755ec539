"""A pool, as seen by the processes that use it."""

from typing import Any

from raykv import keys
from raykv.arena.gpu.device import uuid_of
from raykv.client.administration import Administration
from raykv.client.cache import KVCache
from raykv.client.connect import connect
from raykv.client.session import Session
from raykv.client.stop import stop_pool
from raykv.config import check_tenant

RECOMPUTE_TOKENS_PER_S = 10_000.0  # default prefill rate: a model of 8B parameters on a fast GPU
SUCH = {
    "model": "the name of the weights",
    "dtype": "what the KV is kept in, such as 'bfloat16'",
    "layout": "the order of a block's bytes, such as 'layers,2,kv_heads,tokens,head_dim'",
}


class KVPool(Administration):
    """A pool of blocks that the nodes of a Ray cluster share. Get one from `start` or `attach`. Thread-safe.

    A KVPool survives restarts of the pool's actors. A pickled KVPool attaches to the pool when it is unpickled.
    name: name of the pool. node_id: id of this process's Ray node. session: this process's session in the pool.
    """

    def __init__(self, name: str, node_id: str | None = None, gpu: str | None = None) -> None:
        """Called by `start` and `attach`. gpu: UUID of a GPU. Raises the errors of `attach`."""
        super().__init__(name)
        self.session = Session(name, node_id, gpu)
        self.node_id = self.session.node_id

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
        tenant: str = "",
        recompute_tokens_per_s: float = RECOMPUTE_TOKENS_PER_S,
    ) -> KVCache:
        """Return a key space for blocks of `block_tokens` tokens and `block_bytes` bytes.

        Equal arguments give equal caches, in every process of the cluster. Two engines whose KV differs must pass
        different values of model, revision, dtype, layout (order of a block's bytes), parallel (parallel shape) or part
        (index of a part of a model that spans nodes). Otherwise they read each other's bytes. model, dtype and layout
        are required: nothing else distinguishes two engines whose blocks have the same size. salt: caches with
        different salts share no blocks. A salt is no protection from a malicious tenant.
        tenant: name of the tenant to charge for blocks that are stored or matched through this cache. Metrics and
        `set_quota` use this name. Default: a hash of the salt. recompute_tokens_per_s: rate at which the engine
        prefills; it limits waits for an external tier. `tenant` and this rate do not change the keys: tenants share
        equal blocks.
        Raises ValueError for a missing argument, and for impossible sizes.
        """
        _check_said(model=model, dtype=dtype, layout=layout)
        _check_sizes(block_tokens=block_tokens, block_bytes=block_bytes)
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
        is_named = tenant != ""
        tenant = check_tenant(tenant) if is_named else self.tenant_of(salt)
        cache = keys.CacheId(model, block_tokens, block_bytes, keys.digest(root), tenant, is_named)
        return KVCache(self.session, cache, root, recompute_tokens_per_s)

    def tenant_of(self, salt: str | bytes) -> str:
        """Return the default name of a salt's tenant in metrics, traces and quotas. It differs between pools."""
        return keys.tenant_of(salt, self.session.secret)

    def stats(self) -> dict[str, Any]:
        """Return the directory's counts of the whole pool, and the `faults` of this client by kind.

        While the directory does not answer, the result has only `failed`, `transports` (empty) and `faults`.

        nodes: counts by Ray node id. The name of a GPU's entry is the node's id, "/" and the GPU's UUID.
        socket: host and port where the directory listens, and the number of `connections` of clients and node stores;
        None if all calls go through Ray.
        failed: the reasons why nodes have no store, by Ray node id.
        transports: an entry for each memory (`reader`) that has read from another memory (`from`). `transport`: the
        transport used last. `gbps`: that transport's rate in GB/s (1e9 bytes). `bytes`, `failed`: the bytes read and
        the failures, both by transport. Stores that do not answer in time have no entries.
        """
        return {**super().stats(), "faults": dict(self.session.directory.faults)}

    def stop(self) -> None:
        """End the pool on every node and free its memory. Later calls of all processes find no blocks."""
        self.close()
        stop_pool(self.name)

    def close(self) -> None:
        """Leave the pool, and release this process's leases and reservations. Later calls find no blocks."""
        self.session.close()


def attach(name: str = "default", *, node_id: str | None = None, device: str | int | None = None) -> KVPool:
    """Attach to a running pool, from any driver, actor, task or Serve deployment of the cluster.

    node_id: id of this process's Ray node. Give it if Ray can't know the node: for example, a driver that an actor
    started may join any raylet of its machine. device: the GPU whose memory this process reads and writes, by UUID, by
    number in this process, or by torch's name ("cuda:1"). If the pool was started with `gpu_memory`, blocks are stored
    in that GPU's tier first.
    Raises PoolNotFound if no such pool or no Ray cluster runs; ProtocolMismatch if another version of raykv started the
    pool; ArenaMismatch if this process can't see its node's shared memory; ValueError for a GPU that this process can't
    use; RayKVError in a fork of a process that is connected to Ray.
    """
    gpu = None if device is None else uuid_of(device)
    connect(name)
    return KVPool(name, node_id, gpu)


def _check_said(**given: str) -> None:
    for name, value in given.items():
        if not value:
            raise ValueError(f"{name}={value!r}: give {SUCH[name]}; engines that differ in it must not share blocks")


def _check_sizes(**given: int) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give an int of at least 1")
