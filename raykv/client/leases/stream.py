"""Streams leased blocks to this node piece by piece, with a few pulls ahead of the reader."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.client.leases.leased_blocks import Blocks, LeasedBlocks, leading
from raykv.client.session import Session
from raykv.client.stores.store_client import StoreClient
from raykv.client.stores.workers import giving_way
from raykv.config import MIB
from raykv.metrics.span import span
from raykv.protocol.location import Locations
from raykv.protocol.transfers import ALTERED, PULLED, data_deadline

PIECE_BYTES = 64 * MIB  # bytes of a piece: while one piece is copied out, the next piece is pulled
FIRST = 4  # each of the first two pieces has a fourth of PIECE_BYTES, so that readers on all nodes can start soon
PIECES_AHEAD = 2
LATE_S = 0.5  # a longer pull that brings no block is late; a pull that fails sooner was refused
WAIT_BUDGET_S = 0.05  # minimum deadline of a read that waits for a tier, however fast the engine computes tokens
WINDOW_S = 2.0  # minimum deadline of a read that waits for staging slots, or for a copy that another reader pulls
WINDOW_DEADLINES = 8  # the same minimum as a multiple of the pool's deadline; the longer minimum applies
WINDOW_POLL_S = 0.005  # interval between a read's first requests for staging slots
WINDOW_REST_S = 0.02  # interval between a read's later requests for staging slots

SILENT = "its node does not answer"  # this text and the next ones appear in request lines, which also name the node
LATE = "the pull was late", "the external tier was slower than computing would be"  # texts for a node and for a tier
FAILED_TO = "the pull failed", "the external tier did not give it"


def piece_blocks(block_bytes: int) -> int:
    """Return the number of blocks that are pulled at a time."""
    return max(1, PIECE_BYTES // block_bytes)


class Pull(NamedTuple):
    """A pull that has begun. source: LOCATION records of the copies that it reads."""

    blocks: Blocks
    source: Locations


class Stream:
    """Pulls leased blocks to this node.

    wait_budget_s: seconds that a read waits for an external tier; None: as long as for other pulls. piece_blocks:
    maximum number of blocks in a pull.
    """

    def __init__(self, session: Session, store: StoreClient | None, blocks: LeasedBlocks) -> None:
        """store: the store of the reader's node."""
        self._session, self._store, self.blocks = session, store, blocks
        self.piece_blocks = piece_blocks(blocks.block_bytes)
        self._begun: dict[int, tuple[int, Any]] = {}  # early pulls by first block: (number of blocks, pending answer)
        self.wait_budget_s: float | None = None
        self._since = time.monotonic()

    def begin(self) -> None:
        """Start the first pulls before the first read."""
        away = np.flatnonzero(~self.blocks.here())[: PIECES_AHEAD * self.piece_blocks]
        there, first = self.blocks.with_slots(away), 0
        while self._store is not None and first < len(there):
            piece = self.piece(there, first)
            for part in self.by_source(piece):
                self._begun[int(part[0])] = len(part), self.pull(self._store, part)
            first += len(piece)

    def piece(self, away: Blocks, first: int) -> Blocks:
        """Return the piece of `away` that begins at index `first`.

        It has as many blocks as all pieces before it together, but at least a quarter of `piece_blocks`, and at most
        `piece_blocks`.
        """
        return away[first : first + min(self.piece_blocks, max(1, self.piece_blocks // FIRST, first))]

    def arrivals(self, stop: int, passes: bool) -> Iterator[tuple[Blocks, Locations]]:
        """Pull the blocks before `stop` to this node, piece by piece. Yields (blocks, their locations) as they arrive.

        Blocks that are here already come first, while the first pieces are on their way. If a block can't be pulled
        from its current copy, it is pulled from the place where it was leased. If that fails too, no further pull
        starts. passes: whether to reuse the staging slots of the yielded blocks after each step.
        """
        blocks, store, here = self.blocks, self._store, self.blocks.here()[:stop]
        if store is None:
            blocks.fall_short("this node has no store")
            return
        away = np.flatnonzero(~here[: self._before_silence(store, stop)])
        pulls = _Pulls(self, store, away, np.zeros(len(here), np.bool_))
        pulls.begin()
        if here.any():
            yield np.flatnonzero(here), blocks.source[:stop][here]
            pulls.passed[here] = passes
        end, pause = 0.0, WINDOW_POLL_S
        while True:
            pulls.begin()
            if not pulls.under_way:
                if pulls.done or not self._wait_for_window(end, pause):
                    return
                deadline = max(WINDOW_S, WINDOW_DEADLINES * self._session.directory.deadline)
                end = end or time.monotonic() + deadline
                pause = min(2 * pause, WINDOW_REST_S)
                continue
            found = self._first_of(store, pulls.under_way)
            if found is None:
                return
            (pull, came), end, pause = found, 0.0, WINDOW_POLL_S
            if not came.all():
                pulls.try_again(Pull(pull.blocks[~came], pull.source[~came]))
            pulls.begin()
            if pulls.done and len(blocks) > PIECES_AHEAD * self.piece_blocks:
                self._session.directory.bell.ring()  # no call follows soon, and other readers may wait for these blocks
            arrived = pull.blocks[came]
            yield arrived, blocks.staged[arrived]
            pulls.passed[arrived] = passes

    def by_source(self, piece: Blocks) -> list[Blocks]:
        """Split a piece into blocks of other nodes and blocks of a tier, as a tier may need much longer."""
        external = self.blocks.external[piece]
        return [part for part in (piece[~external], piece[external]) if len(part)]

    def pull(self, store: StoreClient, part: Blocks) -> Any:
        """Pull blocks from one source, unless `begin` has started this pull. Returns the pending answer."""
        begun, answer = self._begun.pop(int(part[0]), (0, None))
        if begun == len(part):
            return answer
        blocks = self.blocks
        return store.pull(blocks.source[part], blocks.keys[part], blocks.staged[part], bool(blocks.external[part[0]]))

    def _before_silence(self, store: StoreClient, stop: int) -> int:
        """Return the number of blocks before `stop` and before a silent node's first block. Notes that node."""
        source = self.blocks.source[:stop]
        reached = reachable(store, source, self.blocks.name.node)
        if reached < stop:
            self.blocks.fall_short(SILENT, int(source["node"][reached]))
            self._session.directory.fault(
                "silent", f"{stop - reached} blocks are of nodes that do not answer, or behind"
            )
        return reached

    def _first_of(self, store: StoreClient, pulls: dict[Any, Pull]) -> tuple[Pull, NDArray[np.bool_]] | None:
        """Wait for one of the pulls. Returns (the pull, which blocks arrived), or None if all pulls are late."""
        since = time.monotonic()
        with span("pull", pool=self._session.name, pieces=len(pulls)):
            answer = store.first(list(pulls), self._deadline([pull.blocks for pull in pulls.values()]))
        if self.blocks.record is not None:
            self.blocks.record.pulled(time.monotonic() - since)
        if answer is None:
            self.fall_short_of(LATE, next(iter(pulls.values())))
            self._session.directory.fault("pull", f"{len(pulls)} pieces are late")
            store.gave_up(np.concatenate([pull.source["node"] for pull in pulls.values()]))
            return None
        pull = pulls.pop(answer)
        came = self._arrived(store, answer, pull)
        if not came.any() and time.monotonic() - since > LATE_S:
            store.gave_up(pull.source["node"])
        return pull, came

    def _arrived(self, store: StoreClient, answer: Any, pull: Pull) -> NDArray[np.bool_]:
        """Return (n,) bool: whether each block of a pull is in its staging slot now."""
        directory, target = self._session.directory, self.blocks.staged[pull.blocks]
        verdicts = store.verdicts(answer, target, directory)
        directory.pulled(target[verdicts == PULLED])
        directory.corrupt(pull.source[verdicts == ALTERED])
        arrived: NDArray[np.bool_] = verdicts == PULLED
        return arrived

    def _wait_for_window(self, end: float, pause: float) -> bool:
        """Pause before the next request for slots or for a copy. Returns False after `end` (0: no end yet)."""
        if end and time.monotonic() > end:
            self.blocks.fall_short("other readers use up this node's staging window")
            self._session.directory.fault("window", "other readers use up this node's staging window")
            return False
        with giving_way():  # a reader that has slots may need this thread's seat (see Workers) to free the slots
            time.sleep(pause)
        return True

    def _deadline(self, parts: list[Blocks]) -> float:
        """Return the seconds to wait for pulls. If all pulls are from a tier, `wait_budget_s` limits the wait."""
        size = self.blocks.block_bytes * sum(map(len, parts))
        if self.wait_budget_s is None or not all(self.blocks.external[part[0]] for part in parts):
            return data_deadline(size)
        left = self._since + max(WAIT_BUDGET_S, self.wait_budget_s) - time.monotonic()
        return max(0.0, min(data_deadline(size), left))

    def fall_short_of(self, what: tuple[str, str], pull: Pull) -> None:
        """Note why blocks of a pull are missing. what: LATE or FAILED_TO. pull: the blocks that did not arrive."""
        external = bool(self.blocks.external[pull.blocks[0]])
        self.blocks.fall_short(what[external], -1 if external else int(pull.source["node"][0]))


class _Pulls:
    """The pulls of one pass through a lease. under_way: pulls by pending answer. broken: no more pulls may begin."""

    def __init__(self, stream: Stream, store: StoreClient, away: Blocks, passed: NDArray[np.bool_]) -> None:
        """away: the blocks to pull. passed: (n,) bool, blocks whose slots may be reused."""
        self._stream, self._store, self._away, self.passed = stream, store, away, passed
        self._next = 0  # index in `away` of the next block to pull
        self.under_way: dict[Any, Pull] = {}
        self.broken = False

    @property
    def done(self) -> bool:
        """Whether no further pull will begin."""
        return self.broken or self._next == len(self._away)

    def begin(self) -> None:
        """Start pulls while there are staging slots, until PIECES_AHEAD pulls run."""
        stream, blocks = self._stream, self._stream.blocks
        while not self.done and len(self.under_way) < PIECES_AHEAD:
            wanted = stream.piece(self._away, self._next)
            start, may_wait = leading(self.passed), blocks.follows and not self._store.silence.any_late
            piece = blocks.take_slots(wanted, start, may_wait=may_wait)
            self.broken = piece is None
            if self.broken:
                blocks.fall_short("the directory gave no staging slots, or does not answer")
            if piece is None or not len(piece):
                return
            for part in stream.by_source(piece):
                self._begin_one(part)
            self._next += len(piece)

    def _begin_one(self, part: Blocks) -> None:
        source = self._stream.blocks.source[part]
        self.under_way[self._stream.pull(self._store, part)] = Pull(part, source)

    def try_again(self, missing: Pull) -> None:
        """Pull missing blocks from the places where they were leased.

        If the failed pull was already from these places, start no more pulls.
        """
        blocks = self._stream.blocks
        blocks.go_back()
        if not self.broken and (blocks.source[missing.blocks] != missing.source).any():
            self._begin_one(missing.blocks)
        else:
            self._stream.fall_short_of(FAILED_TO, missing)
            self.broken = True


def reachable(store: StoreClient, source: Locations, node: int) -> int:
    """Return the number of blocks before the first block of a silent node. node: this node's index in locations."""
    away = np.flatnonzero(source["node"] != node)
    silent = away[~store.reaches(source["node"][away])] if len(away) else away
    return int(silent[0]) if len(silent) else len(source)
