"""The directory as an actor: its server, calls through Ray, and what Ray's internal KV keeps for later directories.

A call through Ray costs this process ten times as much as answering the call. So clients and node stores each keep a
connection, which one thread serves. A lock keeps that thread and Ray's thread apart. Calls through Ray are for
administrators, and for processes that can't reach the socket.
"""

import contextlib
import gc
import logging
import os
import time
from typing import Any

import ray

from raykv import cluster
from raykv.actors.directory.metrics import DirectoryMetrics
from raykv.actors.directory.server import DirectoryServer, Message
from raykv.actors.directory.succession import Succession
from raykv.cluster import internal_kv, named_actors
from raykv.cluster.internal_kv import Kept
from raykv.config import WRITE_SHARES, Quota
from raykv.directory.directory import Directory
from raykv.protocol.location import Address, host_of
from raykv.system import events, free_memory
from raykv.system.jit import compile_all

log = logging.getLogger("raykv")
SUCCESSOR_BYTES = 1 << 30  # free memory with which a successor loads its kernels early


class DirectoryActor(DirectoryServer):
    """The actor that knows where every block of a pool is."""

    def __init__(self, pool: str, name: str) -> None:
        """name: this actor's.

        The actor serves if the pool says that it is in charge. Otherwise the actor stands by: see Succession.
        """
        super().__init__(pool, DirectoryMetrics(pool, name))
        events.begin(named_actors.restarted(), role="directory", pool=pool, name=name, pid=os.getpid())
        if internal_kv.settings(pool) is None:  # `start` waits, and shows the progress
            compile_all(
                "raykv.directory", lambda *done: internal_kv.put(pool, Kept.COMPILED, "{} {}".format(*done).encode())
            )
        elif free_memory.free_bytes().free > SUCCESSOR_BYTES:
            _load_kernels()
        self._settings = internal_kv.await_settings(pool)
        self._nodes: set[str] = set()  # Ray nodes that were alive when Ray was last asked
        self._succession = Succession(pool, name, _load_kernels, self._serve)
        self._succession.start()

    def __repr__(self) -> str:
        return f"Directory(pool={self._pool})"

    def node_id(self) -> str:
        """Id of the Ray node that it runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def take_charge(self) -> None:
        """Serve from now on, whichever directory served before."""
        self._succession.take()

    def _serve(self) -> Address | None:
        """Begin to serve, unless it serves already. Returns where it listens."""
        if self._state is None:
            self._begin()
        return self._listener.address if self._listener else None

    def _begin(self) -> None:
        """Answer from now on, with an empty directory and a new epoch."""
        settings, epoch = self._settings, internal_kv.take_epoch(self._pool)
        self._nodes = cluster.living()  # later Ray is asked only about unknown nodes, as all callers wait for it
        directory = Directory(
            epoch, settings["locality"], share=WRITE_SHARES[settings["write"]], min_hits=settings["min_hits"]
        )
        for name in internal_kv.names(self._pool, Kept.LEAVING):
            directory.leave(name, time.monotonic())
        for tenant, quota in internal_kv.quotas(self._pool).items():
            try:
                directory.set_quota(tenant, quota, time.monotonic())
            except ValueError:  # two directories wrote at once
                log.exception("%r goes on without the quota of %r", self, tenant)
        directory.resume(self._metrics.saved())
        self.serve(directory)
        self._metrics.attach(directory, self._lock)
        self._metrics.start()
        with contextlib.suppress(PermissionError):  # Ray runs its workers at nice 15, and all clients wait for this
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        gc.freeze()  # a collection that walks all of numba would hold up every caller
        self._open_socket(settings["transport"])
        events.tell("serve", epoch=epoch, **internal_kv.shown(settings))

    def _open_socket(self, transport: str) -> None:
        """Listen on a socket, unless clients may only call through Ray."""
        if transport == "object_store":
            return
        try:
            self.listen(ray.util.get_node_ip_address())
        except OSError as error:
            log.warning("pool %s: no socket for the directory, which is called through Ray: %r", self._pool, error)

    def join(self, name: str, arena: Message) -> Message:
        """As DirectoryServer. ValueError for a node that Ray does not have, as each node takes memory."""
        if host_of(name) not in self._nodes:
            self._nodes = cluster.living()
        if host_of(name) not in self._nodes:
            raise ValueError(f"{name!r} is no node of this Ray cluster: a store joins by the id of its node")
        joined, is_raised = self._join(name, arena)
        if is_raised:  # the arena knew a newer epoch than Ray's KV
            internal_kv.take_epoch(self._pool, joined.epoch)
        events.tell("join", node=events.short(name), index=joined.node, epoch=joined.epoch)
        return tuple(joined)

    def set_quota(self, tenant: str, minimum: float, maximum: float) -> None:
        """As DirectoryServer. Later directories keep the quota too."""
        super().set_quota(tenant, minimum, maximum)
        internal_kv.put_quota(self._pool, tenant, Quota(minimum, maximum))
        events.tell("quota", tenant=tenant, minimum=minimum, maximum=maximum)

    def remove_quota(self, tenant: str) -> bool:
        """As DirectoryServer."""
        removed = super().remove_quota(tenant)
        internal_kv.put_quota(self._pool, tenant, None)
        events.tell("quota_removed", tenant=tenant)
        return removed


def _load_kernels() -> None:
    compile_all("raykv.directory")


def start_directory(pool: str, number: int, node_id: str) -> Any:
    """Start a directory on a node, or find it. Returns at once; the directory answers when its kernels are loaded."""
    name = named_actors.directory_name(pool, number)
    options = named_actors.options(name, node_id)
    return ray.remote(DirectoryActor).options(**options).remote(pool, name)
