"""A node store's view of an external tier: records that verify themselves, deadlines, and back-off after failures.

A record is a block's Head and its body. All blocks stored since the last clear are the tier's content. Each
content has a name, and a head contains the name of the content to which the block belongs. A marker record contains the
name of the current content, and identifies the tier's pool and secret. Records of another content are void.
"""

import hashlib
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from raykv.protocol.location import CONTENT_BYTES, KEY_BYTES, SLAB_BYTES_MAX
from raykv.protocol.transfers import data_deadline
from raykv.system import events
from raykv.system.counts import Counts
from raykv.tiers import MARKER, Block, Tier
from raykv.tiers.base import ReadsHeads
from raykv.tiers.head import Head, head_of
from raykv.tiers.read_buffers import ReadBuffers
from raykv.tiers.strangers import Strangers

log = logging.getLogger("raykv")
T = TypeVar("T")

CALL_S = 2.0  # deadline of a call that transfers no blocks
PIECE_BYTES = 16 << 20  # bytes read at a time: while the caller uses a piece, the next piece is read
BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # times between probes of a tier that is down
CHECK_S = 10.0  # time between probes of a tier that is up
READERS = 4  # number of threads that read
REFUSAL_CHARACTERS = 200
WITNESSES = 16  # blocks to look for if the marker is missing: if they are missing too, the content is lost
TRIAL = b"raykv may write?"  # key of a record that is written and deleted before a pool starts
KeyRows = NDArray[np.uint8]


class LoadedPiece(NamedTuple):
    """A piece of the blocks that `load` was asked for."""

    which: slice  # slice of the keys
    blocks: NDArray[np.uint8]  # (n, block_bytes): unverified, and valid until the next piece is requested
    checksums: NDArray[np.uint64]  # (n,) xxh3_64 of each block when it was stored
    positions: NDArray[np.uint32]  # (n,) the blocks' positions in their chains
    there: NDArray[np.bool_]  # (n,) whether the tier has the block


