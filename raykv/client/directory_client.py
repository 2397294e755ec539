"""A client's line to the directory: its deadlines, and the ids that the client holds."""

import contextlib
import itertools
import logging
import os
import random
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import ray
from numpy.typing import NDArray

from raykv.client.request_record import RequestReport
from raykv.config import CLIENT_TTL_S, HEARTBEAT_S, KEYS_PER_CALL
from raykv.keys import Keys
from raykv.line.bell import Bell
from raykv.line.directory_line import ERRORS, DirectoryLine
from raykv.line.wire import Stream
from raykv.metrics.exporter import EXPORT_S, Exporter
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
from raykv.protocol.location import KEY_BYTES
from raykv.protocol.requests import RequestLine
from raykv.system.counts import Counts
from raykv.system.fork import refuse_forked

log = logging.getLogger("raykv")
LOG_EVERY_S = 60.0  # between two lines of the log about one kind of fault
TEND_S = HEARTBEAT_S / 2  # between two looks of a client's thread, while the client is in use
HEARTBEAT_AFTER_S = CLIENT_TTL_S / 4  # without a call: the directory takes a client for gone after CLIENT_TTL_S
PROBE_S = 1.0  # at least: for a silent directory to answer, before the client looks for another directory in charge
FORGET_S = 2.5  # at least: for a call that nobody waits for

Locations = NDArray[np.void]
A = TypeVar("A", Matched, MatchedParts, Window, Reserved, Counted, Stored)
F = TypeVar("F", Matched, MatchedParts)
M = TypeVar("M", bound=tuple[Any, ...])


def plain(message: M) -> M:
    """A message as the plain tuple that the line sends. It keeps the message's type for mypy."""
    return cast(M, tuple(message))


def _to_match(
    lease: int, node: str, keys: Keys, stage: int, window: int = 0, counted: bool = True, ahead: int = 0
) -> MatchRequest:
    cache = keys.cache
    sizes = cache.block_bytes, stage, window, cache.block_tokens
    return MatchRequest(lease, node, keys.tobytes(), *sizes, cache.tenant, counted, ahead)


