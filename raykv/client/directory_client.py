"""Sends a client's calls to the directory, with deadlines, and tracks whether the directory answers."""

import contextlib
import itertools
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import ray

from raykv.client.held import Held
from raykv.client.request_record import RequestReport
from raykv.config import KEYS_PER_CALL, KEYS_PER_JOINT_CALL
from raykv.keys import Keys
from raykv.line.bell import Bell
from raykv.line.directory_line import ERRORS, DirectoryLine
from raykv.metrics.exporter import Exporter
from raykv.protocol.calls import CALLS
from raykv.protocol.clients import (
    WRITTEN,
    Call,
    CommitRequest,
    Counted,
    Intent,
    Matched,
    MatchedParts,
    MatchRequest,
    NextWindowRequest,
    Reserved,
    ReserveRequest,
    Stored,
    Window,
)
from raykv.protocol.location import KEY_BYTES, Locations
from raykv.protocol.requests import RequestLine
from raykv.system.counts import Counts
from raykv.system.fork import refuse_forked

log = logging.getLogger("raykv")
LOG_EVERY_S = 60.0  # interval between two log lines about one kind of fault
PROBE_S = 1.0  # minimum deadline for the answer to a probe; after it, the client looks for another directory in charge
FORGET_S = 2.5  # minimum deadline for the directory to forget blocks: nobody waits for that answer

A = TypeVar("A", Matched, MatchedParts, Window, Reserved, Counted, Stored)
F = TypeVar("F", Matched, MatchedParts)


def _to_match(
    lease: int, node: str, keys: Keys, stage: int, window: int = 0, counted: bool = True, ahead: int = 0
) -> MatchRequest:
    cache = keys.cache
    sizes = cache.block_bytes, stage, window, cache.block_tokens
    return MatchRequest(lease, node, keys.tobytes(), *sizes, cache.tenant, counted, ahead)


