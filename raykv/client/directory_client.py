"""A client's line to the directory: deadlines, ids, and what is still held."""

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
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv.config import HEARTBEAT_S, METADATA_DEADLINE_S
from raykv.protocol import ANSWERS, Call
from raykv.registry import find_directory

log = logging.getLogger("raykv")
LOG_EVERY_S = 60.0


class DirectoryClient:
    """Every call has a deadline; past it the answer is None, a miss, until a probe has returned.

    The ids of leases and reservations are chosen here, and every call lists those still held: whatever became of a call
    that timed out, the directory lets go of what it granted then. Thread-safe.
    """

    def __init__(self, pool: str, newest_epoch: Callable[[], int]) -> None:
        """newest_epoch: the newest directory epoch known on this node; an older directory is not believed."""
        self.pool = pool
        self.faults: Counter[str] = Counter()
        self._newest_epoch = newest_epoch
        self.directory = _found(pool)  # the one that was last in charge; None if there was none
        self._client = random.SystemRandom().getrandbits(63)
        self._ids = itertools.count(1)
        self._seq = itertools.count(1)
        self._held: set[int] = set()
        self._pulled: list[NDArray[np.void]] = []
        self._corrupt: list[NDArray[np.void]] = []
        self._retries: list[tuple[str, tuple[Any, ...]]] = []
        self._lock = threading.Lock()
        self._up = self.directory is not None
        self._logged: dict[str, float] = {}
        self._last_call = time.monotonic()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._pid = os.getpid()
        threading.Thread(
            target=_heartbeat, args=(weakref.ref(self), self._wake), name="raykv-link", daemon=True
        ).start()

    def hold(self, method: str, *args: Any) -> tuple[int, Any]:
        """Call a method that grants a hold: (id, answer). The id is held from now on, unless the answer is None."""
        hold = next(self._ids)
        answer = self._call(method, (hold, *args), METADATA_DEADLINE_S, hold)
        if answer is None:
            self.release(hold)
        return hold, answer

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the directory; None is a miss."""
        return self._call(method, args, METADATA_DEADLINE_S)

    def release(self, hold: int) -> None:
        """Told with the next call."""
        with self._lock:
            self._held.discard(hold)

    def pulled(self, locations: NDArray[np.void]) -> None:
        """Staging slots that now hold their block. Told with the next call."""
        with self._lock:
            self._pulled.append(locations)

    def corrupt(self, locations: NDArray[np.void]) -> None:
        """Blocks that were not what the directory said. Told with the next call."""
        with self._lock:
            self._corrupt.append(locations)

    def retry_later(self, method: str, *args: Any) -> None:
        """Call a method of the directory in the background, until it has answered."""
        self._retries.append((method, args))
        self._wake.set()

    def fault(self, kind: str, detail: object = "") -> None:
        """Count a fault; say so once a minute."""
        self.faults[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged[kind] = now
            log.warning("pool %s: %s %s; treated as a miss (%d so far)", self.pool, kind, detail, self.faults[kind])

    def close(self) -> None:
        """Leave in order, without waiting."""
        if not self._closed.is_set() and self._pid == os.getpid():
            self._closed.set()
            self._wake.set()
            if ray.is_initialized() and self.directory is not None:
                with contextlib.suppress(RayError):
                    self.directory.disconnect.remote(self._client)

    def _call(self, method: str, args: tuple[Any, ...], deadline: float, hold: int | None = None) -> Any:
        if not self._up or self._closed.is_set() or not ray.is_initialized():
            self.faults["down"] += 1
            return None
        return self._send(method, args, deadline, hold)

    def _send(self, method: str, args: tuple[Any, ...], deadline: float, hold: int | None = None) -> Any:
        try:
            with self._lock:  # calls must arrive in the order in which their lists of held ids were made
                if hold is not None:
                    self._held.add(hold)
                ref = getattr(self.directory, method).remote(tuple(self._news()), *args)
            answer = ray.get(ref, timeout=deadline)
        except RayError as error:
            self._up = False
            self._wake.set()
            self.fault("directory", f"{method}: {type(error).__name__}")
            return None
        except BaseException:  # a signal's: its caller will never know of the hold
            if hold is not None:
                self.release(hold)
            raise
        if _epoch(answer) < self._newest_epoch():
            self._up = False
            self._wake.set()
            self.fault("stale", f"{method}: a directory of epoch {_epoch(answer)} answered")
            return None
        return ANSWERS[method](*answer) if method in ANSWERS else answer

    def _news(self) -> Call:
        self._last_call = time.monotonic()
        pulled, corrupt = _joined(self._pulled), _joined(self._corrupt)
        held = np.array(sorted(self._held), np.uint64).tobytes()
        return Call(self._client, next(self._seq), held, pulled, corrupt)

    def _heartbeat_once(self) -> None:
        """Say that we are there; where the directory was down, find it again."""
        if self._up:
            if time.monotonic() - self._last_call > HEARTBEAT_S / 2 or self._pulled or self._corrupt:
                self._send("client_heartbeat", (), 4 * METADATA_DEADLINE_S)
            while self._retries and self._send(*self._retries[0], 10 * METADATA_DEADLINE_S) is not None:
                self._retries.pop(0)
            return
        directory = _found(self.pool)
        if directory is not None:
            self.directory = directory
            self._up = self._send("client_heartbeat", (), 10 * METADATA_DEADLINE_S) is not None


def _heartbeat(reference: "weakref.ref[DirectoryClient]", wake: threading.Event) -> None:
    """The thread of a link; ends with it."""
    while True:
        wake.wait(HEARTBEAT_S / 2)
        link = reference()
        if link is None or link._closed.is_set():
            return
        if wake.is_set() and not link._up:
            time.sleep(0.05)  # a directory that is restarting refuses at once
        wake.clear()
        try:
            if ray.is_initialized():
                link._heartbeat_once()
        except Exception as error:  # a link that no longer probes would stay down for good
            link.fault("probe", repr(error))
        del link


def _found(pool: str) -> Any:
    try:
        return find_directory(pool)
    except (ValueError, RayError):
        return None


def _joined(parts: list[NDArray[np.void]]) -> bytes:
    data = b"".join(part.tobytes() for part in parts)
    parts.clear()
    return data


def _epoch(answer: Any) -> int:
    return int(answer if isinstance(answer, int) else answer[0])