class DirectoryClient:
    """Calls the directory. Past its deadline a call is a miss. Later calls are misses too, until a probe returns.

    The client chooses the ids of leases and reservations, and every call lists the held ids. So the directory releases
    the grants of a call that timed out. Thread-safe.

    line: the way to the directory. deadline: seconds that a call may take. client: id of this client. faults: number of
    faults by kind. metrics: this process's counts for Ray. requests: lines for people who follow requests.
    """

    def __init__(
        self,
        pool: str,
        newest_epoch: Callable[[], int],
        deadline: float,
        why_strange: Callable[[], str] = lambda: "",
        look_on: Callable[[], object] = lambda: None,
    ) -> None:
        """newest_epoch: the newest directory epoch known on this node; the client believes no older directory.

        deadline: seconds that a call may take. why_strange: why the found directory belongs to another pool of the same
        name; "" if it does not. The client does not ask such a directory. look_on: called whenever the client's thread
        looks.
        """
        self._why_strange, self._look_on = why_strange, look_on
        self.pool, self.deadline = pool, deadline
        self.line = DirectoryLine(pool)
        self.faults = Counts()
        self.metrics, self._exported = Exporter(pool), 0.0
        self.requests = RequestReport()
        self._newest_epoch = newest_epoch
        self.client = random.SystemRandom().getrandbits(63)
        self._ids = itertools.count(1)
        self._seq = itertools.count(1)
        self._held: set[int] = set()
        self._pulled: list[Locations] = []
        self._corrupt: list[Locations] = []
        self._to_forget: list[bytes] = []
        self._dropped: deque[Sequence[int]] = deque()  # ids held by objects that were collected as garbage
        self._lock = threading.Lock()  # guards the fields above, and that calls are sent in the order of their _seq
        self._news = False  # the directory does not know all of these fields yet
        self._up = self.line.find()  # the directory answered the last call in time
        self._down_since = time.monotonic()  # when `_up` last became False
        self._logged: dict[str, float] = {}
        self._last_call = self._seen_call = time.monotonic()
        self._bell = bell = Bell()
        self._rests = False  # nobody called since the thread last looked: the thread waits for the next heartbeat
        self._closed, self._left = threading.Event(), threading.Event()  # `close` was called; `close` is done
        self._pid = os.getpid()
        threading.Thread(
            target=_tend_forever,
            args=(weakref.ref(self, lambda _: bell.ring()), bell),
            name="raykv-directory",
            daemon=True,
        ).start()

    # ------------------------------------------------------------------ blocks

    def match(self, node: str, keys: Keys, stage: int, counted: bool = True) -> tuple[int, Matched | None]:
        """Lease the longest ready prefix of `keys`, to read its blocks into the memory called `node`.

        stage, counted: see MatchRequest.
        Returns (id of the lease, answer). `release` ends the lease. Answer None: nothing is held.
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
        """Lease the blocks that several readers need of the longest prefix that is ready in all parts. Stages nothing.

        readers, keys: of each part, as for `match`. needs: (window, ahead) of each part: see MatchRequest.
        intent: with an id from `new_id`, or 0.
        Returns (ids of the leases, answer). `release` ends the leases and the intent. Answer None: nothing is held.
        """
        leases = [next(self._ids) for _ in keys]
        asked = zip(leases, readers, keys, needs, strict=True)
        requests = tuple(
            plain(_to_match(lease, reader, part, 0, window, ahead=ahead))
            for lease, reader, part, (window, ahead) in asked
        )
        held = [*leases, intent.intent] if intent and intent.intent else leases
        answer = self._ask(MatchedParts, "match_parts", requests, intent and plain(intent), hold=held)
        return leases, self._noticed(answer)

    def _noticed(self, answer: F | None) -> F | None:
        """The answer, after noting whether somebody follows requests."""
        if answer is not None:
            self.requests.followed = answer.short is not None
        return answer

    def new_id(self) -> int:
        """A new id, for a hold that `release` ends."""
        return next(self._ids)

    def next_window(self, request: NextWindowRequest) -> Window | None:
        """Give back staging slots of a lease, and take other slots."""
        return self._ask(Window, "next_window", request)

    def reserve(self, node: str, keys: Keys, start: int) -> tuple[int, Reserved | None]:
        """Slots for the missing keys of keys[start:], to write their blocks from the memory called `node`.

        Returns (id of the reservation, answer). `release` ends the reservation. Answer None: nothing is held.
        """
        reservation = next(self._ids)
        cache = keys.cache
        request = ReserveRequest(reservation, node, keys.tobytes(), start, cache.block_bytes, cache.tenant)
        return reservation, self._ask(Reserved, "reserve", request, hold=(reservation,))

    def commit(self, reservation: int, locations: bytes, keys: bytes, written: bytes, wait: bool = True) -> int:
        """Offer the blocks of a reservation that were written (see CommitRequest).

        Returns how many blocks are offered. Without `wait`: how many were written. The call is then on its way, and
        later calls of this process arrive after it. If fewer blocks are offered in the end, that counts as a fault.
        """
        request = CommitRequest(reservation, locations, keys, written)
        if wait:
            return _count(self._ask(Counted, "commit", request))
        if not self._may_ask():
            return 0
        expected = written.count(WRITTEN)
        try:
            with self._lock:
                if self._closed.is_set():
                    return 0
                self.line.tell("commit", self._call(), plain(request), deliver=partial(self._on_committed, expected))
        except ERRORS as error:
            self._down("directory", f"a commit could not be sent: {error}")
            return 0
        return expected

    def _on_committed(self, expected: int, answer: tuple[int, int] | None) -> None:
        done = Counted(*answer).done if answer else 0
        if done < expected and not self._closed.is_set():
            self.fault("commit", f"{expected - done} of {expected} blocks that were written are not offered")

    def pin(self, keys: bytes, ttl: float | None = None, priority: int | None = None) -> int:
        """See KVCache.pin. Returns how many of the keys are pinned on these terms."""
        return sum(_count(self._ask(Counted, "pin", some, ttl, priority)) for some in _in_steps(keys))

    def unpin(self, keys: bytes) -> None:
        """End pins."""
        for some in _in_steps(keys):
            self._ask(Counted, "unpin", some)

    def done(self, keys: Keys, again: bool) -> int:
        """See KVCache.done. Returns how many copies go before blocks in use."""
        steps = _in_steps(keys.tobytes())[:: -1 if again else 1]  # the end of a chain goes before its beginning
        return sum(_count(self._ask(Counted, "done", some, again, keys.cache.tenant)) for some in steps)

    def preempted(self, keys: bytes) -> int | None:
        """Keep the blocks of a preempted request while this client is there, or until `forget_later`.

        Returns how many blocks are kept: all, or 0. None if the directory did not answer; it may keep them anyway.
        """
        for some in _in_steps(keys):
            answer = self._ask(Counted, "preempted", some)
            if answer is None:
                return None
            if not answer.done:
                self.forget_later(keys)
                return 0
        return len(keys) // KEY_BYTES

    def forget_later(self, keys: bytes) -> None:
        """Have the directory forget blocks that nobody will ask for again. The client's thread tries until it has."""
        self._to_forget += _in_steps(keys)
        self._bell.ring()

    def stored(self, keys: bytes) -> Stored | None:
        """Which of the keys are stored (see Stored). None if the directory does not answer."""
        refuse_forked()
        if not self._up or self._closed.is_set():
            return None
        try:
            return self._believed(Stored(*self.line.call("stored", keys, seconds=self.deadline)))
        except ERRORS:
            return None

    def nodes(self) -> dict[int, str]:
        """Names of the nodes by their index in locations. Empty if the directory does not answer."""
        refuse_forked()
        try:
            return cast(dict[int, str], self.line.call("nodes", seconds=self.deadline))
        except ERRORS:
            return {}

    # ------------------------------------------------------------------ what the next call tells

    def release(self, *held: int) -> None:
        """End leases or reservations. The directory learns of all of them in one call."""
        with self._lock:
            self._held.difference_update(held)
            self._has_news()

    def drop(self, held: Sequence[int]) -> None:
        """The garbage collector took an object that still held these ids. The client's thread ends and reports them.

        Takes no lock: the garbage collector may call it anywhere.
        """
        self._dropped.append(held)

    def _release_dropped(self) -> None:
        while self._dropped:
            held = self._dropped.popleft()
            self.release(*held)
            self.fault("dropped", f"{len(held)} leases or reservations were dropped unreleased: use `with`")

    def pulled(self, locations: Locations) -> None:
        """Report that staging slots hold their block now."""
        with self._lock:
            self._pulled.append(locations)
            self._has_news()

    def corrupt(self, locations: Locations) -> None:
        """Report blocks that are not what the directory said."""
        with self._lock:
            self._corrupt.append(locations)
            self._has_news()

    def report(self, line: RequestLine) -> None:
        """Tell followers of a finished request, in the background. If too many lines wait, only count this one."""
        with self._lock:
            self.requests.add(line)
            self._rouse()

    def _has_news(self) -> None:
        """Under the lock."""
        self._news = True
        self._rouse()

    def heartbeat(self) -> None:
        """Tell the directory now that this client is there, and all that the next call would tell."""
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

        Waits at most for the pool's deadline, so that earlier calls arrive first.
        """
        if not self._closed.is_set() and self._pid == os.getpid():
            self._closed.set()
            # no call may follow `disconnect`; with a limit, as a signal's handler may have interrupted such a call
            if self._lock.acquire(timeout=self.deadline):
                self._lock.release()
            if ray.is_initialized():
                with contextlib.suppress(*ERRORS):
                    self.line.call("disconnect", self.client, seconds=self.deadline)
            self.line.close()
            self._left.set()
            self._bell.ring()

    def _may_ask(self) -> bool:
        """Whether to expect an answer. Counts a fault if not."""
        refuse_forked()
        if self._up and not self._closed.is_set() and ray.is_initialized():
            return True
        self.faults.add("down")
        return False

    def _ask(self, kind: type[A], method: str, *request: Any, hold: Sequence[int] = ()) -> A | None:
        """The answer to a call; None: a miss. hold: ids to hold from now on, unless the answer is None."""
        if not self._may_ask():
            return None
        answer = self._send(kind, method, *request, hold=hold)
        if answer is None and hold:
            self.release(*hold)
        return answer

    def _send(
        self, kind: type[A], method: str, *request: Any, seconds: float | None = None, hold: Sequence[int] = ()
    ) -> A | None:
        """seconds: default: the pool's deadline."""
        plain_request = [plain(part) if isinstance(part, tuple) else part for part in request]
        try:
            with self._lock:  # calls must arrive in the order in which their lists of held ids were made
                if self._closed.is_set():  # what the directory granted now would stay until it misses the client
                    return None
                sent = self.line.send(method, self._call(hold), *plain_request)
            answer = self.line.wait(sent, self.deadline if seconds is None else seconds)
            return self._believed(cast(A, CALLS[method].meant(answer)))
        except ERRORS as error:
            self._down("directory", f"no {kind.__name__} from it: {type(error).__name__}")
            return None
        except BaseException:  # a signal handler raised: the caller will never know of the hold
            if hold:
                self.release(*hold)
            raise

    def _believed(self, answer: A) -> A | None:
        """The answer; None if a directory that was replaced gave it."""
        if answer.epoch < self._newest_epoch():
            self._down("stale", f"a directory of epoch {answer.epoch} answered, which was replaced")
            return None
        return answer

    def _down(self, kind: str, detail: str) -> None:
        if self._up:
            self._down_since = time.monotonic()
        self._up = False
        self._bell.ring()
        self.fault(kind, detail)

    def _call(self, hold: Sequence[int] = ()) -> Call:
        """Under the lock: the next Call. hold: ids to hold from now on."""
        self._held.update(hold)
        self._rouse()
        self._last_call = time.monotonic()
        pulled, corrupt = _joined(self._pulled), _joined(self._corrupt)
        self._news = bool(self._pulled or self._corrupt)
        held = array("Q", self._held).tobytes()
        return plain(Call(self.client, next(self._seq), held, pulled, corrupt))

    def _rouse(self) -> None:
        """Under the lock: have the thread look every TEND_S again."""
        if self._rests:
            self._rests = False
            self._bell.ring()

    def _rest(self) -> tuple[float, Stream | None]:
        """(seconds that the thread may rest, the connection whose end must wake it)."""
        if not ray.is_initialized() or not self._up:
            return TEND_S, None
        with self._lock:
            self._rests = self._last_call == self._seen_call and not self._news and not self.requests.waits
            self._seen_call = self._last_call
            due = self._last_call + HEARTBEAT_AFTER_S - time.monotonic()
        return max(0.0, due) if self._rests else TEND_S, self.line.connection

    def _tend(self) -> None:
        """Send a heartbeat when one is due, and news that no call has told yet. Find a lost directory again."""
        self._look_on()
        self._release_dropped()
        if not self._up:
            if self.line.way == "socket" and self.line.look():
                self._up = self._probe()
            if not self._up:
                self.line.close()  # its fault does not matter: a new line is found next
                self._up = self.line.find() and not self._turned_away() and self._probe()
            if self._up:
                self.metrics.add("without_directory_seconds_total", time.monotonic() - self._down_since)
            return
        if not self.line.look():
            self._down("directory", "it closed the connection")
            return
        if self._news or time.monotonic() - self._last_call > HEARTBEAT_AFTER_S:
            self._probe()
        if self.requests.waits:
            self._report_requests()
        while self._to_forget and self._forget(self._to_forget[0]):
            self._to_forget.pop(0)

    def _turned_away(self) -> bool:
        """Whether the found directory belongs to another pool. Closes the line to such a directory."""
        if why := self._why_strange():
            self.line.close()
            self.fault("strange", why)
        return bool(why)

    def _report_requests(self) -> None:
        with self._lock:
            lines, left_out = self.requests.take()
        try:
            self.line.tell("report_requests", lines, left_out)
        except ERRORS as error:
            self._down("directory", f"lines of requests could not be sent: {error}")

    def _export(self) -> None:
        """Send the counts to Ray: once in EXPORT_S, and before the thread rests."""
        if not self._rests and time.monotonic() < self._exported + EXPORT_S:
            return
        for kind, count in dict(self.faults).items():
            self.metrics.total("faults_total", count, kind=kind)
        if self.metrics.waits and ray.is_initialized():
            self._exported = time.monotonic()
            self.metrics.flush()

    def _probe(self) -> bool:
        return self._send(Counted, "client_heartbeat", seconds=max(PROBE_S, self.deadline)) is not None

    def _forget(self, keys: bytes) -> bool:
        return self._send(Counted, "forget", keys, seconds=max(FORGET_S, self.deadline)) is not None