class DirectoryClient:
    """Calls the directory. A call that exceeds its deadline is a miss, and so are later calls until a probe succeeds.

    The client chooses the ids of leases and reservations, and every call lists the held ids. So the directory can
    release the grants of a call that timed out. Thread-safe. Each client needs a Tending, which runs its thread:
    without heartbeats, the directory would assume that the client is gone.

    line: the line to the directory. deadline: seconds that a call may take. client: id of this client. faults: number
    of faults by kind. metrics: this process's metrics for Ray. requests: lines about requests, for people who follow
    them. held: the ids and reports that the next call sends. lock: guards `held`, `requests`, `rests` and the order of
    calls. up: whether the directory answered the last call in time. down_since, last_call: times (time.monotonic())
    when `up` last became False, and when the last call was sent. closed, left: whether `close` has begun, and has
    ended. bell: wakes the client's thread. rests: whether this thread sleeps until the next heartbeat, as nobody
    called since its last round. to_forget: keys of blocks that the directory must forget, in pieces of at most
    KEYS_PER_CALL keys.
    """

    def __init__(
        self,
        pool: str,
        newest_epoch: Callable[[], int],
        deadline: float,
        why_strange: Callable[[], str] = lambda: "",
        look_on: Callable[[], object] = lambda: None,
    ) -> None:
        """newest_epoch: returns the newest directory epoch known on this node. Older directories' answers are ignored.

        deadline: seconds that a call may take. why_strange: returns how the found directory's pool differs from the
        pool that this process attached to; "" if it is the same pool. The client never calls a directory of another
        pool. look_on: called in each round of the client's thread.
        """
        self.why_strange, self.look_on = why_strange, look_on
        self.pool, self.deadline = pool, deadline
        self.line = DirectoryLine(pool)
        self.faults = Counts()
        self.metrics = Exporter(pool)
        self.requests = RequestReport()
        self._newest_epoch = newest_epoch
        self.client = random.SystemRandom().getrandbits(63)
        self._ids = itertools.count(1)
        self.held = Held(self.client)
        self.lock = threading.RLock()  # reentrant: a signal handler may close the pool while its thread holds the lock
        self._dropped: deque[Sequence[int]] = deque()  # ids held by objects that were garbage-collected
        self._logged: dict[str, float] = {}
        self.up = self.line.find()
        self.down_since = self.last_call = time.monotonic()
        self.closed = self.left = False
        self.bell, self.rests = Bell(), False
        self.to_forget = list[bytes]()
        self._pid = os.getpid()

    # ------------------------------------------------------------------ blocks

    def match(self, node: str, keys: Keys, stage: int, counted: bool = True) -> tuple[int, Matched | None]:
        """Lease the longest ready prefix of `keys`, to read its blocks into the memory called `node`.

        stage, counted: see MatchRequest.
        Returns (id of the lease, answer). `release` ends the lease. If the answer is None, nothing is held.
        """
        lease = next(self._ids)
        answer = self._ask(Matched, "match", _to_match(lease, node, keys, stage, counted=counted), hold=(lease,))
        return lease, self._noticed(answer)

    def match_parts(
        self,
        readers: Sequence[str],
        keys: Sequence[Keys],
        needs: Sequence[tuple[int, int]],
        intent: Intent | None = None,
    ) -> tuple[list[int], MatchedParts | None]:
        """Find the longest prefix that is ready in all parts, and lease those of its blocks that the readers need.

        No block gets a staging slot. readers, keys: the reader's memory and the keys of each part, as for `match`.
        needs: (window, ahead) of each part: see MatchRequest. intent: an Intent whose id is from `new_id`, or is 0.
        Returns (ids of the leases, answer). `release` ends the leases and the intent. If the answer is None, nothing is
        held.
        """
        leases = [next(self._ids) for _ in keys]
        asked = zip(leases, readers, keys, needs, strict=True)
        requests = tuple(
            _to_match(lease, reader, part, 0, window, ahead=ahead) for lease, reader, part, (window, ahead) in asked
        )
        held = [*leases, intent.intent] if intent and intent.intent else leases
        answer = self._ask(MatchedParts, "match_parts", requests, intent, hold=held)
        return leases, self._noticed(answer)

    def _noticed(self, answer: F | None) -> F | None:
        """Note whether somebody follows requests. Returns the answer."""
        if answer is not None:
            self.requests.followed = answer.short is not None
        return answer

    def new_id(self) -> int:
        """Return a new id, for something that is held until `release`."""
        return next(self._ids)

    def next_window(self, request: NextWindowRequest) -> Window | None:
        """Give back staging slots of a lease, and get other slots."""
        return self._ask(Window, "next_window", request)

    def reserve(self, node: str, keys: Keys, start: int) -> tuple[int, Reserved | None]:
        """Reserve slots for the missing keys of keys[start:]. Their blocks are written from the memory called `node`.

        Returns (id of the reservation, answer). `release` ends the reservation. If the answer is None, nothing is held.
        """
        reservation = next(self._ids)
        cache = keys.cache
        request = ReserveRequest(reservation, node, keys.tobytes(), start, cache.block_bytes, cache.tenant)
        return reservation, self._ask(Reserved, "reserve", request, hold=(reservation,))

    def commit(self, reservation: int, locations: bytes, keys: bytes, written: bytes, wait: bool = True) -> int:
        """Make the written blocks of a reservation visible to readers. Returns how many blocks became visible.

        Without `wait`, returns the number of written blocks at once; later calls of this process arrive after this
        call. If the directory then makes fewer blocks visible, that counts as a fault. See CommitRequest.
        """
        request = CommitRequest(reservation, locations, keys, written)
        if wait:
            return _count(self._ask(Counted, "commit", request))
        if not self._may_ask():
            return 0
        expected = written.count(WRITTEN)
        try:
            with self.lock:
                if self.closed:
                    return 0
                self.line.tell("commit", self._call(), request, deliver=partial(self._on_committed, expected))
        except ERRORS as error:
            self.down("directory", f"a commit could not be sent: {error}")
            return 0
        return expected

    def _on_committed(self, expected: int, answer: tuple[int, int] | None) -> None:
        done = Counted(*answer).done if answer else 0
        if done < expected and not self.closed:
            self.fault("commit", f"{expected - done} of {expected} blocks that were written are not offered")

    def pin(self, keys: bytes) -> int:
        """See KVCache.pin. Returns the number of pinned keys."""
        return sum(_count(self._ask(Counted, "pin", some)) for some in _in_steps(keys, KEYS_PER_CALL))

    def unpin(self, keys: bytes) -> None:
        """See KVCache.unpin."""
        for some in _in_steps(keys, KEYS_PER_CALL):
            self._ask(Counted, "unpin", some)

    def touch(self, keys: Keys, seconds: float) -> int:
        """See KVCache.touch. Returns the number of keys that are in the pool."""
        tenant, steps = keys.cache.tenant, _in_steps(keys.tobytes(), KEYS_PER_CALL)
        return sum(_count(self._ask(Counted, "touch", some, seconds, tenant)) for some in reversed(steps))

    def done(self, keys: Keys, again: bool) -> int:
        """See KVCache.done. Returns the number of copies that will be evicted earlier."""
        tenant = keys.cache.tenant
        steps = _in_steps(keys.tobytes(), KEYS_PER_JOINT_CALL)
        return sum(_count(self._ask(Counted, "done", some, again, tenant)) for some in steps)

    def preempted(self, keys: bytes) -> int | None:
        """Keep the blocks of a preempted request while this client lives, or until `forget_later`.

        Returns the number of kept blocks: all blocks, or 0. Returns None if the directory did not answer. It may keep
        the blocks nevertheless.
        """
        for some in _in_steps(keys, KEYS_PER_CALL):
            answer = self._ask(Counted, "preempted", some)
            if answer is None:
                return None
            if not answer.done:
                self.forget_later(keys)
                return 0
        return len(keys) // KEY_BYTES

    def forget_later(self, keys: bytes) -> None:
        """Make the directory forget blocks that nobody will ask for again.

        The client's thread repeats the call until it succeeds.
        """
        self.to_forget += _in_steps(keys, KEYS_PER_CALL)
        self.bell.ring()

    def stored(self, keys: bytes) -> Stored | None:
        """Return which of the keys are stored (see Stored), or None if the directory does not answer."""
        refuse_forked()
        if not self.up or self.closed:
            return None
        try:
            return self._believed(Stored(*self.line.call("stored", keys, seconds=self.deadline)))
        except ERRORS:
            return None

    def nodes(self) -> dict[int, str]:
        """Return the nodes' names by index in locations, or {} if the directory does not answer."""
        refuse_forked()
        try:
            return cast(dict[int, str], self.line.call("nodes", seconds=self.deadline))
        except ERRORS:
            return {}

    # ------------------------------------------------------------------ reports for the next call

    def release(self, *held: int) -> None:
        """End leases or reservations. The next call to the directory reports the release."""
        with self.lock:
            self.held.release(held)
            self._rouse()

    def drop(self, held: Sequence[int]) -> None:
        """Note that the garbage collector removed an object that still held these leases or reservations.

        The client's thread ends these holds later, and reports a fault. `drop` takes no lock, since the garbage
        collector may call it at any point.
        """
        self._dropped.append(held)

    def release_dropped(self) -> None:
        """End the leases and reservations that `drop` has noted."""
        while self._dropped:
            held = self._dropped.popleft()
            self.release(*held)
            self.fault("dropped", f"{len(held)} leases or reservations were dropped unreleased: use `with`")

    def pulled(self, locations: Locations) -> None:
        """Report staging slots that now hold their blocks."""
        with self.lock:
            self.held.pulled(locations)
            self._rouse()

    def corrupt(self, locations: Locations) -> None:
        """Report locations where a reader found another block, no block, or altered bytes."""
        with self.lock:
            self.held.corrupt(locations)
            self._rouse()

    def report(self, line: RequestLine) -> None:
        """Report a finished request to followers, in the background. If too many lines wait, only count this line."""
        with self.lock:
            self.requests.add(line)
            self._rouse()

    def heartbeat(self) -> None:
        """Send a heartbeat to the directory now, and all reports that the next call would send."""
        self._ask(Counted, "client_heartbeat")

    # ------------------------------------------------------------------

    def fault(self, kind: str, detail: object = "") -> None:
        """Count a fault. Log each kind at most once a minute."""
        self.faults.add(kind)
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged[kind] = now
            log.warning("pool %s: %s: %s; treated as a miss (%d so far)", self.pool, kind, detail, self.faults[kind])

    def close(self) -> None:
        """Tell the directory that this client leaves. Later calls are misses.

        Waits for at most the pool's deadline, so that earlier calls arrive first.
        """
        if self.closed or self._pid != os.getpid():
            return
        self.closed = True
        try:
            with contextlib.suppress(*ERRORS):
                self._disconnect()
        finally:
            self.line.close()
            self.left = True
            self.bell.ring()

    def _disconnect(self) -> None:
        with self.lock:  # no call can follow this one: each call checks `closed` under the lock
            sent = self.line.send("disconnect", self.client) if ray.is_initialized() else None
        if sent is not None:
            self.line.wait(sent, self.deadline)

    def _may_ask(self) -> bool:
        """Whether an answer can be expected. Counts a fault if not."""
        refuse_forked()
        if self.up and not self.closed and ray.is_initialized():
            return True
        self.faults.add("down")
        return False

    def _ask(self, kind: type[A], method: str, *request: Any, hold: Sequence[int] = ()) -> A | None:
        """Return the answer to a call, or None for a miss. hold: ids to hold from now on, unless the answer is None."""
        if not self._may_ask():
            return None
        answer = self._send(kind, method, *request, hold=hold)
        if answer is None and hold:
            self.release(*hold)
        return answer

    def _send(
        self, kind: type[A], method: str, *request: Any, seconds: float | None = None, hold: Sequence[int] = ()
    ) -> A | None:
        """Send a call, and wait for the answer. seconds: deadline of the call; None: the pool's deadline."""
        try:
            with self.lock:  # calls must arrive in the order in which their lists of held ids were made
                if self.closed:  # a grant now would last until the directory notices that the client is gone
                    return None
                sent = self.line.send(method, self._call(hold), *request)
            answer = self.line.wait(sent, self.deadline if seconds is None else seconds)
            return self._believed(cast(A, CALLS[method].meant(answer)))
        except ERRORS as error:
            self.down("directory", f"no {kind.__name__} from it: {type(error).__name__}")
            return None
        except BaseException:  # a signal handler raised: the caller will never learn the ids
            if hold:
                self.release(*hold)
            raise

    def _believed(self, answer: A) -> A | None:
        """Return the answer, or None if it is from a directory that was replaced."""
        if answer.epoch < self._newest_epoch():
            self.down("stale", f"a directory of epoch {answer.epoch} answered, which was replaced")
            return None
        return answer

    def down(self, kind: str, detail: str) -> None:
        """Count a fault. From now on every call is a miss, until the client's thread has found a directory."""
        if self.up:
            self.down_since = time.monotonic()
        self.up = False
        self.bell.ring()
        self.fault(kind, detail)

    def _call(self, hold: Sequence[int] = ()) -> Call:
        """Make the next Call. The caller must hold the lock. hold: ids to hold from now on."""
        self._rouse()
        self.last_call = time.monotonic()
        return self.held.next_call(hold)

    def _rouse(self) -> None:
        """Wake the client's thread if it rests. The caller must hold the lock."""
        if self.rests:
            self.rests = False
            self.bell.ring()

    def probe(self) -> bool:
        """Send a heartbeat. Returns whether the directory answers."""
        return self._send(Counted, "client_heartbeat", seconds=max(PROBE_S, self.deadline)) is not None

    def forget(self, keys: bytes) -> bool:
        """Make the directory forget preempted blocks. Returns whether it did so. keys: at most KEYS_PER_CALL keys."""
        return self._send(Counted, "forget", keys, seconds=max(FORGET_S, self.deadline)) is not None


def _in_steps(keys: bytes, most: int) -> list[bytes]:
    """Split the keys into pieces of at most `most` keys."""
    step = most * KEY_BYTES
    return [keys[first : first + step] for first in range(0, len(keys), step)]


def _count(answer: Counted | None) -> int:
    return answer.done if answer else 0
