"""Demotes a node's blocks: copies them to its external tier. Also reports the tier's state to the directory.

The directory decides which blocks are copied there, and which are deleted there. The Demoter asks for these blocks,
copies or deletes them, and reports the outcome. It has its own thread, as a tier may be slow.
"""

import secrets
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import numpy as np
import ray
from numpy.typing import NDArray

from raykv.arena.arena import Arena
from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept
from raykv.config import HEARTBEAT_S, METADATA_DEADLINE_S, slab_bytes
from raykv.line.directory_line import DirectoryLine
from raykv.line.directory_loop import DirectoryLoop, is_absence
from raykv.protocol.location import ALIGN, CONTENT_BYTES, KEY_BYTES, LOCATION, slot_bytes
from raykv.protocol.tiers import DemotionReport, Demotions, ExistingBlocks, TierReply, TierReport
from raykv.tiers import open_tier, parse, register_tier
from raykv.tiers.copier import TierCopier
from raykv.tiers.guarded import GuardedTier

POLL_S = 0.1  # time between two checks of the tier in `flush`; POLL_S / 4: pause after a first answer without blocks
IDLE_POLL_S = 1.0  # longest pause between two questions to the directory
SERVED_HEARTBEAT_S = 5.0  # time between a tier's heartbeats, if `demote` last showed that the directory serves the tier
TIER_RETURNS_S = 5.0  # time for which `flush` waits for a tier that is down
REFUSED_S = 1.0  # pause after the tier refused blocks of a batch
EXISTING_PER_CALL = 4096  # maximum number of blocks in a call of `report_existing`
NOTHING_DONE = DemotionReport(locations=b"", keys=b"", stored=b"", seen=0, whole=False)


def open_external(pool: str, fingerprint: bytes, url: str, maker: bytes | None) -> tuple[GuardedTier, int]:
    """Return the tier of an `external=` URL, and its capacity in bytes. The tier is not opened yet.

    maker: the pickled function that `register_tier` or an entry point registered for the URL's scheme, or None if
    nobody registered one. Raises ValueError if the URL names no tier.
    """
    if maker is not None:  # before `parse`, as the scheme decides which parameters the URL may have
        register_tier(urlsplit(url).scheme, ray.cloudpickle.loads(maker))
    parsed = replace(parse(url), pool=pool)
    return GuardedTier(partial(open_tier, parsed), fingerprint), parsed.capacity


def content_seed(pool: str) -> bytes:
    """Return the seed for the name of an empty tier's content. All stores of a pool get the same seed."""
    internal_kv.put(pool, Kept.SEED, secrets.token_bytes(CONTENT_BYTES), overwrite=False)
    return internal_kv.get(pool, Kept.SEED) or bytes(CONTENT_BYTES)


