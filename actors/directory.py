"""The directory as an actor: a thin shell that adds the time, and answers on a socket beside Ray's calls.

A call through Ray costs this process ten times what the answer does. So clients and node stores keep a connection each,
which one thread serves; a lock keeps it and Ray's thread apart. Ray's calls are for administrators, and for whoever
can't reach the socket.
"""

import contextlib
import functools
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray

from raykv import internal_kv, named_actors
from raykv.actors.directory_metrics import DirectoryMetrics, timed_every
from raykv.actors.followers import Followers
from raykv.actors.succession import Succession
from raykv.config import WRITE_SHARES, Quota, may_use_sockets
from raykv.directory.directory import Directory
from raykv.directory.why_missing import NO_MEMORY
from raykv.protocol import (
    KEY_BYTES,
    LOCATION,
    ArenaDescription,
    Call,
    CommitRequest,
    DemotionReport,
    ExistingBlocks,
    GpuDemotionReport,
    Intent,
    Inventory,
    MatchRequest,
    NextWindowRequest,
    ReserveRequest,
    SlabReport,
    SweepResult,
    TierReport,
    packed,
    unpacked,
)
from raykv.system import events, free_memory, wire
from raykv.system.jit import compile_all
from raykv.system.listener import Connection, Listener, Unhurried
from raykv.system.wire import Address

log = logging.getLogger("raykv")

Message = tuple[Any, ...]  # of raykv.protocol, as a plain tuple: Ray pickles that fastest


CALLS = frozenset(  # what may be asked over the socket
    (
        # by the clients
        "ping",
        "nodes",
        "match",
        "match_parts",
        "next_window",
        "reserve",
        "commit",
        "pin",
        "unpin",
        "forget",
        "preempted",
        "locate_prefix",
        "stored",
        "client_heartbeat",
        "disconnect",
        # by the node stores
        "join",
        "adopt",
        "heartbeat",
        "sweep_result",
        "tier_heartbeat",
        "report_existing",
        "demote",
        "demote_gpu",
        "report_requests",
    )
)
FRAME_BYTES = 64 << 20  # the longest: what a store's writers left half done, of a big arena
PREFIXES = 20  # that `stats` has
SUCCESSOR_BYTES = 1 << 30  # a successor loads its kernels ahead where so much memory is free
P = ParamSpec("P")
T = TypeVar("T")


