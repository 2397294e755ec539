"""Answers calls of clients and node stores on a socket. Tells a Directory the time, locks the Directory, counts calls.

This module does not need Ray. `raykv.actors.directory.directory` makes the server a Ray actor.
"""

import functools
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from raykv.actors.directory.followers import Followers
from raykv.actors.directory.metrics import DirectoryMetrics, timed_every
from raykv.config import KEYS_PER_CALL, Quota
from raykv.directory.calls.why_missing import NO_MEMORY
from raykv.directory.directory import Directory
from raykv.line import wire
from raykv.line.listener import Connection, Listener, Unhurried
from raykv.protocol.calls import CALLS, CLIENT, STORE, may_ask
from raykv.protocol.clients import Call, Intent, MatchRequest
from raykv.protocol.location import KEY_BYTES, LOCATION, Address
from raykv.protocol.packing import packed, unpacked
from raykv.protocol.stores import ArenaDescription, Inventory, Joined, SlabReport
from raykv.system.hints import taker, takers

log = logging.getLogger("raykv")

Message = tuple[Any, ...]  # message of raykv.protocol, as a plain tuple, which Ray pickles fastest

# Maximum bytes of a frame. Clients split long lists of keys. A store's inventory may list many half-written slots.
FRAME_BYTES = {CLIENT: 4 << 20, STORE: 64 << 20}
PARTS = 1024  # maximum number of parts of one match: each rank has a part for each of its KV heads and kinds of layers
ERROR_CHARS = 1000  # maximum characters of a failed call's error text
LOG_EVERY_S = 60.0  # minimum seconds between two log lines about failed calls of the same method
PLAN_EVERY_S = 10.0  # seconds between two plans for a node's memory
PREFIXES, HOLDERS = 20, 3  # maximum numbers of prefixes and of holders that `stats` lists
T = TypeVar("T")


def one_at_a_time(method: Callable[..., T]) -> Callable[..., T]:
    """Run a method in one thread at a time: Ray's thread and the socket's thread share a Directory that has no lock.

    Callers pass plain values, which are converted according to the type hints. Other values raise ValueError.
    """
    name, clock, take = method.__name__, time.perf_counter, takers(method)
    every, least, few = timed_every(name), len(take) - len(method.__defaults__ or ()), CALLS[name].few

    @functools.wraps(method)
    def locked(self: "DirectoryServer", *args: Any) -> T:
        if not least <= len(args) <= len(take):
            raise ValueError(f"{name}: {len(args)} arguments: give {len(take)}")
        given = [one(arg) for one, arg in zip(take, args, strict=False)]
        if few and (size := len(getattr(given[1], "keys", given[1]))) > KEYS_PER_CALL * KEY_BYTES:
            raise ValueError(f"{size // KEY_BYTES} keys in a call: give at most {KEYS_PER_CALL}")
        with self._lock:
            calls = self._metrics.calls
            calls[name] = number = calls[name] + 1
            if number % every:
                return method(self, *given)
            begin = clock()
            try:
                return method(self, *given)
            finally:
                self._metrics.called(name, clock() - begin)

    return locked


_name, _arena = taker(str), taker(ArenaDescription)


