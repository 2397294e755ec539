"""Ray in one process: actors are objects, their calls run in threads, and messages are pickled as Ray pickles them.

All of raykv runs on it unchanged: start, directory, node stores, supervisor, clients, with real arenas and real TCP
between "nodes". There are no processes to kill: tests that kill are in `tests/cluster`.
"""

import asyncio
import contextlib
import contextvars
import gc
import inspect
import pickle
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import ray
from ray import cloudpickle
from ray._private.worker import Worker
from ray.core.generated.gcs_pb2 import ActorTableData, GcsNodeInfo, NodeSnapshot  # type: ignore[attr-defined]
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError
from ray.remote_function import RemoteFunction

from raykv import cluster
from raykv.actors.directory import succession
from raykv.actors.supervisor import supervisor
from raykv.cluster import internal_kv, ray_calls
from raykv.line.listener import Listener
from raykv.line.periodic import Periodic
from raykv.system import events

JOB = "01000000"
DEFAULT_GROUP = "_"
RAY_CALL = "__ray_call__"  # calls a function with the actor's object
_here: contextvars.ContextVar[str] = contextvars.ContextVar("node")  # the node id of the actor that runs


Frozen = tuple[bytes, list[bytes]]  # a value that was pickled, and its buffers


class Ref:
    """The result of a call, in place of Ray's ObjectRef."""

    def __init__(self, future: "Future[Frozen]") -> None:
        self._future = future

    def value(self, timeout: float | None = None) -> Any:
        try:
            return _thawed(self._future.result(timeout))
        except TimeoutError as error:
            raise GetTimeoutError(f"no answer in {timeout} s") from error

    def future(self) -> "Future[Any]":
        found: Future[Any] = Future()

        def done(_: object) -> None:
            try:
                found.set_result(self.value())
            except BaseException as error:
                found.set_exception(error)

        self._future.add_done_callback(done)
        return found

    def __await__(self) -> Iterator[Any]:
        return asyncio.wrap_future(self.future()).__await__()


class Method:
    def __init__(self, actor: "Handle", name: str, group: str = "") -> None:
        self._actor, self._name, self._group = actor, name, group

    def options(self, concurrency_group: str = "", **_: Any) -> "Method":
        return Method(self._actor, self._name, concurrency_group)

    def remote(self, *args: Any, **kwargs: Any) -> Ref:
        return self._actor._call(self._name, self._group, _frozen((args, kwargs)))


class Handle:
    """An actor. Its constructor runs in a thread, and calls wait for the constructor."""

    def __init__(self, kind: type, node_id: str, threads: dict[str, int], args: tuple[Any, ...], kwargs: Any) -> None:
        self._kind, self._node, self._dead = kind, node_id, False
        self._threads = {name: ThreadPoolExecutor(count, f"actor-{name}") for name, count in threads.items()}
        self._made = self._submit(DEFAULT_GROUP, lambda: kind(*args, **kwargs))
        self._actor_id = SimpleNamespace(hex=lambda: secrets.token_hex(16))

    def _submit(self, group: str, call: Callable[[], Any]) -> "Future[Any]":
        context = contextvars.copy_context()
        context.run(_here.set, self._node)
        return self._threads.get(group, self._threads[DEFAULT_GROUP]).submit(context.run, call)

    def _call(self, name: str, group: str, arguments: Frozen) -> Ref:
        group = group or getattr(getattr(self._kind, name, None), "__ray_concurrency_group__", DEFAULT_GROUP)
        future: Future[Frozen] = Future()
        if self._dead:
            future.set_exception(ActorDiedError())
            return Ref(future)

        def run() -> None:
            try:
                actor = self._made.result()
                args, kwargs = _thawed(arguments)
                answer = args[0](actor, *args[1:]) if name == RAY_CALL else getattr(actor, name)(*args, **kwargs)
                if inspect.isawaitable(answer):
                    answer = asyncio.run(_awaited(answer))
                future.set_result(_frozen(answer))
            except Exception as error:
                why = RayTaskError(name, traceback.format_exc(), error, actor_id=secrets.token_hex(16))
                made = self._made.done() and self._made.exception() is None
                future.set_exception(why.as_instanceof_cause() if made else ActorDiedError(why))

        self._submit(group, run)
        return Ref(future)

    def _end(self) -> None:
        """Stop the actor's threads, as the death of its process would."""
        self._dead = True
        if self._made.done() and not self._made.exception():
            for part in _parts_of(self._made.result()):
                part.close() if isinstance(part, Listener) else part.stop()

    def _get_local_state(self) -> int:
        return int(ActorTableData.DEAD if self._dead else ActorTableData.ALIVE)

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_") and name != RAY_CALL:
            raise AttributeError(name)
        return Method(self, name)


