"""A node's blocks on their way to its external tier and back: the part of a node store that knows the tier."""

import logging
import secrets
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv import registry
from raykv.arena.arena import Arena
from raykv.arena.buffers import rows_of
from raykv.arena.checksum import judge
from raykv.config import HEARTBEAT_S, METADATA_DEADLINE_S
from raykv.protocol import (
    ALIGN,
    ALTERED,
    FAILED,
    KEY_BYTES,
    LOCATION,
    BlocksRead,
    DemotionReport,
    Demotions,
    ExistingBlocks,
    TierReply,
    TierReport,
)
from raykv.tiers import open_tier, parse, register_tier
from raykv.tiers.guarded import CONTENT_BYTES, GuardedTier

log = logging.getLogger("raykv")
LOOK_S = 0.1
IDLE_LOOK_S = 0.5  # between looks whether something is to go down, where nothing was
COMES_BACK_S = 5.0  # a tier that is down for so long when all is to go down is given up
REST_S = 1.0  # after a batch of which some found no room below
LIST_AT_A_TIME = 4096
NOTHING_DONE = DemotionReport(locations=b"", keys=b"", stored=b"", seen=0, whole=False)


def open_external(pool: str, fingerprint: bytes, url: str, maker: bytes | None) -> tuple[GuardedTier, int]:
    """(the tier of an `external=` URL, unopened; its capacity in bytes). maker: what `register_tier` got, pickled."""
    if maker is not None:  # first: what may stand in the URL depends on it
        register_tier(urlsplit(url).scheme, ray.cloudpickle.loads(maker))
    parsed = replace(parse(url), pool=pool)
    return GuardedTier(partial(open_tier, parsed), fingerprint), parsed.capacity


def seed(pool: str) -> bytes:
    """What all stores of a pool name the content of a tier after where nothing is there yet."""
    registry.put(pool, "seed", secrets.token_bytes(CONTENT_BYTES), overwrite=False)
    return registry.get(pool, "seed") or bytes(CONTENT_BYTES)


