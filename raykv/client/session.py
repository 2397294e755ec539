"""One process's part in a pool: its node's store, its line to the directory, and the threads of its calls."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv.arena.gpu_arena import GpuArena
from raykv.client.connect import connect
from raykv.client.directory_client import DirectoryClient
from raykv.client.stores.local_store import LocalStore
from raykv.client.stores.store_client import StoreClient
from raykv.client.stores.workers import Workers
from raykv.client.tending import Tending
from raykv.cluster import internal_kv, named_actors, ray_calls
from raykv.config import fingerprint
from raykv.errors import PoolNotFound, ProtocolMismatch, RayKVError
from raykv.protocol.location import host_of
from raykv.system import fork

log = logging.getLogger("raykv")
P = ParamSpec("P")
T = TypeVar("T")

REFRESH_S = 1.0  # minimum interval between two searches of a process for the pool's stores


class Session:
    """The state that a KVPool, its caches, matches and reservations share. Thread-safe. Pickled as the pool's name.

    name: name of the pool. node_id: id of this process's Ray node. secret, fingerprint: the pool's secret and its
    fingerprint. directory: the client of the directory. local: the store of this node; None if the node has no store.
    """

    def __init__(self, name: str, node_id: str | None = None, gpu: str | None = None) -> None:
        """node_id: id of the Ray node; None: ask Ray. gpu: UUID of a GPU; if it has a tier, the process uses it.

        Raises PoolNotFound if the pool does not run, and ArenaMismatch if this process can't see its node's shared
        memory.
        """
        settings = settings_of(name)
        self.name = name
        self.node_id: str = node_id or ray_calls.get_runtime_context().get_node_id()
        self.secret = bytes.fromhex(settings["secret"])
        self.fingerprint = fingerprint(name, self.secret)
        self._gpu = gpu
        self.local = self._find_store()
        if self.local and not isinstance(self.local.arena, GpuArena):
            self._gpu = None  # do not change to a GPU tier that opens later: callers already know `memory_name`
        if self.local is None and (why := internal_kv.failures(name).get(self.node_id)):
            log.warning("pool %s has no store on this node, so every block that is read here is a miss: %s", name, why)
        self.directory = DirectoryClient(
            name,
            lambda: self.local.arena.epoch if self.local else 0,
            settings["deadline"],
            self._why_strange,
            self._let_go_of_lost_memory,
        )
        self._looked = time.monotonic()
        self._names: dict[int, str] = {}
        self._others: dict[str, StoreClient] = {}  # stores of other nodes, by the directory's name for their memory
        self._renewal: threading.Thread | None = None  # the thread that looks for the node store
        self._renewing = threading.Lock()  # ensures that there is at most one such thread
        self.workers = Workers("raykv")
        self.asking = Workers("raykv-match")  # a match must not queue behind copies
        self._background = Workers("raykv-background")
        Tending(self.directory)  # its thread keeps it alive

    def __reduce__(self) -> tuple[Any, ...]:
        return _joined, (self.name,)

    @property
    def memory_name(self) -> str:
        """The directory's name for the memory that this process copies from and to."""
        return self.local.name if self.local else self.node_id

    def background(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function that may wait for an external tier. Calls that need only memory do not queue behind it."""
        fork.refuse_forked()
        return self._background.submit(function, *args, **kwargs)

    def local_with(self, nodes: NDArray[np.uint32], epoch: int) -> LocalStore | None:
        """Return this node's store if `LocalStore.has` is true. Otherwise look for the store again, and return None."""
        local = self.local
        if local is not None and local.has(nodes, epoch):
            return local
        self.refresh()
        return None

    def maps(self, nonces: Iterable[bytes]) -> bool:
        """Whether all nonces equal the mapped arena's nonce. If not, looks for this node's store again."""
        local = self.local
        if local is not None and all(nonce == local.arena.nonce for nonce in nonces):
            return True
        self.refresh()
        return False

    def refresh(self) -> None:
        """Look for node stores again, since a store seems to have been replaced; at most once per REFRESH_S.

        A separate thread does this, so that no caller waits for a store that does not answer.
        """
        with self._renewing:
            looks = self._renewal is not None and self._renewal.is_alive()
            if looks or time.monotonic() - self._looked <= REFRESH_S:
                return
            self._renewal = threading.Thread(target=self._renew, name="raykv-renew", daemon=True)
            try:
                self._renewal.start()
            except RuntimeError as error:  # the system can't start a thread: the next refresh tries again
                self.directory.fault("store", error)

    def _let_go_of_lost_memory(self) -> None:
        """Unmap the arena if it is lost: the next store needs the memory."""
        local = self.local  # `_take` may change self.local meanwhile
        if local is not None and local.arena.lost:
            local.arena.close()
            self.refresh()

    def store_of(self, memory: str) -> StoreClient | None:
        """Return the store of the node with this memory, or None. memory: the directory's name for the memory."""
        if memory == self.memory_name:
            return self.local
        if memory not in self._others:
            try:
                store = named_actors.find_store(self.name, host_of(memory))
                self._others[memory] = StoreClient(store, self.refresh)
            except (ValueError, RayError):
                return None
        return self._others.get(memory)

    def node_names(self, indices: list[int]) -> list[str]:
        """Return the Ray node ids of nodes with these indices in locations. Leaves out repeated ids and lost nodes."""
        if not self._names.keys() >= set(indices):
            self._names.update(self.directory.nodes())
        names = [host_of(self._names[index]) for index in indices if index in self._names]
        return list(dict.fromkeys(names))

    def close(self) -> None:
        """Leave the pool, and release all that this process holds. Later calls find no blocks."""
        self.directory.close()
        if self.local:
            self.local.arena.close()

    def check_root(self, of_keys: bytes) -> None:
        """Count a fault if keys were made with another secret. of_keys: fingerprint of the keys' secret."""
        if of_keys != self.fingerprint:
            self.directory.fault("strange", self._of_another_secret())

    def _why_strange(self) -> str:
        """Return why the running pool is not the pool of this session; "" if it is, or if no pool runs."""
        try:
            running = internal_kv.settings(self.name)
        except ProtocolMismatch as error:
            return str(error)
        return "" if running is None or running["secret"] == self.secret.hex() else self._of_another_secret()

    def _of_another_secret(self) -> str:
        return (
            f"it was started anew with another secret, so its keys are others: attach again with "
            f"raykv.attach({self.name!r}); a pool that is started with secret= or RAYKV_SECRET keeps its keys"
        )

    def _find_store(self) -> LocalStore | None:
        try:
            return LocalStore(self.name, self.node_id, self._gpu, self.refresh)
        except (ValueError, RayError):
            return None

    def _renew(self) -> None:
        self._others.clear()
        try:
            self._take(self._find_store())
        except RayKVError as error:
            self.directory.fault("store", error)
        finally:
            self._looked = time.monotonic()

    def _take(self, found: LocalStore | None) -> None:
        if found is None:
            return
        if self.local and self.local.arena.nonce == found.arena.nonce:
            self.local.store, self.local.index = found.store, found.index
            return
        self.local = found  # the old arena is unmapped when its last reader is done


def settings_of(name: str) -> dict[str, Any]:
    """Like internal_kv.settings, but raises PoolNotFound, with advice, if no pool of that name runs.

    Raises RayKVError in a process that has left its Ray cluster.
    """
    settings = internal_kv.settings(name)
    if settings is None and named_actors.names(name):
        raise PoolNotFound(
            f"pool {name!r} is being started or stopped, or has lost its settings: if that lasts, "
            f"`raykv stop --name {name}` ends what is left of it"
        )
    if settings is None:
        raise PoolNotFound(
            f"no pool {name!r} runs in this Ray cluster: start it with `raykv start --name {name}` "
            f"or raykv.start(raykv.PoolConfig(name={name!r}))"
        )
    return settings


def _joined(name: str) -> Session:
    """Unpickle a session."""
    connect(name)
    return Session(name)
