"""One call's worth of a match: leased blocks, read where they lie on this node and pulled where they do not."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.arena.buffers import Rows
from raykv.client.local_store import PIECE_BYTES, LocalStore, Locations, pieces
from raykv.client.session import Session
from raykv.config import MIB
from raykv.errors import DeviceError
from raykv.keys import Keys
from raykv.protocol import ALTERED, LOCATION, PULLED, Matched, data_deadline, is_tier

TIER_PIECE_BYTES = 32 * MIB  # what is pulled from an external tier at a time: a whole piece must come in time to count
PIECES_AHEAD = 2
LATE_S = 0.5  # what fails after so long was not refused, but not answered
WAIT_BUDGET_S = 0.05  # a read waits for a tier at least for so long, however fast its tokens could be computed


class Lease:
    """Leased blocks of one call. id: the lease's.

    source, staged: (n,) LOCATION of where each block lies, and of the slot on this node that it is pulled into
    (slab_gen 0: none). keys: (n, 16).
    """

    def __init__(
        self, session: Session, keys: Keys, block_s: float, prefetch: bool, lease: int, answer: Matched | None
    ) -> None:
        """keys: that were asked for. block_s: seconds that the engine takes to compute a block. prefetch: see Match.

        lease, answer: what the directory client's `match` of these keys returned.
        """
        self._session, self._block_bytes, self.id = session, keys.cache.block_bytes, lease
        self._begun: dict[int, tuple[int, Any]] = {}  # by first block: blocks of a piece, and the pull of it
        self.source = np.frombuffer(answer.source if answer else b"", LOCATION).copy()
        self.staged = np.zeros(len(self.source), LOCATION)
        if answer and answer.staged:
            self.staged[:] = np.frombuffer(answer.staged, LOCATION)
        self.keys = np.asarray(keys)[: len(self.source)]
        ours = self.staged[self.staged["slab_gen"] > 0] if answer and answer.staged else self.source
        if session.local is None or (ours["node"] != session.local.index).any():
            session.refresh()  # this process has an old index of its node
            self.source, self.staged, self.keys = self.source[:0], self.staged[:0], self.keys[:0]
        self._forgo_silent()
        self._external = is_tier(self.source["node"])
        external = int(self._external.sum())
        self._piece_blocks = max(1, (TIER_PIECE_BYTES if external else PIECE_BYTES) // self._block_bytes)
        self._wait_budget_s = block_s * external if external else None
        self._since = time.monotonic()
        if not len(self.source):
            self.release()
        elif session.local is not None and (prefetch or external):
            self._begin(session.local)

    def _forgo_silent(self) -> None:
        """Keep what comes before the first block that would have to come from, or through, who does not answer."""
        local, away = self._session.local, self._away(0, len(self))
        if local is not None and len(away):
            silent = away[~local.reaches(self.source["node"][away])]
            stop = int(silent[0]) if len(silent) else len(self)
            self.source, self.staged, self.keys = self.source[:stop], self.staged[:stop], self.keys[:stop]

    def __len__(self) -> int:
        return len(self.source)

    def release(self) -> None:
        """Let the blocks go. The directory learns of it with the next call."""
        self._session.directory.release(self.id)

    def read(self, rows: Rows, verify: bool) -> int:
        """Copy the blocks out, rows[i] of block i. Returns how many leading rows hold their block."""
        if self._here().all():
            return _leading(self._copy(self.source, self.keys, rows, verify))
        at = 0
        while at < len(self):
            stop = self._reach(at)
            if stop == at:
                stop = at + self._next_window(at)
            done = self._read_reached(at, stop, rows, verify)
            at += done
            if at < stop or not done:
                break
        return at

    def _here(self) -> NDArray[np.bool_]:
        local = self._session.local
        here: NDArray[np.bool_] = self.source["node"] == (local.index if local else -1)
        return here

    def _reach(self, at: int) -> int:
        """End of the run from `at` that is on this node or has staging here."""
        missing = np.flatnonzero(~self._here()[at:] & (self.staged["slab_gen"][at:] == 0))
        return at + int(missing[0]) if len(missing) else len(self)

    def _next_window(self, at: int) -> int:
        """Give back the staging of what was read, and take as much for what follows. Returns for how many blocks."""
        answer = self._session.directory.next_window(self.id, at, self._block_bytes)
        staged = np.frombuffer(answer.staged if answer else b"", LOCATION)
        self.staged[at : at + len(staged)] = staged
        return self._reach(at) - at

    def _begin(self, local: LocalStore) -> None:
        """Begin the first pulls now: what they bring is there when it is read."""
        stop = self._reach(0)
        for piece in itertools.islice(self._cut(self._away(0, stop)), PIECES_AHEAD):
            self._begun[int(piece[0])] = len(piece), self._start(local, piece)

    def _cut(self, away: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """Pieces to pull: first those of other nodes' memory, which is not to wait for a tier."""
        external = self._external[away]
        return itertools.chain(*(pieces(part, self._piece_blocks) for part in (away[~external], away[external])))

    def _start(self, local: LocalStore, piece: NDArray[np.intp]) -> Any:
        """The pull of a piece, which may have begun with the match."""
        blocks, answer = self._begun.pop(int(piece[0]), (0, None))
        if blocks == len(piece):
            return answer
        external = bool(self._external[piece[0]])
        return local.pull(self.source[piece], self.keys[piece], self.staged[piece], external)

    def _away(self, at: int, stop: int) -> NDArray[np.intp]:
        return at + np.flatnonzero(~self._here()[at:stop])

    def _deadline(self, pieces: list[NDArray[np.intp]]) -> float:
        """Seconds to wait for pieces: less than their tokens would take to compute, where only a tier has them."""
        size = self._block_bytes * sum(map(len, pieces))
        if self._wait_budget_s is None or not all(self._external[piece[0]] for piece in pieces):
            return data_deadline(size)
        left = self._since + max(WAIT_BUDGET_S, self._wait_budget_s) - time.monotonic()
        return max(0.0, min(data_deadline(size), left))

    def _read_reached(self, at: int, stop: int, rows: Rows, verify: bool) -> int:
        """Read [at, stop), pulling ahead what is on other nodes. Returns how many leading blocks are valid."""
        local = self._session.local
        if local is None:
            return 0
        away = self._away(at, stop)
        valid = np.zeros(stop - at, np.bool_)
        arrivals = self._pull(local, away)
        near = np.setdiff1d(np.arange(at, stop), away)
        # While the first pieces are on their way:
        valid[near - at] = self._copy(self.source[near], self.keys[near], rows[near], verify)
        for arrived in arrivals:
            valid[arrived - at] = self._copy(self.staged[arrived], self.keys[arrived], rows[arrived], verify)
        return _leading(valid)

    def fetch(self, whole: bool) -> int:
        """Bring blocks to this node: as many as the staging window holds, or the whole lease through it.

        Returns how many leading blocks are on this node now.
        """
        local, at = self._session.local, 0
        if whole:
            self._wait_budget_s = None
        while local is not None and at < len(self):
            stop = self._reach(at)
            if stop == at and whole:
                stop = at + self._next_window(at)
            away = self._away(at, stop)
            there = np.ones(stop - at, np.bool_)
            there[away - at] = False
            for arrived in self._pull(local, away):
                there[arrived - at] = True
                if not whole:  # else the slots are given back meanwhile, and must not be read later
                    self.source[arrived] = self.staged[arrived]
            at += _leading(there)
            if at < stop or stop == at or not whole:
                break
        return at

    def _pull(self, local: LocalStore, away: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """Begin to pull blocks into their staging slots. Yields those of each piece that arrived, as it arrives."""
        pulls: dict[Any, NDArray[np.intp]] = {}
        reached = away[local.reaches(self.source["node"][away])]
        if left := len(away) - len(reached):
            self._session.directory.fault("silent", f"{left} blocks are of nodes that do not answer")
        pieces = self._cut(reached)

        def pull(count: int) -> None:
            for piece in itertools.islice(pieces, count):
                pulls[self._start(local, piece)] = piece

        def arrivals() -> Iterator[NDArray[np.intp]]:
            while pulls:
                begin = time.monotonic()
                answer = local.first(list(pulls), self._deadline(list(pulls.values())))
                if answer is None:
                    self._session.directory.fault("pull", f"{len(pulls)} pieces are late")
                    local.gave_up(self.source["node"][np.concatenate(list(pulls.values()))])
                    self._session.refresh()
                    return
                piece = pulls.pop(answer)
                arrived = self._arrived(answer, piece)
                if not arrived.any() and time.monotonic() - begin > LATE_S:
                    local.gave_up(self.source["node"][piece])
                if arrived.all():  # else later pieces are not pulled: only leading blocks count
                    pull(1)
                yield piece[arrived]

        pull(PIECES_AHEAD)
        return arrivals()

    def _copy(self, locations: Locations, keys: NDArray[np.uint8], rows: Rows, verify: bool) -> NDArray[np.bool_]:
        """Read blocks out of slots of this node; which of them are valid."""
        local, directory = self._session.local, self._session.directory
        if local is None or not len(locations) or (locations["node"] != local.index).any():  # replaced meanwhile
            return np.zeros(len(locations), np.bool_)
        try:
            ok = local.arena.read(locations, keys, rows, verify)
        except DeviceError as error:  # the blocks are good: they are not reported as corrupt
            directory.fault("gpu", error)
            return np.zeros(len(locations), np.bool_)
        if not ok.all():
            directory.corrupt(local.wrong(locations[~ok], keys[~ok]))
            directory.fault("read", f"{int((~ok).sum())} blocks were not what the directory said")
        return ok

    def _arrived(self, answer: Any, piece: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which blocks of a piece are in their staging slots now."""
        local, directory = self._session.local, self._session.directory
        if local is None:
            return np.zeros(len(piece), np.bool_)
        target = self.staged[piece]
        verdicts = local.verdicts(answer, target, directory)
        if (verdicts != PULLED).any():
            self._session.refresh()  # the store may be another actor now
        directory.pulled(target[verdicts == PULLED])
        directory.corrupt(self.source[piece][verdicts == ALTERED])
        arrived: NDArray[np.bool_] = verdicts == PULLED
        return arrived


def _leading(ok: NDArray[np.bool_]) -> int:
    return len(ok) if ok.all() else int(np.argmin(ok))