class DirectoryServer:
    """Answers calls in the order of their arrival. Clients and stores make their calls over its socket.

    It has a method for each call in CALLS. `_served` makes most of these methods from Directory's functions.
    """

    def __init__(self, pool: str, metrics: DirectoryMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a server without a directory. metrics: counts the calls. clock: seconds of a monotonic clock."""
        self._pool, self._metrics, self._clock = pool, metrics, clock
        self._state: Directory | None = None  # None until `serve`
        self._listener: Listener | None = None
        self._lock = threading.Lock()  # guards _state, _followers
        self._logged: dict[str, float] = {}  # by method: time when a failure was last logged
        self._followers = Followers()
        self._planned: dict[str, float] = {}  # by node: time when the node last followed a plan

    def serve(self, directory: Directory) -> None:
        """Answer with this directory from now on."""
        self._state = directory

    def listen(self, host: str) -> Address:
        """Also answer on a socket. Returns the socket's address. Raises OSError."""
        self._listener = Listener(host, "raykv-calls", FRAME_BYTES, self._answer)
        return self._listener.address

    def close(self) -> None:
        """Close the socket."""
        if self._listener is not None:
            self._listener.close()

    @property
    def _directory(self) -> Directory:
        if self._state is None:
            raise RuntimeError(f"the directory of pool {self._pool} stands by: another one is in charge")
        return self._state

    def _answer(self, connection: Connection, request: bytes) -> bytes:
        """Answer a call over the socket with (True, answer) or (False, error)."""
        unhurried, name = False, ""
        try:
            method, *arguments = unpacked(request)
            if unhurried := method is None:  # see DirectoryLine.tell
                method, *arguments = arguments
            if not may_ask(connection.side, method):
                who = connection.side.decode()
                raise ValueError(f"there is no such call, or not over the socket, or not of a {who}: {method!r}")
            name = method
            answer = packed((True, getattr(self, method)(*arguments)))
        except Exception as error:  # only this call has failed; other callers must still be served
            answer = packed((False, self._failed(name, error)))
        return Unhurried(wire.frame(answer)) if unhurried else wire.frame(answer)

    def _failed(self, name: str, error: Exception) -> str:
        """Return the error text for the caller.

        Also logs the text, at most once a minute for each method, as callers repeat failed calls.
        """
        text, now = repr(error), time.monotonic()
        if len(text) > ERROR_CHARS:
            text = f"{text[:ERROR_CHARS]}... ({len(text)} characters)"
        if now - self._logged.get(name, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged[name] = now
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("pool %s: a call of %r failed: %s\n%s", self._pool, name, text, where)
        return text

    if TYPE_CHECKING:

        def __getattr__(self, call: str) -> Callable[..., Any]: ...

    def ping(self) -> int:
        return os.getpid()

    @one_at_a_time
    def match(self, call: Call, request: MatchRequest) -> Message:
        now = self._clock()
        answer = self._directory.match(call, request, now)
        if self._followers.there(now):
            answer = answer._replace(short=self._why_short(request.keys, len(answer.source) // LOCATION.itemsize))
        return tuple(answer)

    def _why_short(self, keys: bytes, found: int) -> str:
        next_key = keys[found * KEY_BYTES : (found + 1) * KEY_BYTES]
        return self._directory.why_missing(next_key) if next_key else ""

    @one_at_a_time
    def match_parts(self, call: Call, requests: tuple[MatchRequest, ...], intent: Intent | None) -> Message:
        if len(requests) > PARTS:
            raise ValueError(f"{len(requests)} parts in one match: at most {PARTS}")
        now = self._clock()
        answer = self._directory.match_parts(call, requests, intent, now)
        found, short = tuple(map(tuple, answer.parts)), answer.short
        if self._followers.there(now):
            short = self._why_parts_short(requests, len(answer.parts[0].source) // LOCATION.itemsize if found else 0)
        return answer.epoch, found, answer.pending, short

    def _why_parts_short(self, parts: tuple[MatchRequest, ...], found: int) -> str:
        """Return why a match of several parts ended: the reason of the first part whose next block is missing.

        If a part's next block is present, `_why_short` returns NO_MEMORY for the part.
        """
        reasons = [self._why_short(part.keys, found + part.ahead) for part in parts]
        return next((why for why in reasons if why != NO_MEMORY), NO_MEMORY)

    @one_at_a_time
    def done(self, call: Call, keys: bytes, again: bool = False, tenant: str = "") -> Message:
        return tuple(self._directory.done(call, keys, self._clock(), again, tenant))

    @one_at_a_time
    def report_requests(self, lines: tuple[bytes, ...], left_out: int) -> None:
        """Receive a client's lines about finished requests; see Followers."""
        self._followers.report(lines, left_out, self._clock())

    @one_at_a_time
    def follow(self, cursor: tuple[int, int, int]) -> Message:
        """Make clients report requests for a few seconds. Returns the fields of a Followed."""
        now, epoch = self._clock(), self._directory.epoch
        return tuple(self._followers.follow(cursor, epoch, self._directory.indices(), now))

    def join(self, name: str, arena: Message) -> Message:
        return tuple(self._join(name, arena)[0])

    def _join(self, name: str, arena: Message) -> tuple[Joined, bool]:
        """Return the answer, and whether the arena's epoch raised the directory's epoch."""
        with self._lock:
            before = self._directory.epoch
            joined = self._directory.join(_name(name), _arena(arena), self._clock())
        return joined, joined.epoch != before

    @one_at_a_time
    def adopt(self, name: str, slabs: SlabReport, found: Inventory) -> None:
        self._directory.set_slab_target(name, slabs, self._clock())
        self._directory.adopt(name, found, self._clock(), slabs.offered)

    @one_at_a_time
    def heartbeat(self, name: str, slabs: SlabReport) -> tuple[Message, Message] | None:
        """Return a Heartbeat and a SlabTarget, or None if the node must `join` again."""
        target = self._directory.set_slab_target(name, slabs, self._clock())
        answer = self._directory.heartbeat(name, slabs.offered, self._clock())
        if answer is None:
            return None
        self._follow_plan(name, self._clock())
        return tuple(answer), tuple(target)

    def _follow_plan(self, name: str, now: float) -> None:
        """Make a new plan for a node's memory, at most once in PLAN_EVERY_S."""
        if now - self._planned.get(name, -PLAN_EVERY_S) >= PLAN_EVERY_S:
            self._planned = {node: at for node, at in self._planned.items() if now - at < PLAN_EVERY_S} | {name: now}
            self._directory.follow(name, self._directory.next_plan(), now)

    @one_at_a_time
    def nodes(self) -> dict[int, str]:
        """Return nodes' names by index in locations. A node's memory and its own tier have different indices."""
        return self._directory.indices()

    @one_at_a_time
    def clear(self) -> tuple[int, int]:
        """Forget all blocks. Returns (generation up to which blocks are forgotten, number of forgotten keys)."""
        keys = self._directory.clear(self._clock())
        return self._directory.floor, keys

    @one_at_a_time
    def set_quota(self, tenant: str, minimum: float, maximum: float) -> None:
        """See Directory. Raises ValueError for an impossible quota."""
        self._directory.set_quota(tenant, Quota(minimum, maximum), self._clock())

    @one_at_a_time
    def remove_quota(self, tenant: str) -> bool:
        """Remove a tenant's quota. Returns whether the tenant had a quota."""
        return self._directory.remove_quota(tenant, self._clock())

    @one_at_a_time
    def quotas(self) -> dict[str, dict[str, Any]]:
        return self._directory.quotas.stats()

    @one_at_a_time
    def stats(self) -> dict[str, Any]:
        """Return the Directory's statistics, its largest `prefixes`, and `holders`: clients that hold the most blocks.

        Also returns the `socket` (host:port or None), and the number of `connections` to this socket.
        """
        listener = self._listener
        socket = f"{listener.address.host}:{listener.address.port}" if listener else None
        connections = len(listener.served) if listener else 0
        now = self._clock()
        prefixes = self._directory.largest_prefixes(PREFIXES, now)
        holders = self._directory.clients.largest(HOLDERS, now)
        more = {"prefixes": prefixes, "holders": holders, "socket": socket, "connections": connections}
        return {**self._directory.stats(now), **more}


def _served(name: str) -> Callable[..., Any]:
    """Make a method that calls the Directory's function of this name. It takes and returns plain values."""
    function = getattr(Directory, name)
    hints = get_type_hints(function)
    takes_now = hints.pop("now", None) is not None

    def method(self: DirectoryServer, *args: Any) -> Any:
        answer = function(self._directory, *args, *((self._clock(),) if takes_now else ()))
        return tuple(answer) if isinstance(answer, tuple) else answer

    del hints["state"]
    method.__name__, method.__annotations__ = name, hints
    return one_at_a_time(method)


for _call in CALLS.keys() - vars(DirectoryServer).keys():  # calls for which DirectoryServer defines no method
    setattr(DirectoryServer, _call, _served(_call))
