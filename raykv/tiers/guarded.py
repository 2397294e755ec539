"""An external tier as a node store uses it: records that verify themselves, deadlines, and back-off where it fails."""

import hashlib
import logging
import mmap
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from raykv.protocol import ALIGN, CONTENT_BYTES, KEY_BYTES, data_deadline
from raykv.tiers import HEAD_BYTES, MARKER, Block, Tier

log = logging.getLogger("raykv")
T = TypeVar("T")

HEAD = struct.Struct("<8s8s16sQII")  # magic and version, content, key, xxh3_64, length, position in its chain
MAGIC = b"raykv\0t1"
CALL_S = 2.0  # that a call without blocks may take
PIECE_BYTES = 16 << 20  # asked of a tier at a time, while the caller has as many
BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between probes of a tier that is out of order
CHECK_S = 10.0  # between probes of one that is not
READERS = 4
Keys = NDArray[np.uint8]


class GuardedTier:
    """A tier that never keeps anybody waiting past a deadline, and never raises. Thread-safe.

    A tier that failed, or did not answer in time, is not asked until a `probe` was answered. It may be out of order
    from the beginning: then it is opened when it is found to be there.
    """

    def __init__(self, make: Callable[[], Tier], fingerprint: bytes) -> None:
        """make: opens the tier. fingerprint: of pool and secret (16 bytes)."""
        self.faults: Counter[str] = Counter()
        self._make, self._fingerprint = make, fingerprint
        self._opened: Tier | None = None
        self._content = self._marked = bytes(CONTENT_BYTES)  # what it is called, and what the tier was seen to say
        self._up, self._failures, self._retry_at = False, 0, 0.0
        self._lock = threading.Lock()
        self._buffers: list[mmap.mmap] = []
        self._began: WeakKeyDictionary[Future[Any], list[float]] = WeakKeyDictionary()  # when a call did, if it did
        self._stores: set[Future[Sequence[bool]]] = set()
        self._reads = ThreadPoolExecutor(READERS, thread_name_prefix="raykv-tier-read")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="raykv-tier-write")
        self._probing: Future[bool] | None = None

    @property
    def up(self) -> bool:
        return self._up

    @property
    def content(self) -> bytes:
        """What is there is called so."""
        return self._content

    @property
    def storing(self) -> bool:
        """Whether a `store` is under way, though it may have returned: it reads its blocks' memory."""
        return bool(self._stores)

    @property
    def shared(self) -> bool | None:
        """Whether all nodes see one content. None: it could not be opened yet."""
        return self._opened.shared if self._opened else None

    @property
    def _tier(self) -> Tier:
        if self._opened is None:
            self._opened = self._make()
        return self._opened

    def check(self) -> None:
        """Raises where it can't be opened, and ValueError if another secret, pool or version wrote what lies there."""
        self._read_marker()

    def open(self, seed: bytes) -> bool:
        """Mark a tier as this pool's. Returns whether it is up; else `probe` says when it is.

        seed: what its content is named after where nothing is there yet; equal for all stores of a shared one.
        """
        self._content = self._marked = seed
        self.probe()
        return self._up

    # ------------------------------------------------------------------ blocks

    def store(
        self, keys: Keys, sums: NDArray[np.uint64], positions: NDArray[np.uint32], bodies: Sequence[memoryview]
    ) -> NDArray[np.bool_]:
        """Which of the blocks are stored now. Their memory may be read until this returns, or later if that is late."""
        blocks = [
            Block(key, self._head(key, int(total), len(body), int(position)), body)
            for key, total, position, body in zip(_split(keys), sums, positions, bodies, strict=True)
        ]
        size = sum(map(len, bodies))
        asked = self._ask(self._writes, lambda: _each(len(blocks), self._tier.put_many, blocks))
        if asked:
            self._stores.add(asked)
            asked.add_done_callback(self._stores.discard)
        done = self._answer(asked, data_deadline(size), "store")
        stored = np.zeros(len(blocks), np.bool_) if done is None else np.array(done, np.bool_)
        if done is not None:
            self.faults["refused"] += int((~stored).sum())
        return stored

    def load(
        self, keys: Keys, block_bytes: int
    ) -> Iterator[tuple[slice, NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.bool_]]]:
        """Blocks of one size, a piece at a time: (which keys, bytes, checksums, positions, which of them are there).

        The bytes are good until the next piece is asked for, and must be verified. Ends early where the tier fails.
        """
        step = max(1, PIECE_BYTES // block_bytes)
        parts = [slice(at, min(at + step, len(keys))) for at in range(0, len(keys), step)]
        reading = deque(self._begin(keys[part], block_bytes) for part in parts[:1])
        for part, after in zip(parts, [*parts[1:], None], strict=True):
            if after is not None:  # it is read while the caller has this one
                reading.append(self._begin(keys[after], block_bytes))
            asked, with_room = reading.popleft()
            heads = self._answer(asked, data_deadline((part.stop - part.start) * block_bytes), "load")
            if heads is None:  # a late call may still write into the buffer: it is not used again
                for ahead, _ in reading:
                    if ahead:
                        ahead.cancel()
                return
            names = _split(keys[part])
            found = [self._read_head(head, key, block_bytes) for head, key in zip(heads, names, strict=True)]
            sums = np.array([total for total, _, _ in found], np.uint64)
            positions = np.array([position for _, position, _ in found], np.uint32)
            there = np.array([ok for _, _, ok in found], np.bool_)
            self.faults["missing"] += int((~there).sum())
            yield part, _rows(with_room, len(found), block_bytes), sums, positions, there
            self._give_back(with_room)

    def _begin(self, keys: Keys, block_bytes: int) -> tuple[Future[Sequence[bytes | None]] | None, mmap.mmap]:
        """Ask for a piece, and for what buffer."""
        with_room, names = self._buffer(len(keys), block_bytes), _split(keys)
        out = [row.data for row in _rows(with_room, len(keys), block_bytes)]
        return self._ask(self._reads, lambda: _each(len(names), self._tier.get_many, names, out)), with_room

    def delete(self, keys: Sequence[bytes]) -> bool:
        """Returns whether none of the keys is there any more."""
        if not keys:
            return True
        delete = partial(_done, self._tier.delete_many, keys)
        return bool(self._call(self._writes, delete, CALL_S + len(keys) / 1e3, "delete"))

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        """Batches of (key, block_bytes) of what lies there, oldest first. Ends early where the tier fails: `up` tells.

        Takes as long as the tier takes.
        """
        try:
            yield from self._tier.scan() if self._up else ()
        except Exception as error:
            self._fail("scan", error)

    def clear(self, content: bytes) -> None:
        """Forget all that lies there, now and after any restart. content: CONTENT_BYTES, equal for all of a tier."""
        self._content = content
        self._call(self._writes, self._mark_cleared, CALL_S, "clear")  # else by the next probe

    def close(self) -> None:
        self._reads.shutdown(wait=False, cancel_futures=True)
        self._writes.shutdown(wait=False, cancel_futures=True)
        if self._opened:
            self._opened.close()

    # ------------------------------------------------------------------ health

    def probe(self) -> bool | None:
        """Where it is time, see whether a tier that is out of order is back, and that another still has its content.

        None: nothing new. True: it is up again, with all that lay there. False: it is up, and that is gone.
        """
        if time.monotonic() < self._retry_at:
            return None
        if self._up:
            self._retry_at = time.monotonic() + CHECK_S
            return None if self._call(self._writes, self._take_content, CALL_S, "probe") in (None, True) else False
        if self._probing is None:
            self._probing = self._writes.submit(self._take_content)
        try:
            same = self._probing.result(CALL_S)
        except TimeoutError:  # as stuck as it was
            return None
        except Exception as error:
            self._probing = None
            self._fail("probe", error)
            return None
        self._probing = None
        if self.faults:
            log.warning("external tier: it is back%s", "" if same else ", and empty")
        self._retry_at = time.monotonic() + CHECK_S
        self._up, self._failures = True, 0
        return same

    def _call(self, threads: ThreadPoolExecutor, call: Callable[[], T], deadline: float, what: str) -> T | None:
        """The call's answer, or None where the tier is, or turns out to be, out of order."""
        return self._answer(self._ask(threads, call), deadline, what)

    def _ask(self, threads: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T] | None:
        if not self._up:
            self.faults["down"] += 1
            return None
        began: list[float] = []

        def run() -> T:
            began.append(time.monotonic())
            return call()

        asked = threads.submit(run)
        self._began[asked] = began
        return asked

    def _answer(self, asked: Future[T] | None, deadline: float, what: str) -> T | None:
        if asked is None:
            return None
        try:
            return asked.result(deadline)
        except Exception as error:
            asked.cancel()  # one that waits behind others is not to begin when nobody wants it any more
            began = self._began[asked]
            late = time.monotonic() - deadline / 2
            if began and (asked.done() or began[0] <= late):  # else those before it tell whether the tier is in order
                self._fail(what, error)
        return None

    def _fail(self, what: str, error: BaseException) -> None:
        with self._lock:
            if self._up or not self._failures:
                log.warning("external tier: %s: %s; it is left alone for a while", what, type(error).__name__)
                log.debug("external tier: %r", error)
            self.faults[what] += 1
            self._up = False
            self._retry_at = time.monotonic() + BACK_OFF_S[min(self._failures, len(BACK_OFF_S) - 1)]
            self._failures += 1

    # ------------------------------------------------------------------ records

    def _take_content(self) -> bool:
        """Learn, or say, what this tier's content is. Returns whether it is what it was."""
        head = self._read_marker()
        found = head[8:16] if head is not None else None
        same = found in (self._marked, self._content)
        if self._content != self._marked:  # cleared while it was out of order
            self._mark_cleared()
        elif found is None:  # all stores of a shared tier call it the same, whichever comes first
            self._content = hashlib.sha256(b"raykv content\0" + self._content).digest()[:CONTENT_BYTES]
            self._mark()
        else:
            self._content = self._marked = found
        return same

    def _mark(self) -> None:
        content = self._content
        head = HEAD.pack(MAGIC, content, self._fingerprint, 0, 0, 0).ljust(HEAD_BYTES, b"\0")
        if not all(_each(1, self._tier.put_many, [Block(MARKER, head, memoryview(b""))])):
            raise OSError("the external tier has no room for a marker of 64 bytes")
        self._marked = content

    def _mark_cleared(self) -> None:
        """All that is there is void: some of it goes now, where there is no room else."""
        try:
            self._mark()
        except OSError:
            self._tier.delete_many([key for key, _ in next(filter(None, self._tier.scan()), [])])
            self._mark()

    def _read_marker(self) -> bytes | None:
        (head,) = _each(1, self._tier.get_many, [MARKER], [memoryview(bytearray(0))])
        if head is not None and (head[:8] != MAGIC or head[16:32] != self._fingerprint):
            raise ValueError(
                "what lies there was written by another pool, with another secret or by another version of raykv; it "
                "was left as it is: give that secret and pool name, or another path or database"
            )
        return head

    def _head(self, key: bytes, total: int, length: int, position: int) -> bytes:
        return HEAD.pack(MAGIC, self._content, key, total, length, position).ljust(HEAD_BYTES, b"\0")

    def _read_head(self, head: bytes | None, key: bytes, length: int) -> tuple[int, int, bool]:
        """(checksum, position, whether this is the head of that block)."""
        if not isinstance(head, bytes) or len(head) < HEAD.size:
            return 0, 0, False
        magic, content, name, total, size, position = HEAD.unpack_from(head)
        return total, position, (magic, content, name, size) == (MAGIC, self._content, key, length)

    # ------------------------------------------------------------------ buffers

    def _buffer(self, blocks: int, block_bytes: int) -> mmap.mmap:
        """Page-aligned memory, faulted in where it was used before: for direct I/O."""
        size = -(-blocks * block_bytes // ALIGN) * ALIGN
        with self._lock:
            for i, buffer in enumerate(self._buffers):
                if len(buffer) >= size:
                    return self._buffers.pop(i)
        return mmap.mmap(-1, size)

    def _give_back(self, buffer: mmap.mmap) -> None:
        with self._lock:
            if len(self._buffers) < READERS:
                self._buffers.append(buffer)


def _each(count: int, call: Callable[..., Sequence[T]], *args: object) -> Sequence[T]:
    """The answer of a tier that anybody may have written: one for each block."""
    answers = call(*args)
    if len(answers) != count:
        raise TypeError(f"{len(answers)} answers of the tier for {count} blocks")
    return answers


def _done(call: Callable[..., None], *args: object) -> bool:
    call(*args)
    return True


def _rows(memory: mmap.mmap, count: int, block_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)[: count * block_bytes].reshape(count, block_bytes)


def _split(keys: Keys) -> list[bytes]:
    data = keys.tobytes()
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