class GuardedTier:
    """A tier behind deadlines. Except `check` and `scan`, no method raises or waits past a deadline. Thread-safe.

    After a failure or a late answer the tier is down: no call reaches the tier until a `probe` succeeds. If the tier is
    down from the beginning, a `probe` opens it. If a write fails with an error, the tier is still read, but for a
    while no blocks are stored or deleted there.

    up: whether calls reach the tier. content: name of the stored content, CONTENT_BYTES long. faults: number of faults
    by kind. refusal: why the last write failed; "" after a success.
    """

    def __init__(self, make: Callable[[], Tier], fingerprint: bytes) -> None:
        """make: opens the tier. fingerprint: fingerprint of pool and secret (16 bytes)."""
        self.faults = Counts()
        self._make, self._fingerprint = make, fingerprint
        self._opened: Tier | None = None
        self.content = self._marked = bytes(CONTENT_BYTES)  # `_marked`: the name in the tier's marker
        self._stored: deque[bytes] = deque(maxlen=WITNESSES)  # the first key of each recent `store`
        self._witnesses: list[bytes] = []  # the keys that `_stored` had when the marker was last seen
        self.up, self._failures, self._retry_at = False, 0, 0.0
        self.refusal = ""
        self._refusals, self._write_at = 0, 0.0
        self._lock = threading.Lock()  # guards `up`, failures and times in `_fail`; taken after other locks
        self._buffers = ReadBuffers(READERS)
        # by call: the start time (time.monotonic()), in a list that is empty until the call begins
        self._began: WeakKeyDictionary[Future[Any], list[float]] = WeakKeyDictionary()
        self._stores: set[Future[Sequence[bool]]] = set()  # running calls that store
        self._reads = ThreadPoolExecutor(READERS, thread_name_prefix="raykv-tier-read")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="raykv-tier-write")
        self._probing: Future[bool] | None = None  # probe of a tier that is down

    @property
    def writable(self) -> bool:
        """Whether writes reach the tier. After a failed write, no writes are sent to the tier for a while."""
        return self.up and time.monotonic() >= self._write_at

    @property
    def storing(self) -> bool:
        """Whether the tier still reads blocks' memory for a `store`, which may have returned already."""
        return bool(self._stores)

    @property
    def shared(self) -> bool | None:
        """Whether all nodes see the same blocks; None while the tier has not been opened."""
        return self._opened.shared if self._opened else None

    @property
    def _tier(self) -> Tier:
        if self._opened is None:
            self._opened = self._make()
        return self._opened

    def check(self) -> None:
        """Raise if the tier can't be opened or written; ValueError if another pool, secret or version wrote there."""
        self._read_marker()
        try:
            head = Head(self.content, TRIAL, checksum=0, length=1, position=0)
            _each(self._tier.put_many, [Block(TRIAL, head.packed(), memoryview(b"\0"))])
            self._tier.delete_many([TRIAL])
        except Exception as error:
            raise OSError(f"it can't be written: {error}") from error

    def open(self, seed: bytes) -> bool:
        """Mark the tier as this pool's tier. Returns whether the tier is up; if not, a later `probe` opens it.

        seed: names the content of an empty tier; all stores of a shared tier must give the same seed.
        """
        self.content = self._marked = seed
        self.probe()
        return self.up

    # ------------------------------------------------------------------ blocks

    def store(
        self, keys: KeyRows, sums: NDArray[np.uint64], positions: NDArray[np.uint32], bodies: Sequence[memoryview]
    ) -> NDArray[np.bool_]:
        """Store n blocks. Returns (n,) bool: which blocks are stored now.

        keys: (n, 16). sums: (n,) xxh3_64. positions: (n,) positions in the blocks' chains. bodies: the blocks' bytes;
        if this method returns at its deadline, the tier may still read them: see `storing`.
        """
        blocks = [
            Block(key, Head(self.content, key, int(checksum), len(body), int(position)).packed(), body)
            for key, checksum, position, body in zip(_split(keys), sums, positions, bodies, strict=True)
        ]
        size = sum(map(len, bodies))
        asked = self._ask_to_write(lambda: _each(self._tier.put_many, blocks))
        if asked:
            self._stores.add(asked)
            asked.add_done_callback(self._stores.discard)
        done = self._answer(asked, data_deadline(size), "store", writes=True)
        stored = np.zeros(len(blocks), np.bool_) if done is None else np.array(done, np.bool_)
        self._stored.extend(block.key for block, there in zip(blocks[:1], stored[:1], strict=True) if there)
        if done is not None:
            self.faults.add("refused", int((~stored).sum()))
        return stored

    def load(self, keys: KeyRows, block_bytes: int) -> Iterator[LoadedPiece]:
        """Yield blocks of one size, a piece at a time. Ends early if the tier fails."""
        step = max(1, PIECE_BYTES // block_bytes)
        parts = [slice(start, min(start + step, len(keys))) for start in range(0, len(keys), step)]
        reading = deque(self._begin_load(keys[part], block_bytes) for part in parts[:1])
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if following is not None:  # read ahead: the next piece loads while the caller uses this piece
                reading.append(self._begin_load(keys[following], block_bytes))
            asked, buffer = reading.popleft()
            answers = self._answer(asked, data_deadline((part.stop - part.start) * block_bytes), "load")
            if answers is None:  # a late call may still write into the buffer, so the buffer is not used again
                for ahead, _ in reading:
                    if ahead:
                        ahead.cancel()
                return
            heads = [head_of(answer) for answer in answers]
            checksums = np.array([head.checksum for head in heads], np.uint64)
            positions = np.array([head.position for head in heads], np.uint32)
            pairs = zip(heads, _split(keys[part]), strict=True)
            wanted = [head[:2] == (self.content, key) and head.length == block_bytes for head, key in pairs]
            there = np.array(wanted, np.bool_)
            self._miss(int((~there).sum()))
            yield LoadedPiece(part, _rows(buffer, len(heads), block_bytes), checksums, positions, there)
            self._buffers.give_back(buffer)

    def _miss(self, blocks: int) -> None:
        """Count missing blocks. All blocks may be lost, so a probe is due now. The probe looks for the marker."""
        self.faults.add("missing", blocks)
        with self._lock:
            if blocks and self.up:
                self._retry_at = 0.0

    def _begin_load(self, keys: KeyRows, block_bytes: int) -> tuple[Future[Sequence[bytes | None]] | None, mmap.mmap]:
        """Begin to read a piece. Returns the call, and the buffer that it reads into."""
        buffer, block_keys = self._buffers.take(len(keys) * block_bytes), _split(keys)
        out = [row.data for row in _rows(buffer, len(keys), block_bytes)]
        return self._ask(self._reads, lambda: _each(self._tier.get_many, block_keys, out)), buffer

    def delete(self, keys: Sequence[bytes]) -> bool:
        """Delete blocks. Returns whether this succeeded; if so, the tier has none of the keys."""
        if not keys:
            return True

        def delete() -> bool:
            self._tier.delete_many(keys)
            return True

        return bool(self._write(delete, CALL_S + len(keys) / 1e3, "delete"))

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        """Yield all blocks in batches of (key, block_bytes), oldest first. Ends early if the tier fails; see `up`.

        Leaves out strangers, that is, records that raykv did not write, as far as the tier can tell. Strangers are
        counted, and named in a warning. A scan has no deadline.
        """
        strangers = Strangers()
        try:
            for batch in self._tier.scan() if self.up else ():
                yield self._ours(batch, strangers)
        except Exception as error:
            self._fail("scan", error)
        strangers.warn("records under names of blocks are not what raykv wrote")
        self.faults["strangers"] = strangers.count

    def _ours(self, batch: Sequence[tuple[bytes, int]], strangers: Strangers) -> list[tuple[bytes, int]]:
        """Return raykv's records in a batch of a scan. All other records are added to `strangers`."""
        sound = []
        for key, size in batch:
            if len(key) == KEY_BYTES and 0 < size <= SLAB_BYTES_MAX:
                sound.append((key, size))
            else:
                strangers.add(key.hex())
        if not isinstance(self._tier, ReadsHeads):
            return sound
        ours, answers = [], _each(self._tier.get_heads, [key for key, _ in sound])
        for (key, size), answer in zip(sound, answers, strict=True):
            head = head_of(answer)
            if (head.key, head.length) == (key, size):
                ours.append((key, size))
            elif answer is not None:  # else the record was deleted meanwhile
                strangers.add(key.hex())
        return ours

    def clear(self, content: bytes) -> None:
        """Forget all blocks of the tier, now and after any restart.

        content: new name of the tier's content (CONTENT_BYTES). All stores of a shared tier must give the same name.
        """
        self.content = content
        self._write(self._mark_cleared, CALL_S, "clear")  # if the write fails, the next probe writes the marker

    def close(self) -> None:
        """Cancel waiting calls, and close the tier."""
        self._reads.shutdown(wait=False, cancel_futures=True)
        self._writes.shutdown(wait=False, cancel_futures=True)
        if self._opened:
            self._opened.close()

    # ------------------------------------------------------------------ health

    def probe(self) -> bool | None:
        """If due, check whether a tier that was down is up again, or whether a tier that is up still has its content.

        Returns None if nothing has changed, True if the tier is up again with its content, and False if the tier is up
        but its content is lost.
        """
        if time.monotonic() < self._retry_at:
            return None
        if self.up:
            self._retry_at = time.monotonic() + CHECK_S
            taken = self._answer(self._ask(self._writes, self._take_content), CALL_S, "probe")
            if taken is False:
                events.tell("tier_lost")
            return None if taken else taken
        if self._probing is None:
            self._probing = self._writes.submit(self._take_content)
        try:
            same = self._probing.result(CALL_S)
        except TimeoutError:  # the probe still waits for the tier
            return None
        except Exception as error:
            self._probing = None
            self._fail("probe", error)
            return None
        self._probing = None
        if self.faults:
            events.tell("tier_up", same_content=same)
        self._retry_at = time.monotonic() + CHECK_S
        self.up, self._failures = True, 0
        return same

    def _write(self, call: Callable[[], T], deadline: float, what: str) -> T | None:
        """Return the answer of a call that writes, or None if the tier is down, refuses or is late."""
        return self._answer(self._ask_to_write(call), deadline, what, writes=True)

    def _ask_to_write(self, call: Callable[[], T]) -> Future[T] | None:
        if self.up and not self.writable:
            self.faults.add("down")
            return None

        def write() -> T:
            done = call()
            self.refusal, self._refusals = "", 0
            return done

        return self._ask(self._writes, write)

    def _ask(self, threads: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T] | None:
        if not self.up:
            self.faults.add("down")
            return None
        began: list[float] = []

        def run() -> T:
            began.append(time.monotonic())
            return call()

        asked = threads.submit(run)
        self._began[asked] = began
        return asked

    def _answer(self, asked: Future[T] | None, deadline: float, what: str, writes: bool = False) -> T | None:
        if asked is None:
            return None
        try:
            return asked.result(deadline)
        except Exception as error:
            asked.cancel()  # a call that still waits for a thread must not begin: its answer is not needed
            began = self._began[asked]
            late = time.monotonic() - deadline / 2
            if writes and began and asked.done() and not asked.cancelled():
                self._refuse(what, error)
            elif began and (asked.done() or began[0] <= late):  # else the call waited for other late calls
                self._fail(what, error)
        return None

    def _fail(self, what: str, error: BaseException) -> None:
        self.faults.add(what)
        with self._lock:
            if self.up or not self._failures:
                events.tell("tier_down", call=what, error=type(error).__name__)
                log.debug("external tier: %r", error)
            self.up = False
            self._retry_at = time.monotonic() + BACK_OFF_S[min(self._failures, len(BACK_OFF_S) - 1)]
            self._failures += 1

    def _refuse(self, what: str, error: BaseException) -> None:
        """Handle a failed write. The tier is still read, unless the next probe finds it down."""
        self.faults.add(what)
        with self._lock:
            if not self.refusal:
                events.tell("tier_refuses", call=what, error=type(error).__name__)
                log.warning("external tier: nothing is stored there for now: %s", error)
            self.refusal = f"{error}"[:REFUSAL_CHARACTERS] or type(error).__name__
            self._write_at = time.monotonic() + BACK_OFF_S[min(self._refusals, len(BACK_OFF_S) - 1)]
            self._refusals += 1
            self._retry_at = 0.0

    # ------------------------------------------------------------------ records

    def _take_content(self) -> bool:
        """Read the content's name from the marker, or write a marker. Returns whether the content is as before."""
        found = self._read_marker()
        same = found in (self._marked, self.content)
        if self.content != self._marked:  # the pool was cleared while the tier was down, or refused writes
            self._write_late()
        elif found is None and self._holds_content():  # the server evicted only the marker
            self._mark()
            same = True
        elif found is None:  # any store may write the marker first: all stores of a shared tier derive the same name
            self.content = hashlib.sha256(b"raykv content\0" + self.content).digest()[:CONTENT_BYTES]
            self._mark()
        else:
            self.content = self._marked = found
        self._witnesses = list(self._stored)
        return same

    def _holds_content(self) -> bool:
        """Whether the tier still has blocks of the content. Looks for blocks stored before the marker was last seen.

        If this store had stored no blocks before, looks for the first blocks that a scan of the tier returns.
        """
        if not isinstance(self._tier, ReadsHeads):
            return False
        keys = self._witnesses
        if not keys:
            found = next(filter(None, (self._ours(batch, Strangers()) for batch in self._tier.scan())), [])
            keys = [key for key, _ in found]
        return any(head_of(answer).content == self.content for answer in _each(self._tier.get_heads, keys))

    def _write_late(self) -> None:
        """Write the marker that `clear` could not write. Records from before the clear are void in any case."""
        if self.up and not self.writable:
            return
        try:
            self._mark_cleared()
        except Exception as error:
            self._refuse("clear", error)

    def _mark(self) -> None:
        """Write the marker."""
        content = self.content
        head = Head(content, self._fingerprint, checksum=0, length=0, position=0)
        if not all(_each(self._tier.put_many, [Block(MARKER, head.packed(), memoryview(b""))])):
            raise OSError("the external tier has no room for a marker of 64 bytes")
        self._marked = content

    def _mark_cleared(self) -> None:
        """Write a marker for a new content. If there is no room, first delete some blocks: all blocks are void now."""
        try:
            self._mark()
        except OSError:
            ours = (self._ours(batch, Strangers()) for batch in self._tier.scan())
            self._tier.delete_many([key for key, _ in next(filter(None, ours), [])])
            self._mark()

    def _read_marker(self) -> bytes | None:
        """Return the content's name in the tier's marker, or None if there is no marker.

        Raises ValueError if the marker belongs to another pool.
        """
        (answer,) = _each(self._tier.get_many, [MARKER], [memoryview(bytearray(0))])
        head = head_of(answer)
        if answer is not None and head.key != self._fingerprint:
            raise ValueError(
                "what is there was written by another pool, with another secret or by another version of raykv. It "
                "was left as it is: give that secret and pool name, or another path or database"
            )
        return None if answer is None else head.content


def _each(call: Callable[..., Sequence[T]], blocks: Sequence[object], *args: object) -> Sequence[T]:
    """Call a tier, whose class may be a user's. Raises TypeError unless there is one answer for each block."""
    answers = call(blocks, *args)
    if len(answers) != len(blocks):
        raise TypeError(f"the tier gave {len(answers)} answers for {len(blocks)} blocks")
    return answers


def _rows(memory: mmap.mmap, count: int, block_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)[: count * block_bytes].reshape(count, block_bytes)


def _split(keys: KeyRows) -> list[bytes]:
    data = keys.tobytes()
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