def _parts_of(made: object, depth: int = 4) -> Iterator[Any]:
    """Objects with a thread of their own, in an object of raykv and in its attributes."""
    if isinstance(made, Periodic | Listener):
        yield made
    elif isinstance(made, list | tuple) and depth:
        for part in made:
            yield from _parts_of(part, depth - 1)
    elif type(made).__module__.startswith("raykv") and hasattr(made, "__dict__") and depth:
        for part in list(vars(made).values()):
            yield from _parts_of(part, depth - 1)


async def _awaited(answer: Any) -> Any:
    return await answer


class Node(NamedTuple):
    """A node, with the attributes that a node of Ray's Cluster has."""

    node_id: str


class OneProcess:
    """The Ray of this process. nodes: Ray node ids, the head first."""

    def __init__(self, nodes: int = 2) -> None:
        self.nodes = [secrets.token_hex(28) for _ in range(nodes)]
        self.worker_nodes = set[Node]()  # an attribute of Ray's Cluster
        self._kv: dict[bytes, bytes] = {}
        self._actors: dict[str, Handle] = {}
        self._lock = threading.Lock()

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the functions and classes of Ray that raykv uses."""
        for name in ("get", "wait", "kill", "get_actor", "get_runtime_context"):
            patch.setattr(ray, name, getattr(self, name))
            patch.setattr(ray_calls, name, getattr(self, name))
        patch.setattr(ray, "remote", self.remote)
        patch.setattr(ray, "nodes", self._nodes)
        patch.setattr(
            RemoteFunction, "_remote", lambda *args, **more: self._run(*args, **more)
        )  # for functions that were decorated before
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(Worker, "current_node_id", SimpleNamespace(hex=lambda: self.nodes[0]))
        patch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        patch.setattr(ray.util, "list_named_actors", self._list)
        patch.setattr(internal_kv, "jobs", lambda: [{"JobID": JOB, "IsDead": False}])
        for name in ("get", "put", "del", "list"):
            patch.setattr(internal_kv, f"_internal_kv_{name}", getattr(self, f"_kv_{name}"))
        patch.setattr(succession, "os", SimpleNamespace(_exit=_no_exit))
        patch.setattr(gc, "freeze", lambda: None)  # pytest's process lives on, and must collect its garbage
        patch.setattr(events, "begin", lambda *_, **__: None)  # it would log for all actors under one name
        patch.setattr(supervisor, "GcsClient", lambda address: self)
        supervisor._gcs.cache_clear()

    @contextlib.contextmanager
    def on(self, node_id: str) -> Iterator[None]:
        """This thread is on that node while the `with` block runs."""
        token = _here.set(node_id)
        try:
            yield
        finally:
            _here.reset(token)

    def add_node(self, **_: Any) -> Any:
        node = Node(secrets.token_hex(28))
        self.nodes.append(node.node_id)
        self.worker_nodes.add(node)
        return node

    def remove_node(self, node: "Node") -> None:
        """Remove a node. Calls of its actors fail from then on, though their threads still run."""
        self.worker_nodes.discard(node)
        self.nodes.remove(node.node_id)
        for actor in [actor for actor in self._actors.values() if actor._node == node.node_id]:
            self.kill(actor)

    # ------------------------------------------------------------------ functions of `ray`

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, Ref):
            return refs.value(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        return [ref.value(None if end is None else max(0.0, end - time.monotonic())) for ref in refs]

    def wait(self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            ready = [ref for ref in refs if ref._future.done()]
            left = None if end is None else end - time.monotonic()
            if len(ready) >= num_returns or (left is not None and left <= 0):
                ready = ready[:num_returns]
                return ready, [ref for ref in refs if ref not in ready]
            wait([ref._future for ref in refs if not ref._future.done()], left, FIRST_COMPLETED)

    def _run(self, function: RemoteFunction, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        return Remote(self, function._function, options).remote(*args, **(kwargs or {}))

    def kill(self, actor: Handle, no_restart: bool = True) -> None:
        actor._end()
        with self._lock:
            self._actors = {name: other for name, other in self._actors.items() if other is not actor}

    def get_actor(self, name: str, namespace: str = "") -> Handle:
        with self._lock:
            if name not in self._actors:
                raise ValueError(f"no actor {name!r}")
            return self._actors[name]

    def remote(self, *given: Any, **options: Any) -> Any:
        """`ray.remote`: a decorator of a class or function, with options or without."""
        if given:
            return Remote(self, given[0], options)
        return partial(Remote, self, options=options)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(
            get_node_id=lambda: _here.get(self.nodes[0]),
            get_job_id=lambda: JOB,
            get_worker_id=lambda: "",
            worker=SimpleNamespace(mode=ray.SCRIPT_MODE),
            get_session_name=lambda: f"session_{id(self)}",
            was_current_actor_reconstructed=False,
            gcs_address=f"gcs-{id(self)}",
            runtime_env={},  # vLLM reads it
        )

    def _nodes(self) -> list[dict[str, Any]]:
        head = {cluster.HEAD: 1.0}
        return [
            {"NodeID": node_id, "Alive": True, "NodeManagerAddress": "127.0.0.1", "Resources": {} if at else head}
            for at, node_id in enumerate(self.nodes)
        ]

    def _list(self, all_namespaces: bool = False) -> list[dict[str, str]]:
        with self._lock:
            return [{"name": name, "namespace": "raykv"} for name in self._actors]

    def get_all_node_info(self) -> dict[str, Any]:
        snapshot = SimpleNamespace(state=NodeSnapshot.IDLE)
        return {
            node_id: SimpleNamespace(node_id=bytes.fromhex(node_id), state=GcsNodeInfo.ALIVE, state_snapshot=snapshot)
            for node_id in self.nodes
        }

    def get_draining_nodes(self) -> dict[str, int]:
        return {}

    # ------------------------------------------------------------------ Ray's internal KV

    def _kv_get(self, key: str | bytes, namespace: bytes = b"") -> bytes | None:
        return self._kv.get(_bytes(key))

    def _kv_put(self, key: str | bytes, value: bytes, overwrite: bool = True, namespace: bytes = b"") -> bool:
        with self._lock:
            existed = _bytes(key) in self._kv
            if overwrite or not existed:
                self._kv[_bytes(key)] = value
            return existed

    def _kv_del(self, key: str | bytes, namespace: bytes = b"") -> int:
        with self._lock:
            return int(self._kv.pop(_bytes(key), None) is not None)

    def _kv_list(self, prefix: str | bytes, namespace: bytes = b"") -> list[bytes]:
        with self._lock:
            return [key for key in self._kv if key.startswith(_bytes(prefix))]


class Remote:
    def __init__(self, owner: OneProcess, made_of: Any, options: dict[str, Any]) -> None:
        self._owner, self._made_of, self._options = owner, made_of, options

    def options(self, **options: Any) -> "Remote":
        return Remote(self._owner, self._made_of, {**self._options, **options})

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        given = _thawed(_frozen((args, kwargs)))
        place = getattr(self._options.get("scheduling_strategy"), "node_id", self._owner.nodes[0])
        if not isinstance(self._made_of, type):
            return Handle(_task_of(self._made_of), place, {DEFAULT_GROUP: 1}, (), {}).run.remote(*args, **kwargs)
        name, owner = self._options.get("name", ""), self._owner
        threads = {DEFAULT_GROUP: self._options.get("max_concurrency", 1)}
        threads |= self._options.get("concurrency_groups", {})
        with owner._lock:
            if name and name in owner._actors:
                return owner._actors[name]
            handle = Handle(self._made_of, place, threads, *given)
            if name:
                owner._actors[name] = handle
            return handle


def _task_of(function: Callable[..., Any]) -> type:
    class Task:
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return Task


def _frozen(value: Any) -> Frozen:
    """Pickle a value as Ray does: arrays go in buffers apart, and arrive read-only."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickled, [bytes(buffer) for buffer in buffers]


def _thawed(sent: Frozen) -> Any:
    return pickle.loads(sent[0], buffers=sent[1])


def _no_exit(code: int) -> None:
    raise SystemExit(f"a directory was replaced, and ends its process with {code}: here that is pytest's")


def _bytes(key: str | bytes) -> bytes:
    return key if isinstance(key, bytes) else key.encode()
