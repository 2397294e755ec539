"""The values that a pool keeps in Ray's internal KV. Every process of the cluster may read them."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from ray._private.state import jobs
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from raykv.cluster import ray_calls
from raykv.config import NAMESPACE, Quota
from raykv.errors import ProtocolMismatch
from raykv.protocol.calls import VERSION
from raykv.protocol.location import Address
from raykv.system.fork import refuse_forked


class Kept(StrEnum):
    """Kinds of values. A key is `<pool>/<kind>`, or `<pool>/<kind>/<name>` for kinds that are kept "by" something."""

    SETTINGS = "settings"  # JSON, with the secret and the protocol's version
    DIRECTORY = "directory"  # JSON: name of the directory in charge; its host, port and token
    EPOCH = "epoch"  # by number: exists once a directory has taken this epoch
    LAST_EPOCH = "last_epoch"  # the newest epoch taken; it stays when the pool is stopped
    LOCK = "lock"  # the Ray job, process and thread that start or stop the pool
    TIER = "tier"  # argument of `register_tier`, pickled
    SEED = "seed"  # an external tier without a marker gets a content name derived from this seed
    TOTALS = "totals"  # JSON: counters that outlive a directory
    COMPILED = "compiled"  # number of kernels that the directory has compiled, and number of all kernels
    ANSWER = "answer"  # by node, pickled: the store's answer to the question of `raykv.start`
    FAILED = "failed"  # by node: why the node has no store
    IDLE = "idle"  # by node, if only pools use the node: whether its store has ended
    LEAVING = "leaving"  # by node: the node is about to leave
    MEMORY = "memory"  # by node, JSON: the cpu_memory that `resize` gave it
    QUOTA = "quota"  # by tenant, JSON: the tenant's minimum and maximum
    MODEL = "model"  # by name, JSON: how prompts become keys, for routers
    RANK = "rank"  # by engine and number, JSON: where a worker of an engine is
    OTHER_TOKENS = "other_tokens"  # by node and client: number of chunks whose tokens do not match their keys


LEFT = b"left"  # the value of IDLE for a node whose store has ended
AWAIT_S = 120.0  # deadline for the settings of a pool that is being started
AWAIT_LOOK_S = 0.02  # interval between two checks for a pool's settings


def get(pool: str, kind: Kept, name: str = "") -> bytes | None:
    """Return a value of the pool, or None. name: a name, for kinds that have names, such as a node's id."""
    refuse_forked()
    ray_calls.check_connected(pool)
    value: bytes | None = _internal_kv_get(_key(pool, kind, name), namespace=NAMESPACE.encode())
    return value


def put(pool: str, kind: Kept, value: bytes, name: str = "", overwrite: bool = True) -> bool:
    """Set a value. Returns False if a value exists and `overwrite` is False."""
    refuse_forked()
    ray_calls.check_connected(pool)
    existed: bool = _internal_kv_put(_key(pool, kind, name), value, overwrite=overwrite, namespace=NAMESPACE.encode())
    return overwrite or not existed


def drop(pool: str, kind: Kept, name: str = "") -> None:
    """Remove a value of the pool."""
    ray_calls.check_connected(pool)
    _internal_kv_del(_key(pool, kind, name), namespace=NAMESPACE.encode())


def _key(pool: str, kind: Kept, name: str) -> str:
    return f"{pool}/{kind}/{name}" if name else f"{pool}/{kind}"


def forget(pool: str) -> None:
    """Remove all values of a pool except its lock and last epoch. Clients recognize the next pool by a new epoch."""
    kept = [f"{pool}/{key}".encode() for key in (Kept.LOCK, Kept.LAST_EPOCH)]
    for key in _internal_kv_list(f"{pool}/", namespace=NAMESPACE.encode()):
        if key not in kept:
            _internal_kv_del(key, namespace=NAMESPACE.encode())


def names(pool: str, kind: Kept) -> list[str]:
    """Return the names for which the pool keeps a value of this kind."""
    ray_calls.check_connected(pool)
    prefix = f"{pool}/{kind}/"
    found = _internal_kv_list(prefix, namespace=NAMESPACE.encode())
    return [key.decode().removeprefix(prefix) for key in found]


def _values(pool: str, kind: Kept) -> dict[str, bytes]:
    """Return the pool's values of this kind, by name."""
    found = {name: get(pool, kind, name) for name in names(pool, kind)}
    return {name: value for name, value in found.items() if value is not None}  # None: removed meanwhile


class InCharge(NamedTuple):
    """The directory in charge. address: where the directory listens; None: it does not listen, or not yet."""

    name: str
    address: Address | None


def in_charge(pool: str) -> InCharge:
    """Return the directory in charge. ValueError if the pool has none."""
    value = get(pool, Kept.DIRECTORY)
    if not value:
        raise ValueError(f"pool {pool!r} has no directory")
    name, address = json.loads(value)
    return InCharge(name, Address(address[0], address[1], bytes.fromhex(address[2])) if address else None)


def put_in_charge(pool: str, name: str, address: Address | None) -> None:
    """Record which directory is in charge."""
    listens = [address.host, address.port, address.token.hex()] if address else None
    put(pool, Kept.DIRECTORY, json.dumps([name, listens]).encode())


