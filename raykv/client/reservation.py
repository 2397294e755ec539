"""A writer's slots, from the call that grants them until they are committed or released."""

import time
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from raykv.arena.buffers import Rows
from raykv.client.session import Session
from raykv.config import KEYS_PER_CALL, MIB
from raykv.errors import DeviceError
from raykv.keys import Keys
from raykv.metrics.span import span, tell
from raykv.protocol.clients import NOT_WRITTEN, UNTOUCHED, WRITTEN
from raykv.protocol.location import LOCATION
from raykv.protocol.transfers import PULLED

PUSH_BYTES = 128 * MIB  # maximum bytes of a push to another node: large, as pushes cost a call each and don't overlap
NO_ROOM = "all memory is held, or this node is drained or has no store: see `raykv status`"


class Reservation:
    """Slots that one call granted to a writer. A context manager.

    The writer calls `copy_in`, which runs at memory speed, and then `commit`.
    covered: number of leading keys that are stored, being written or granted now. If other keys follow, there was no
    room for the next key, or the directory did not answer. len(): number of granted slots.
    """

    def __init__(self, session: Session, keys: Keys, start: int = 0, position: int = 0) -> None:
        """Reserve slots for the missing keys of keys[start:]. Marks their parents, keys[:start], as used.

        keys: (n, 16), at most KEYS_PER_CALL. position: index of keys[0] in its chain.
        """
        self._ended, self._session, self._block_bytes = True, session, keys.cache.block_bytes
        self._id, granted = session.directory.reserve(session.memory_name, keys, start)
        self._ended = False
        self.covered = granted.covered if granted else start
        indices = np.frombuffer(granted.indices if granted else b"", np.int32)
        self._epoch = granted.epoch if granted else 0
        self._rows, self._keys = indices - start, np.asarray(keys)[indices]
        self._positions = position + indices
        self._locations = np.frombuffer(granted.locations if granted else b"", LOCATION)
        self._staged = np.frombuffer(granted.staged if granted else b"", LOCATION)
        self._away = self._staged["slab_gen"] > 0
        self._written = np.full(len(indices), UNTOUCHED, np.uint8)  # `copy_in` sets the values, before any commit
        if granted and not len(self) and self.covered < len(keys):
            session.directory.fault("refused", f"no room for {len(keys) - self.covered} blocks: {NO_ROOM}")
        if not len(self):
            self.release()

    def __len__(self) -> int:
        return len(self._keys)

    def copy_in(self, rows: Rows) -> None:
        """Copy the blocks into their slots on this node, or into staging slots. No other method reads `rows`.

        rows: rows[i] is the block of keys[start + i].
        """
        target = np.where(self._away, self._staged, self._locations) if self._away.any() else self._locations
        if (local := self._session.local_with(target["node"], self._epoch)) is None:
            return
        try:
            there = local.arena.write(target, self._keys, rows[self._rows], self._positions)
            self._written = np.where(there, WRITTEN, NOT_WRITTEN).astype(np.uint8)
        except DeviceError as error:
            self._written[:] = NOT_WRITTEN
            self._session.directory.fault("gpu", error)

    def commit(self, wait: bool = False) -> int:
        """Push blocks to slots on other nodes, then commit all written blocks. Ends the reservation.

        wait: whether to wait for the directory's answer. If so, returns the number of newly stored blocks. Without
        `wait`, returns the number of written blocks, although the directory has not yet confirmed them.
        """
        if not len(self):
            return 0
        directory = self._session.directory
        self._push()
        if missing := int((self._written != WRITTEN).sum()):
            directory.fault("write", f"{missing} of {len(self)} blocks were not written")
        locations, keys = self._locations.tobytes(), self._keys.tobytes()
        count = directory.commit(self._id, locations, keys, self._written.tobytes(), wait)
        self.release()
        return count

    def release(self) -> None:
        """Release slots that were not committed. The next call to the directory reports the release."""
        self._session.directory.release(self._id)
        self._ended = True

    def __del__(self) -> None:
        if not self._ended:
            self._session.directory.drop([self._id])

    def _push(self) -> None:
        session, away = self._session, np.flatnonzero(self._away & (self._written == WRITTEN))
        self._written[self._away] = UNTOUCHED  # until another node is asked to pull the block
        if session.local is None:
            return
        step = max(1, PUSH_BYTES // self._block_bytes)
        for piece in (away[first : first + step] for first in range(0, len(away), step)):
            if not session.local.reaches(self._locations["node"][piece]).all():
                session.directory.fault("silent", f"{len(piece)} blocks are for nodes that do not answer")
                return
            verdicts = session.local.push(
                self._staged[piece], self._keys[piece], self._locations[piece], session.directory
            )
            self._written[piece] = np.where(verdicts == PULLED, WRITTEN, NOT_WRITTEN)
            if (verdicts != PULLED).any():
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._ended:
            self.release()


class Offered(NamedTuple):
    """The result of a store. new: number of new blocks. covered: number of leading keys stored or being written."""

    new: int
    covered: int


def store_rows(session: Session, keys: Keys, rows: Rows, start: int = 0, wait: bool = False) -> Offered:
    """Store blocks, in as many reservations as needed. Stops early if there is no room.

    rows: rows[i] is the block of keys[start + i]. wait: see Reservation.commit.
    """
    stored, at, begin, metrics = 0, start, time.monotonic(), session.directory.metrics
    covered, all_written = start, True
    with span("store", pool=session.name, model=keys.cache.model, blocks=len(keys) - start) as it:
        while at < len(keys):
            first = max(0, at - KEYS_PER_CALL // 2)  # the call also marks the parents as used
            batch = keys[first : first + KEYS_PER_CALL]
            with Reservation(session, batch, at - first, first) as reservation:
                reservation.copy_in(rows[at - start :])
                count = reservation.commit(wait)
            stored += count
            at = first + reservation.covered
            all_written = all_written and count == len(reservation)
            if all_written:
                covered = at
            if reservation.covered < len(batch) and not count:
                break
        tell(it, stored_blocks=stored)
    metrics.observe("store_seconds", time.monotonic() - begin)
    metrics.add("written_bytes_total", stored * keys.cache.block_bytes)
    return Offered(stored, covered)