class Demoter:
    """Asks the directory which blocks to demote, copies them to the tier, and reports which blocks arrived."""

    def __init__(self, pool: str, node_id: str, arena: Arena, external: GuardedTier, capacity: int) -> None:
        """arena: the arena in the node's memory. capacity: the tier's capacity in bytes."""
        self.external, self.copier = external, TierCopier(arena, external)
        self.index = -1  # the tier's index in locations; -1 until the directory has given the tier an index
        # Held while blocks are copied to the tier, since no lease protects their slots. The Resizer takes this lock
        # before it frees memory. A copy past its deadline may still read without this lock: see GuardedTier.storing.
        self.read_guard = threading.Lock()
        self._node_id, self._capacity = node_id, capacity
        self._report = NOTHING_DONE  # outcome of the last batch, for the next call of `demote`
        self._lost = False  # whether the tier's content is gone and the directory does not know that yet
        self._reported_up, self._reported_at = False, 0.0  # the tier's state in the last report; time of that report
        self._served = False  # whether the directory knows all blocks of the tier, and every node reaches the tier
        self._flushes: set[object] = set()  # callers that want all blocks demoted
        self._idle = threading.Event()  # set when no block is left to demote
        self._pause = 0.0
        self._loop = DirectoryLoop(pool, "raykv-demoter", self._step, self._on_error)
        self._loop.start()

    def flush(self, seconds: float, lasting: bool = True) -> bool:
        """Demote all blocks that are not in the tier yet. Returns whether all were demoted in time.

        lasting: from then on, also demote new blocks as soon as they are stored.
        """
        self._idle.clear()
        caller = object()
        self._flushes.add(caller)
        self._loop.wake()
        now = time.monotonic()
        end, last_up = now + seconds, now
        while not self._idle.wait(POLL_S) and now < min(end, last_up + TIER_RETURNS_S):
            now = time.monotonic()
            last_up = now if self.external.writable and self._served else last_up
        if not lasting:
            self._flushes.discard(caller)
        return self._idle.is_set()

    def stop(self) -> None:
        """Stop demoting blocks, and close the tier."""
        self._loop.stop()
        self.external.close()

    # ------------------------------------------------------------------ the thread

    def _step(self, directory: DirectoryLine) -> float:
        self._heartbeat(directory)
        demoted = self.external.writable and self.index >= 0 and self._demote(directory)
        return self._pause_after(demoted)

    def _on_error(self, error: Exception) -> float:
        self._served = False
        if is_absence(error):
            self._reported_up = False
        return self._pause_after(False)

    def _pause_after(self, demoted: bool) -> float:
        self._pause = 0.0 if demoted else min(2 * self._pause + POLL_S / 4, IDLE_POLL_S)
        return self._pause

    def _heartbeat(self, directory: DirectoryLine) -> None:
        """Report the tier's state to the directory. If the directory asks for a list of the tier's blocks, send it."""
        self._lost |= self.external.probe() is False
        up, now = self.external.up, time.monotonic()
        if self.external.shared is None:  # the tier could not be opened yet
            return
        due = self._reported_at + (SERVED_HEARTBEAT_S if self._served else HEARTBEAT_S)
        if up == self._reported_up and not self._lost and now < due:
            return
        lost = self.external.content if self._lost else b""
        report = TierReport(self._capacity, self.external.shared, up, lost)
        answer = directory.call("tier_heartbeat", self._node_id, tuple(report), seconds=2 * HEARTBEAT_S)
        if answer is None:  # this node has not joined yet
            self.index = -1
            return
        self._reported_up, self._reported_at, self._lost = up, now, False
        reply = TierReply(*answer)
        if reply.tier != self.index:
            self.index, self._report = reply.tier, NOTHING_DONE  # a new directory learns from the list what was stored
        if reply.list_it:
            self._report_existing(directory)

    def _report_existing(self, directory: DirectoryLine) -> None:
        """Send the list of the tier's blocks to the directory. Delete blocks that exceed the tier's capacity."""
        listed = {key: size for batch in self.external.scan() for key, size in batch}  # redis may return a key twice
        if not self.external.up:  # the tier will be listed when it is up again
            return
        fits = fitting(list(listed.values()), self._capacity)
        self.external.delete([key for key, fit in zip(listed, fits, strict=True) if not fit])
        found = [block for block, fit in zip(listed.items(), fits, strict=True) if fit]
        for first in range(0, max(1, len(found)), EXISTING_PER_CALL):
            part = found[first : first + EXISTING_PER_CALL]
            keys, sizes = b"".join(key for key, _ in part), np.array([size for _, size in part], np.int64)
            blocks = ExistingBlocks(keys, sizes.tobytes(), last=first + EXISTING_PER_CALL >= len(found))
            directory.call("report_existing", self._node_id, tuple(blocks), seconds=2 * HEARTBEAT_S)

    def _demote(self, directory: DirectoryLine) -> bool:
        """Demote one batch. Returns whether there were blocks to demote or delete."""
        whole = bool(self._flushes)
        report = tuple(self._report._replace(whole=whole))
        demotions = Demotions(*directory.call("demote", self._node_id, report, seconds=4 * METADATA_DEADLINE_S))
        self._report, self._served = NOTHING_DONE._replace(seen=self._report.seen), demotions.number > 0
        keys = demotions.to_delete
        if self.external.delete([keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]):
            self._report = self._report._replace(seen=demotions.number)
        if demotions.source:
            refused = self.external.faults["refused"]
            stored = self._copy(demotions)
            if self.external.faults["refused"] > refused:
                if whole and not stored.any():  # end the flush, as the tier stores no blocks
                    self._idle.set()
                self._loop.sleep(REFUSED_S)
            elif not stored.any():  # without a pause the directory would name the same blocks again at once
                self._loop.sleep(POLL_S)
        elif whole and self._served and not demotions.to_delete:
            self._idle.set()
        return bool(demotions.source or demotions.to_delete)

    def _copy(self, demotions: Demotions) -> NDArray[np.bool_]:
        keys = np.frombuffer(demotions.keys, np.uint8).reshape(-1, KEY_BYTES)
        with self.read_guard:
            stored = self.copier.demote(np.frombuffer(demotions.source, LOCATION), keys)
        self._report = self._report._replace(
            locations=demotions.target, keys=demotions.keys, stored=stored.astype(np.uint8).tobytes()
        )
        return stored


def fitting(sizes: list[int], capacity: int) -> list[bool]:
    """Return for each block of a tier whether the block fits into `capacity` bytes. The newest blocks get slots first.

    sizes: block_bytes of each block, oldest first. Slots are counted as in the directory. If more blocks were listed,
    the directory would refuse the newest blocks, since these are listed last.
    """
    slab = slab_bytes(capacity)
    spare = max(1, capacity // slab)
    free, left, fits = Counter[int](), capacity, list[bool]()
    for size in reversed(sizes):
        stride = slot_bytes(size) + ALIGN
        if not free[stride] and spare and stride <= min(slab, left):
            spare -= 1
            free[stride] += slab // stride
        fits.append(free[stride] > 0 and stride <= left)
        if fits[-1]:
            free[stride] -= 1
            left -= stride
    return fits[::-1]