def settings(pool: str) -> dict[str, Any] | None:
    """Return the pool's settings: PoolConfig's fields, `secret` as hex, and the protocol's version as `protocol`.

    Returns None if there is no such pool. Raises ProtocolMismatch if the pool's raykv has another protocol version.
    """
    value = get(pool, Kept.SETTINGS)
    if not value:
        return None
    settings: dict[str, Any] = json.loads(value)
    theirs = settings.get("protocol", "before 2")
    if theirs != VERSION:
        raise ProtocolMismatch(
            f"pool {pool!r} was started by a raykv of protocol version {theirs}, this process has version {VERSION}: "
            f"install one raykv everywhere, or end the pool with the raykv that started it and start it anew"
        )
    return settings


def await_settings(pool: str) -> dict[str, Any]:
    """Wait for the settings, which `start` writes only after some actors run. RuntimeError after AWAIT_S."""
    end = time.monotonic() + AWAIT_S
    while (found := settings(pool)) is None:
        if time.monotonic() > end:
            raise RuntimeError(f"pool {pool!r} has no settings in Ray's internal KV: its start was given up")
        time.sleep(AWAIT_LOOK_S)
    return found


def shown(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a log may show: without the secret and the tier's URL, which may contain a password."""
    names = ("cpu_memory", "gpu_memory", "locality", "transport", "write", "min_hits", "deadline", "idle_node_s")
    return {name: settings[name] for name in names}


def idle_nodes(pool: str) -> dict[str, bool]:
    """Return the nodes whose stores the supervisor removes, because only the pool uses these nodes.

    The value for each Ray node id is whether the node's store has ended.
    """
    return {node_id: get(pool, Kept.IDLE, node_id) == LEFT for node_id in names(pool, Kept.IDLE)}


def left_nodes(pool: str) -> set[str]:
    """Return the `idle_nodes` whose store has ended."""
    return {node_id for node_id, left in idle_nodes(pool).items() if left}


def failures(pool: str) -> dict[str, str]:
    """Return the reasons why nodes have no store, by Ray node id."""
    return {node_id: why.decode() for node_id, why in _values(pool, Kept.FAILED).items()}


def put_other_tokens(pool: str, node_id: str, client: int, chunks: int) -> None:
    """Report a client's count of chunks whose tokens do not match their keys. node_id: the client's node."""
    put(pool, Kept.OTHER_TOKENS, str(chunks).encode(), f"{node_id}/{client}")


def other_tokens(pool: str) -> dict[str, int]:
    """Return by node the number of chunks that `put_other_tokens` has reported since the last `clear`."""
    found: dict[str, int] = {}
    for name, chunks in _values(pool, Kept.OTHER_TOKENS).items():
        node_id = name.partition("/")[0]
        found[node_id] = found.get(node_id, 0) + int(chunks)
    return found


def drop_other_tokens(pool: str) -> None:
    """Remove all that `put_other_tokens` reported."""
    for name in names(pool, Kept.OTHER_TOKENS):
        drop(pool, Kept.OTHER_TOKENS, name)


def quotas(pool: str) -> dict[str, Quota]:
    """Return the quotas that were set while the pool runs, by tenant."""
    return {tenant: Quota(*json.loads(value)) for tenant, value in _values(pool, Kept.QUOTA).items()}


def put_quota(pool: str, tenant: str, quota: Quota | None) -> None:
    """Keep a tenant's quota for the next directory. None: remove the quota."""
    if quota is None:
        drop(pool, Kept.QUOTA, tenant)
    else:
        put(pool, Kept.QUOTA, json.dumps([quota.minimum, quota.maximum]).encode(), tenant)


@contextlib.contextmanager
def exclusive(pool: str, seconds: float) -> Iterator[None]:
    """Let only one process at a time start or stop a pool.

    Waits while another process does so, as long as that process's Ray job lives. Raises TimeoutError after `seconds`.
    """
    job, end = ray_calls.get_runtime_context().get_job_id(), time.monotonic() + seconds
    mine = f"{job}/{os.getpid()}/{threading.get_ident()}".encode()
    try:  # `put` is inside: a signal handler may raise right after it
        while not put(pool, Kept.LOCK, mine, overwrite=False):
            holder = get(pool, Kept.LOCK) or b""
            if holder == mine:  # a signal handler raised before this thread had released the lock
                break
            if holder and holder.decode().partition("/")[0] not in _living_jobs():
                drop(pool, Kept.LOCK)  # the holder was killed
            elif time.monotonic() > end:
                raise TimeoutError(
                    f"another process has been starting or stopping pool {pool!r} for {seconds:.0f} s: end that "
                    f"process, or try again"
                )
            time.sleep(AWAIT_LOOK_S)
        yield
    finally:
        if get(pool, Kept.LOCK) == mine:
            drop(pool, Kept.LOCK)


def _living_jobs() -> set[str]:
    return {job["JobID"] for job in jobs() if not job["IsDead"]}


def take_epoch(pool: str, at_least: int = 1) -> int:
    """Take and return an epoch that no directory of the pool has had."""
    epoch = max(at_least, int(get(pool, Kept.LAST_EPOCH) or 0) + 1)
    while not put(pool, Kept.EPOCH, b"", str(epoch), overwrite=False):
        epoch += 1
    put(pool, Kept.LAST_EPOCH, str(epoch).encode())
    return epoch