def one_at_a_time(
    method: Callable[Concatenate["DirectoryActor", P], T],
) -> Callable[Concatenate["DirectoryActor", P], T]:
    """A method that Ray's thread and the socket's may call: the Directory is a state machine for a single thread."""

    name, clock = method.__name__, time.perf_counter
    every = timed_every(name)

    @functools.wraps(method)
    def locked(self: "DirectoryActor", *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            calls = self._metrics.calls
            calls[name] = number = calls[name] + 1
            if number % every:
                return method(self, *args, **kwargs)
            begin = clock()
            try:
                return method(self, *args, **kwargs)
            finally:
                self._metrics.called(name, clock() - begin)

    return cast(Callable[Concatenate["DirectoryActor", P], T], locked)


class DirectoryActor:
    """Where every block of a pool is. Calls are answered in the order they came."""

    def __init__(self, pool: str, name: str) -> None:
        """name: this actor's. It serves if that is in charge, else it stands by: see Succession."""
        self._pool = pool
        self._state: Directory | None = None  # while in charge
        self._listener: Listener | None = None
        self._lock = threading.Lock()  # guards _state, _followers
        self._metrics, self._followers = DirectoryMetrics(pool, name), Followers()
        events.begin(named_actors.restarted(), role="directory", pool=pool, name=name, pid=os.getpid())
        if internal_kv.settings(pool) is None:  # `start` waits, and shows how far it is
            compile_all(
                "raykv.directory", lambda *done: internal_kv.put(pool, "compiled", "{} {}".format(*done).encode())
            )
        elif free_memory.free_bytes().free > SUCCESSOR_BYTES:
            _load_kernels()
        self._settings = internal_kv.await_settings(pool)
        self._succession = Succession(pool, name, _load_kernels, self._serve)
        self._succession.start()

    def __repr__(self) -> str:
        return f"Directory(pool={self._pool})"

    def ping(self) -> int:
        return os.getpid()

    def node_id(self) -> str:
        """Of the Ray node that it runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def take_charge(self) -> None:
        """Serve from now on, whatever directory did so before."""
        self._succession.take()

    def _serve(self) -> Address | None:
        """Begin, unless that is done. Returns where it listens."""
        if self._state is None:
            self._begin()
        return self._listener.address if self._listener else None

    def _begin(self) -> None:
        """Answer from now on, with an empty directory of an epoch of its own."""
        settings, epoch = self._settings, internal_kv.take_epoch(self._pool)
        directory = Directory(
            epoch, settings["locality"], share=WRITE_SHARES[settings["write"]], min_hits=settings["min_hits"]
        )
        for name in internal_kv.names(self._pool, "leaving"):
            directory.leave(name, time.monotonic())
        for tenant, quota in internal_kv.quotas(self._pool).items():
            try:
                directory.set_quota(tenant, quota, time.monotonic())
            except ValueError:  # two directories wrote at once
                log.exception("%r goes on without the quota of %r", self, tenant)
        directory.resume(self._metrics.saved())
        self._state = directory
        self._metrics.attach(directory, self._lock)
        self._metrics.start()
        with contextlib.suppress(PermissionError):  # Ray runs its workers at nice 15, and everybody waits for this one
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        gc.freeze()  # a collection that walks all of numba would hold up every caller
        self._listener = self._listen(settings["transport"])
        events.tell("serve", epoch=epoch, **internal_kv.shown(settings))

    @property
    def _directory(self) -> Directory:
        if self._state is None:
            raise RuntimeError(f"{self!r} stands by: another directory is in charge")
        return self._state

    def _listen(self, transport: str) -> Listener | None:
        """The socket, where clients may use one."""
        if not may_use_sockets(transport):
            return None
        try:
            return Listener(ray.util.get_node_ip_address(), "raykv-calls", FRAME_BYTES, self._answer)
        except OSError as error:
            log.warning("pool %s: no socket for the directory, which is called through Ray: %r", self._pool, error)
            return None

    def _answer(self, connection: Connection, request: bytes) -> bytes:
        """The answer to a call that came over the socket: (whether it could be answered, the answer or why not)."""
        unhurried = False
        try:
            method, *arguments = unpacked(request)
            if unhurried := method is None:  # see DirectoryLine.tell
                method, *arguments = arguments
            if method not in CALLS:
                raise ValueError(f"there is no such call, or not over the socket: {method!r}")
            answer = packed((True, getattr(self, method)(*arguments)))
        except Exception as error:  # the caller is confused; the others are to be served
            log.error("pool %s: a call failed: %r", self._pool, error, exc_info=error)
            answer = packed((False, repr(error)))
        return Unhurried(wire.frame(answer)) if unhurried else wire.frame(answer)

    @one_at_a_time
    def match(self, call: Message, request: Message) -> Message:
        asked, now = MatchRequest(*request), time.monotonic()
        answer = self._directory.match(Call(*call), asked, now)
        if self._followers.there(now):
            answer = answer._replace(short=self._why_short(asked.keys, len(answer.source) // LOCATION.itemsize))
        return tuple(answer)

    def _why_short(self, keys: bytes, found: int) -> str:
        next_key = keys[found * KEY_BYTES : (found + 1) * KEY_BYTES]
        return self._directory.why_missing(next_key) if next_key else ""

    @one_at_a_time
    def match_parts(self, call: Message, requests: tuple[Message, ...], intent: Message | None) -> Message:
        parts, now = tuple(MatchRequest(*request) for request in requests), time.monotonic()
        answer = self._directory.match_parts(Call(*call), parts, Intent(*intent) if intent else None, now)
        found, short = tuple(map(tuple, answer.parts)), answer.short
        if self._followers.there(now):
            short = self._why_parts_short(parts, len(answer.parts[0].source) // LOCATION.itemsize if found else 0)
        return answer.epoch, found, answer.pending, short

    def _why_parts_short(self, parts: tuple[MatchRequest, ...], found: int) -> str:
        """Of the part that was missing: the others are there, and would be called out of reach."""
        reasons = [self._why_short(part.keys, found) for part in parts]
        return next((why for why in reasons if why != NO_MEMORY), NO_MEMORY)

    @one_at_a_time
    def next_window(self, call: Message, request: Message) -> Message:
        return tuple(self._directory.next_window(Call(*call), NextWindowRequest(*request), time.monotonic()))

    @one_at_a_time
    def locate_prefix(self, keys: bytes) -> dict[str, int]:
        return self._directory.locate_prefix(keys)

    @one_at_a_time
    def stored(self, keys: bytes) -> Message:
        return tuple(self._directory.stored(keys))

    @one_at_a_time
    def reserve(self, call: Message, request: Message) -> Message:
        return tuple(self._directory.reserve(Call(*call), ReserveRequest(*request), time.monotonic()))

    @one_at_a_time
    def commit(self, call: Message, request: Message) -> Message:
        return tuple(self._directory.commit(Call(*call), CommitRequest(*request), time.monotonic()))

    @one_at_a_time
    def pin(self, call: Message, keys: bytes, ttl: float | None = None, priority: int | None = None) -> Message:
        return tuple(self._directory.pin(Call(*call), keys, time.monotonic(), ttl, priority))

    @one_at_a_time
    def unpin(self, call: Message, keys: bytes) -> Message:
        return tuple(self._directory.unpin(Call(*call), keys, time.monotonic()))

    @one_at_a_time
    def forget(self, call: Message, keys: bytes) -> Message:
        return tuple(self._directory.forget(Call(*call), keys, time.monotonic()))

    @one_at_a_time
    def preempted(self, call: Message, keys: bytes) -> Message:
        return tuple(self._directory.preempted(Call(*call), keys, time.monotonic()))

    @one_at_a_time
    def client_heartbeat(self, call: Message) -> Message:
        return tuple(self._directory.client_heartbeat(Call(*call), time.monotonic()))

    @one_at_a_time
    def disconnect(self, client: int) -> None:
        self._directory.disconnect(client, time.monotonic())

    @one_at_a_time
    def report_requests(self, lines: tuple[bytes, ...], left_out: int) -> None:
        """Requests of a client that are done; see Followers."""
        self._followers.report(lines, left_out, time.monotonic())

    @one_at_a_time
    def follow(self, cursor: tuple[int, int, int]) -> Message:
        """Have clients report requests for a moment, and answer with a Followed."""
        now, epoch = time.monotonic(), self._directory.epoch
        return tuple(self._followers.follow(cursor, epoch, self._directory.indices(), now))

    def join(self, name: str, arena: Message) -> Message:
        with self._lock:
            before = self._directory.epoch
            joined = self._directory.join(name, ArenaDescription(*arena), time.monotonic())
        if joined.epoch != before:  # the arena knew of later directories than Ray did
            internal_kv.take_epoch(self._pool, joined.epoch)
        events.tell("join", node=events.short(name), index=joined.node, epoch=joined.epoch)
        return tuple(joined)

    @one_at_a_time
    def adopt(self, name: str, report: Message, found: Message) -> None:
        slabs = SlabReport(*report)
        self._directory.set_slab_target(name, slabs, time.monotonic())
        self._directory.adopt(name, Inventory(*found), time.monotonic(), slabs.offered)

    @one_at_a_time
    def heartbeat(self, name: str, report: Message) -> tuple[Message, Message] | None:
        """A Heartbeat and a SlabTarget; None where the node must `join` again."""
        slabs = SlabReport(*report)
        target = self._directory.set_slab_target(name, slabs, time.monotonic())
        answer = self._directory.heartbeat(name, slabs.offered, time.monotonic())
        return None if answer is None else (tuple(answer), tuple(target))

    @one_at_a_time
    def sweep_result(self, result: Message) -> None:
        self._directory.sweep_result(SweepResult(*result), time.monotonic())

    @one_at_a_time
    def leave(self, name: str) -> None:
        self._directory.leave(name, time.monotonic())

    @one_at_a_time
    def stay(self, name: str) -> None:
        self._directory.stay(name, time.monotonic())

    @one_at_a_time
    def sole_copies(self, name: str) -> Message | None:
        answer = self._directory.sole_copies(name, time.monotonic())
        return None if answer is None else tuple(answer)

    @one_at_a_time
    def remove_node(self, name: str) -> int:
        return self._directory.remove_node(name, time.monotonic())

    @one_at_a_time
    def tier_heartbeat(self, name: str, report: Message) -> Message | None:
        reply = self._directory.tier_heartbeat(name, TierReport(*report), time.monotonic())
        return None if reply is None else tuple(reply)

    @one_at_a_time
    def report_existing(self, name: str, existing: Message) -> None:
        self._directory.report_existing(name, ExistingBlocks(*existing), time.monotonic())

    @one_at_a_time
    def demote(self, name: str, report: Message) -> Message:
        return tuple(self._directory.demote(name, DemotionReport(*report), time.monotonic()))

    @one_at_a_time
    def demote_gpu(self, name: str, report: Message) -> Message:
        return tuple(self._directory.demote_gpu(name, GpuDemotionReport(*report), time.monotonic()))

    @one_at_a_time
    def nodes(self) -> dict[int, str]:
        """Ray node ids by the index that locations carry, of nodes and of their own tiers."""
        return self._directory.indices()

    @one_at_a_time
    def clear(self) -> tuple[int, int]:
        """(generation up to which all blocks are forgotten, how many keys there were)."""
        keys = self._directory.clear(time.monotonic())
        return self._directory.floor, keys

    def set_quota(self, tenant: str, minimum: float, maximum: float) -> None:
        """See Directory; this and later directories keep it. ValueError for a quota that is not possible."""
        quota = Quota(minimum, maximum)
        with self._lock:
            self._directory.set_quota(tenant, quota, time.monotonic())
        internal_kv.put_quota(self._pool, tenant, quota)
        events.tell("quota", tenant=tenant, minimum=minimum, maximum=maximum)

    def remove_quota(self, tenant: str) -> bool:
        """Returns whether the tenant had a quota."""
        with self._lock:
            removed = self._directory.remove_quota(tenant, time.monotonic())
        internal_kv.put_quota(self._pool, tenant, None)
        events.tell("quota_removed", tenant=tenant)
        return removed

    @one_at_a_time
    def quotas(self) -> dict[str, dict[str, Any]]:
        return self._directory.quotas.stats()

    @one_at_a_time
    def stats(self) -> dict[str, Any]:
        """As of Directory; its largest `prefixes`; and where it listens: `socket` or None, and `connections` to it."""
        listener = self._listener
        socket = f"{listener.address.host}:{listener.address.port}" if listener else None
        connections = len(listener.served) if listener else 0
        now = time.monotonic()
        prefixes = self._directory.largest_prefixes(PREFIXES, now)
        return {**self._directory.stats(now), "prefixes": prefixes, "socket": socket, "connections": connections}


def _load_kernels() -> None:
    compile_all("raykv.directory")


def start_directory(pool: str, number: int, node_id: str) -> Any:
    """Start a directory on a node, or find it. Returns at once; it answers when its kernels are loaded."""
    name = named_actors.directory_name(pool, number)
    options = named_actors.options(name, node_id)
    return ray.remote(DirectoryActor).options(**options).remote(pool, name)