def _tend_forever(reference: "weakref.ref[DirectoryClient]", bell: Bell) -> None:
    """The thread of a client. It ends with the client."""
    pause: float = TEND_S
    connection: Stream | None = None
    while True:
        rung = bell.wait(pause, connection)
        client = reference()
        if client is None:
            return
        if client._left.is_set():
            client.line.close()  # the thread may have found a line since
            return
        if rung and not client._up:
            time.sleep(0.05)  # a restarting directory refuses connections for a moment
        client._rests = False
        try:
            if ray.is_initialized() and not client._closed.is_set():
                client._tend()
        except Exception as error:  # a client that no longer probes would stay down for good
            client.fault("probe", repr(error))
        pause, connection = client._rest()
        try:
            client._export()
        except Exception as error:  # Ray is being shut down, or can't export: that makes no call a miss
            log.debug("pool %s: its metrics: %r", client.pool, error)
        del client


def _joined(parts: list[Locations]) -> bytes:
    """Take the first KEYS_PER_CALL locations out. The rest goes with later calls."""
    if not parts:
        return b""
    whole = np.concatenate(parts)
    parts[:] = [whole[KEYS_PER_CALL:]] if len(whole) > KEYS_PER_CALL else []
    return whole[:KEYS_PER_CALL].tobytes()


def _in_steps(keys: bytes) -> list[bytes]:
    """The keys in pieces of at most KEYS_PER_CALL."""
    step = KEYS_PER_CALL * KEY_BYTES
    return [keys[first : first + step] for first in range(0, len(keys), step)]


def _count(answer: Counted | None) -> int:
    return answer.done if answer else 0
