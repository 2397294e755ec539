"""The directory as a Ray actor. It answers calls through a socket or Ray, and saves state for successors in Ray's KV.

Ray's overhead per call is ten times the cost of computing the answer. So each client and node store keeps a connection
to a socket of the directory. One thread serves all these connections; a lock makes it take turns with Ray's thread.
Calls through Ray are for administrators, and for processes that can't reach the socket.
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
SUCCESSOR_BYTES = 1 << 30  # a successor loads its kernels early if more memory than this is free


class DirectoryActor(DirectoryServer):
    """The actor that knows where every block of a pool is."""

    def __init__(self, pool: str, name: str) -> None:
        """name: the name of this actor.

        The actor serves if Ray's internal KV says that it is in charge. Otherwise it stands by: see Succession.
        """
        super().__init__(pool, DirectoryMetrics(pool, name))
        events.begin(named_actors.restarted(), role="directory", pool=pool, name=name, pid=os.getpid())
        if internal_kv.settings(pool) is None:  # `start` waits for the kernels, and shows the progress
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
        """Id of the Ray node that this actor runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def take_charge(self) -> None:
        """Serve from now on, regardless of which directory served before."""
        self._succession.take()

    def _serve(self) -> Address | None:
        """Start serving unless this actor already serves. Returns its socket's address, or None without a socket."""
        if self._state is None:
            self._begin()
        return self._listener.address if self._listener else None

    def _begin(self) -> None:
        """Start answering calls, with an empty directory and a new epoch."""
        settings, epoch = self._settings, internal_kv.take_epoch(self._pool)
        self._nodes = cluster.living()  # later, Ray is asked only about unknown nodes, as all callers wait meanwhile
        directory = Directory(
            epoch, settings["locality"], share=WRITE_SHARES[settings["write"]], min_hits=settings["min_hits"]
        )
        for name in internal_kv.names(self._pool, Kept.LEAVING):
            directory.leave(name, time.monotonic())
        for tenant, quota in internal_kv.quotas(self._pool).items():
            try:
                directory.set_quota(tenant, quota, time.monotonic())
            except ValueError:  # two directories wrote quotas at the same time
                log.exception("%r goes on without the quota of %r", self, tenant)
        directory.resume(self._metrics.saved())
        self.serve(directory)
        self._metrics.attach(directory, self._lock)
        self._metrics.start()
        with contextlib.suppress(PermissionError):  # Ray's workers run at nice 15, but all clients need this process
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        gc.freeze()  # a garbage collection of all of numba's objects would delay every caller
        try:
            if settings["transport"] != "object_store":  # else the pool's clients call only through Ray
                self.listen(ray.util.get_node_ip_address())
        except OSError as error:
            log.warning("pool %s: no socket for the directory, which is called through Ray: %r", self._pool, error)
        events.tell("serve", epoch=epoch, **internal_kv.shown(settings))

    def join(self, name: str, arena: Message) -> Message:
        """See DirectoryServer. Raises ValueError for a node outside the Ray cluster: its record would waste memory."""
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
        """See DirectoryServer. Later directories keep the quota too."""
        super().set_quota(tenant, minimum, maximum)
        internal_kv.put_quota(self._pool, tenant, Quota(minimum, maximum))
        events.tell("quota", tenant=tenant, minimum=minimum, maximum=maximum)

    def remove_quota(self, tenant: str) -> bool:
        """See DirectoryServer."""
        removed = super().remove_quota(tenant)
        internal_kv.put_quota(self._pool, tenant, None)
        events.tell("quota_removed", tenant=tenant)
        return removed


def _load_kernels() -> None:
    compile_all("raykv.directory")


def start_directory(pool: str, number: int, node_id: str) -> Any:
    """Start or find a directory on a node. Returns at once; the directory answers once its kernels are loaded."""
    name = named_actors.directory_name(pool, number)
    options = named_actors.options(name, node_id)
    return ray.remote(DirectoryActor).options(**options).remote(pool, name)