class Demoter:
    """Asks the directory what goes down, writes it, and says what became of it: one thread, which may wait."""

    def __init__(self, pool: str, node_id: str, arena: Arena, external: GuardedTier, capacity: int) -> None:
        self.external = external
        self.index = -1  # of the tier, in places
        self._pool, self._node_id, self._arena, self._capacity = pool, node_id, arena, capacity
        self._report = NOTHING_DONE  # what the directory was not told yet
        self._lost = False  # what lay in the tier
        self._reported, self._heartbeat_at = False, 0.0  # what the directory knows of it, and since when
        self.read_guard = threading.Lock()  # held while slots that nobody leased are read; a late store goes on
        self._whole: set[object] = set()  # who wants all brought down
        self._idle = threading.Event()  # nothing was left to go down
        self._served = False  # the directory knows the tier, all of it, and every node reaches it
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="raykv-sink", daemon=True)
        self._thread.start()

    def flush(self, seconds: float, lasting: bool = True) -> bool:
        """Bring down all that is not there yet. Returns whether that was done in time.

        lasting: what comes later goes down too.
        """
        self._idle.clear()
        wish = object()
        self._whole.add(wish)
        self._wake.set()
        now = time.monotonic()
        end, up = now + seconds, now
        while not self._idle.wait(LOOK_S) and now < min(end, up + COMES_BACK_S):
            now = time.monotonic()
            up = now if self.external.up and self._served else up
        if not lasting:
            self._whole.discard(wish)
        return self._idle.is_set()

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        self.external.close()

    def load(self, keys: NDArray[np.uint8], arena: Arena, to: NDArray[np.void]) -> NDArray[np.uint8]:
        """Read blocks into granted slots of an arena; verdicts FAILED, PULLED, or ALTERED in the tier."""
        verdicts = np.full(len(to), FAILED, np.uint8)
        size = int(to["bytes"][0])
        for piece, rows, sums, positions, there in self.external.load(keys, size):
            ok, found = np.flatnonzero(there), verdicts[piece]
            found[~there] = ALTERED
            written = arena.write(to[piece][ok], keys[piece][ok], rows_of([rows])[ok], positions[ok], sums[ok])
            found[ok] = judge(written, (rows[i] for i in ok), sums[ok])
        return verdicts

    def read(self, keys: NDArray[np.uint8], size: int) -> BlocksRead:
        """Blocks of `size` bytes out of the tier, for another node."""
        ok, sums, positions = np.zeros(len(keys), np.uint8), np.zeros(len(keys), np.uint64), np.zeros(len(keys), "<u4")
        runs = []
        for piece, rows, totals, depths, there in self.external.load(keys, size):
            ok[piece], sums[piece], positions[piece] = there, totals, depths
            runs.append(rows[there].reshape(-1))
        return BlocksRead(ok.tobytes(), sums.tobytes(), positions.tobytes(), runs)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        directory, pause = None, 0.0
        while not self._stopped.is_set():
            demoted = False
            try:
                directory = directory or registry.find_directory(self._pool)
                self._heartbeat(directory)
                demoted = self.external.up and self.index >= 0 and self._demote(directory)
            except (RayError, ValueError) as error:  # dead, restarting or replaced
                log.debug("sinking: %r", error)
                directory, self._reported, self._served = None, False, False
            except Exception:  # what no longer goes down would be lost when its room is needed
                log.exception("demoter")
                directory, self._served = None, False
            pause = 0.0 if demoted else min(2 * pause + LOOK_S / 4, IDLE_LOOK_S)
            self._wake.wait(pause)
            self._wake.clear()

    def _heartbeat(self, directory: Any) -> None:
        """Tell the directory of the tier, and of its state; where it asks, what lies there."""
        self._lost |= self.external.probe() is False
        up, now = self.external.up, time.monotonic()
        if self.external.shared is None:  # whose it is nobody knows yet
            return
        if up == self._reported and not self._lost and now < self._heartbeat_at + HEARTBEAT_S:
            return
        lost = self.external.content if self._lost else b""
        report = TierReport(self._capacity, self.external.shared, up, lost)
        answer = ray.get(directory.tier_heartbeat.remote(self._node_id, tuple(report)), timeout=2 * HEARTBEAT_S)
        if answer is None:  # this node has not joined yet
            self.index = -1
            return
        self._reported, self._heartbeat_at, self._lost = up, now, False
        reply = TierReply(*answer)
        if reply.tier != self.index:
            self.index, self._report = reply.tier, NOTHING_DONE  # a new directory learns the rest from the list
        if reply.list_it:
            self._list(directory)

    def _list(self, directory: Any) -> None:
        found = [block for batch in self.external.scan() for block in batch]
        if not self.external.up:  # it is listed anew when it is back
            return
        taken = np.cumsum([size + ALIGN for _, size in reversed(found)])
        kept = int(np.searchsorted(taken, self._capacity, side="right"))  # of more than there is room for the newest
        self.external.delete([key for key, _ in found[: len(found) - kept]])
        found = found[len(found) - kept :]
        for at in range(0, max(1, len(found)), LIST_AT_A_TIME):
            self._tell(directory, found[at : at + LIST_AT_A_TIME], last=at + LIST_AT_A_TIME >= len(found))

    def _tell(self, directory: Any, found: list[tuple[bytes, int]], last: bool) -> None:
        keys, sizes = b"".join(key for key, _ in found), np.array([size for _, size in found], np.int64)
        existing = ExistingBlocks(keys, sizes.tobytes(), last)
        ray.get(directory.report_existing.remote(self._node_id, tuple(existing)), timeout=2 * HEARTBEAT_S)

    def _demote(self, directory: Any) -> bool:
        """One batch. Returns whether there was one."""
        whole = bool(self._whole)
        asked = directory.demote.remote(self._node_id, tuple(self._report._replace(whole=whole)))
        source, keys, target, to_delete, number = Demotions(*ray.get(asked, timeout=4 * METADATA_DEADLINE_S))
        self._report, self._served = NOTHING_DONE._replace(seen=self._report.seen), number > 0
        if self.external.delete([to_delete[at : at + KEY_BYTES] for at in range(0, len(to_delete), KEY_BYTES)]):
            self._report = self._report._replace(seen=number)
        if source:
            refused = self.external.faults["refused"]
            with self.read_guard:
                stored = self._write(
                    np.frombuffer(source, LOCATION), np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
                )
            self._report = self._report._replace(locations=target, keys=keys, stored=stored.astype(np.uint8).tobytes())
            if self.external.faults["refused"] > refused:
                self._rest(whole and not stored.any())
            elif not stored.any():  # whatever is wrong with them, it would be asked for them again at once
                self._stopped.wait(LOOK_S)
        elif whole and self._served and not to_delete:
            self._idle.set()
        return bool(source or to_delete)

    def _rest(self, in_vain: bool) -> None:
        """A tier that is full of other things is not asked again at once; in the end, not again at all."""
        if in_vain:
            self._idle.set()
        self._stopped.wait(REST_S)

    def _write(self, at: NDArray[np.void], keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which of the blocks are in the tier now. Their slots may be given away meanwhile: then they are not."""
        at = self._arena.with_lengths(at)
        sums, positions, there = self._arena.read_headers(at, keys, used=False)
        stored = np.zeros(len(at), np.bool_)
        which = np.flatnonzero(there)
        if len(which):
            bodies = [self._arena.views(at[i : i + 1])[0].data for i in which]
            stored[which] = self.external.store(keys[which], sums[which], positions[which], bodies)
            _, _, still = self._arena.read_headers(at, keys, used=False)
            stored &= still
        return stored
