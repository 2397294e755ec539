"""A client's line to the directory: deadlines, ids, and what it still holds."""

import contextlib
import itertools
import logging
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv.config import HEARTBEAT_S, METADATA_DEADLINE_S
from raykv.protocol import (
    Call,
    CommitRequest,
    Counted,
    Matched,
    MatchRequest,
    NextWindowRequest,
    Reserved,
    ReserveRequest,
)
from raykv.registry import find_directory, refuse_forked

log = logging.getLogger("raykv")
LOG_EVERY_S = 60.0

Locations = NDArray[np.void]
P = ParamSpec("P")
A = TypeVar("A", Matched, Reserved, Counted)
Answer = TypeVar("Answer")
M = TypeVar("M", bound=tuple[Any, ...])


class RemoteMethod(Protocol[P, Answer]):
    """A method of an actor's handle."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> "ray.ObjectRef[Answer]": ...


class DirectoryStub(Protocol):
    """What clients and routers ask of the directory (`raykv.actors.directory.DirectoryActor`).

    Each request and answer is sent as a plain tuple of the named fields; see `plain`.
    """

    match: RemoteMethod[[Call, MatchRequest], Matched]
    next_window: RemoteMethod[[Call, NextWindowRequest], Matched]
    reserve: RemoteMethod[[Call, ReserveRequest], Reserved]
    commit: RemoteMethod[[Call, CommitRequest], Counted]
    pin: RemoteMethod[[Call, bytes], Counted]  # bytes: keys
    unpin: RemoteMethod[[Call, bytes], Counted]
    forget: RemoteMethod[[Call, bytes], Counted]
    preempted: RemoteMethod[[Call, bytes], Counted]
    client_heartbeat: RemoteMethod[[Call], Counted]
    disconnect: RemoteMethod[[int], None]  # the client's id
    nodes: RemoteMethod[[], dict[int, str]]  # names of nodes by the index that locations carry
    locate_prefix: RemoteMethod[[bytes], dict[str, int]]  # keys; by node id, blocks of their longest ready prefix


def plain(message: M) -> M:
    """A message as the plain tuple that is sent, which pickles faster than its class. Typed as what it says."""
    return cast(M, tuple(message))


class DirectoryClient:
    """Calls the directory. Every call has a deadline; past it the answer is a miss, as are all until a probe returns.

    The ids of leases and reservations are chosen here, and every call lists those that are held: so after a
    call that timed out, the directory releases what that call granted. Thread-safe.

    actor: handle of the directory that was last in charge; None if there was none. faults: number of faults by kind.
    """

    def __init__(self, pool: str, newest_epoch: Callable[[], int]) -> None:
        """newest_epoch: the newest directory epoch known on this node; an older directory is not believed."""
        self.pool = pool
        self.faults: Counter[str] = Counter()
        self._newest_epoch = newest_epoch
        self.actor = _found(pool)
        self._client = random.SystemRandom().getrandbits(63)
        self._ids = itertools.count(1)
        self._seq = itertools.count(1)
        self._held: set[int] = set()
        self._pulled: list[Locations] = []
        self._corrupt: list[Locations] = []
        self._to_forget: list[bytes] = []
        self._lock = threading.Lock()  # guards _seq, _held, _pulled, _corrupt, and that calls are sent in their order
        self._up = self.actor is not None  # it answered the last call in time
        self._logged: dict[str, float] = {}
        self._last_call = time.monotonic()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._pid = os.getpid()
        threading.Thread(
            target=_heartbeat, args=(weakref.ref(self), self._wake), name="raykv-directory", daemon=True
        ).start()

    # ------------------------------------------------------------------ blocks

    def match(self, node: str, keys: bytes, block_bytes: int) -> tuple[int, Matched | None]:
        """Lease the longest prefix of `keys` that is ready, to read it into the memory called `node`.

        Returns (id of the lease, which is held until `release`, answer). None: nothing is held.
        """
        lease = next(self._ids)
        request = plain(MatchRequest(lease, node, keys, block_bytes))
        return lease, self._ask(Matched, lambda actor, call: actor.match.remote(call, request), lease)

    def next_window(self, lease: int, start: int, block_bytes: int) -> Matched | None:
        """Give back the staging slots of a lease's blocks before `start`, and take some for those that follow."""
        request = plain(NextWindowRequest(lease, start, block_bytes))
        return self._ask(Matched, lambda actor, call: actor.next_window.remote(call, request))

    def reserve(self, node: str, keys: bytes, start: int, block_bytes: int) -> tuple[int, Reserved | None]:
        """Slots for what is missing of keys[start:], to write it from the memory called `node`.

        Returns (id of the reservation, which is held until `release`, answer). None: nothing is held.
        """
        reservation = next(self._ids)
        request = plain(ReserveRequest(reservation, node, keys, start, block_bytes))
        return reservation, self._ask(Reserved, lambda actor, call: actor.reserve.remote(call, request), reservation)

    def commit(self, reservation: int, locations: bytes, keys: bytes, written: bytes) -> int:
        """Offer the blocks of a reservation that were written (see CommitRequest). Returns how many are offered."""
        request = plain(CommitRequest(reservation, locations, keys, written))
        return _count(self._ask(Counted, lambda actor, call: actor.commit.remote(call, request)))

    def pin(self, keys: bytes) -> int:
        """Have blocks stay until `unpin`. Returns how many of the keys are pinned now."""
        return _count(self._ask(Counted, lambda actor, call: actor.pin.remote(call, keys)))

    def unpin(self, keys: bytes) -> None:
        """End what `pin` began."""
        self._ask(Counted, lambda actor, call: actor.unpin.remote(call, keys))

    def preempted(self, keys: bytes) -> int | None:
        """Keep the blocks of a preempted request while this client is there, or until `forget_later`.

        Returns how many are kept: all, or 0. None where the directory did not answer, and may keep them all the same.
        """
        answer = self._ask(Counted, lambda actor, call: actor.preempted.remote(call, keys))
        return None if answer is None else answer.done

    def forget_later(self, keys: bytes) -> None:
        """Have blocks forgotten that nobody will ask for again: in the background, tried until it is done."""
        self._to_forget.append(keys)
        self._wake.set()

    def nodes(self) -> dict[int, str]:
        """Names of the nodes by the index that locations carry; empty where the directory does not answer."""
        refuse_forked()
        if self.actor is None:
            return {}
        try:
            return ray.get(self.actor.nodes.remote(), timeout=METADATA_DEADLINE_S)
        except RayError:
            return {}

    # ------------------------------------------------------------------ what the next call tells

    def release(self, held: int) -> None:
        """A lease or reservation is not held any more."""
        with self._lock:
            self._held.discard(held)

    def pulled(self, locations: Locations) -> None:
        """Staging slots hold their block now."""
        with self._lock:
            self._pulled.append(locations)

    def corrupt(self, locations: Locations) -> None:
        """Blocks are not what the directory said."""
        with self._lock:
            self._corrupt.append(locations)

    def heartbeat(self) -> None:
        """Tell the directory now what it would learn with the next call, and that this client is there."""
        self._ask(Counted, lambda actor, call: actor.client_heartbeat.remote(call))

    # ------------------------------------------------------------------

    def fault(self, kind: str, detail: object = "") -> None:
        """Count a fault; log it once a minute."""
        self.faults[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged[kind] = now
            log.warning("pool %s: %s: %s; treated as a miss (%d so far)", self.pool, kind, detail, self.faults[kind])

    def close(self) -> None:
        """Tell the directory that this client leaves, without waiting. Later calls are misses."""
        if not self._closed.is_set() and self._pid == os.getpid():
            self._closed.set()
            self._wake.set()
            if ray.is_initialized() and self.actor is not None:
                with contextlib.suppress(RayError):
                    self.actor.disconnect.remote(self._client)

    def _ask(
        self, kind: type[A], send: Callable[[DirectoryStub, Call], "ray.ObjectRef[A]"], hold: int | None = None
    ) -> A | None:
        """The answer to a call, or None: a miss. hold: id that is held from now on, unless the answer is None."""
        refuse_forked()
        if not self._up or self._closed.is_set() or not ray.is_initialized():
            self.faults["down"] += 1
            return None
        answer = self._send(kind, send, METADATA_DEADLINE_S, hold)
        if answer is None and hold is not None:
            self.release(hold)
        return answer

    def _send(
        self, kind: type[A], send: Callable[[DirectoryStub, Call], Any], deadline: float, hold: int | None = None
    ) -> A | None:
        assert self.actor is not None
        try:
            with self._lock:  # calls must arrive in the order in which their lists of held ids were made
                if hold is not None:
                    self._held.add(hold)
                ref = send(self.actor, plain(self._call()))
            answer = kind(*ray.get(ref, timeout=deadline))
        except RayError as error:
            self._down("directory", f"no {kind.__name__} from it: {type(error).__name__}")
            return None
        except BaseException:  # a signal's: its caller will never know of the hold
            if hold is not None:
                self.release(hold)
            raise
        if answer.epoch < self._newest_epoch():
            self._down("stale", f"a directory of epoch {answer.epoch} answered, which was replaced")
            return None
        return answer

    def _down(self, kind: str, detail: str) -> None:
        self._up = False
        self._wake.set()
        self.fault(kind, detail)

    def _call(self) -> Call:
        """Under the lock."""
        self._last_call = time.monotonic()
        pulled, corrupt = _joined(self._pulled), _joined(self._corrupt)
        held = np.array(sorted(self._held), np.uint64).tobytes()
        return Call(self._client, next(self._seq), held, pulled, corrupt)

    def _tend(self) -> None:
        """Send a heartbeat, and reports that no call has carried yet; find the directory again if it was down."""
        if not self._up:
            actor = _found(self.pool)
            if actor is not None:
                self.actor = actor
                self._up = self._probe(10 * METADATA_DEADLINE_S)
            return
        if time.monotonic() - self._last_call > HEARTBEAT_S / 2 or self._pulled or self._corrupt:
            self._probe(4 * METADATA_DEADLINE_S)
        while self._to_forget and self._forget(self._to_forget[0]):
            self._to_forget.pop(0)

    def _probe(self, deadline: float) -> bool:
        return self._send(Counted, lambda actor, call: actor.client_heartbeat.remote(call), deadline) is not None

    def _forget(self, keys: bytes) -> bool:
        answer = self._send(Counted, lambda actor, call: actor.forget.remote(call, keys), 10 * METADATA_DEADLINE_S)
        return answer is not None


def _heartbeat(reference: "weakref.ref[DirectoryClient]", wake: threading.Event) -> None:
    """The thread of a client; ends with it."""
    while True:
        wake.wait(HEARTBEAT_S / 2)
        client = reference()
        if client is None or client._closed.is_set():
            return
        if wake.is_set() and not client._up:
            time.sleep(0.05)  # a directory that is restarting refuses at once
        wake.clear()
        try:
            if ray.is_initialized():
                client._tend()
        except Exception as error:  # a client that no longer probes would stay down for good
            client.fault("probe", repr(error))
        del client


def _found(pool: str) -> DirectoryStub | None:
    try:
        return cast(DirectoryStub, find_directory(pool))
    except (ValueError, RayError):
        return None


def _joined(parts: list[Locations]) -> bytes:
    data = b"".join(part.tobytes() for part in parts)
    parts.clear()
    return data


def _count(answer: Counted | None) -> int:
    return answer.done if answer else 0
