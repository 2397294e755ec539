"""One call's worth of a match: leased blocks, read where they lie on this node and pulled where they do not."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from raykv.arena.buffers import Rows
from raykv.client.request_record import RequestRecord
from raykv.client.session import Session
from raykv.client.store_client import Locations, StoreClient, pieces
from raykv.client.workers import giving_way
from raykv.config import MIB
from raykv.errors import DeviceError
from raykv.keys import Keys
from raykv.metrics.span import span, tell
from raykv.protocol.clients import Matched, MatchedPart, NextWindowRequest
from raykv.protocol.location import KEY_BYTES, LOCATION, is_tier
from raykv.protocol.transfers import ALTERED, PULLED, data_deadline

PIECE_BYTES = 64 * MIB  # pulled at a time: the copy out of one piece overlaps the pull of the next
PIECES_AHEAD = 2
LATE_S = 0.5  # a read that has failed after so long was late, not refused
WAIT_BUDGET_S = 0.05  # at least for so long a read waits for a tier, however fast its tokens could be computed
WINDOW_DEADLINES = 8  # of the pool: that a read waits for staging slots, while other readers have them all
WINDOW_POLL_S = 0.005  # between a read's first questions for staging slots
WINDOW_REST_S = 0.02  # between a read's later questions for staging slots

SILENT = "its node does not answer"  # these are said of requests that somebody follows; the node is said beside
LATE = "the pull was late", "the external tier was slower than computing would be"  # of another node, of a tier
FAILED_TO = "the pull failed", "the external tier did not give it"

Blocks = NDArray[np.intp]  # numbers of blocks in a lease, rising


def piece_blocks(block_bytes: int) -> int:
    """How many blocks are pulled at a time."""
    return max(1, PIECE_BYTES // block_bytes)


class Leased(NamedTuple):
    """Blocks that any process of a node may read by a lease of a client, until that is released.

    nonce, node: of that node's arena, and what `source` calls it. owner, lease: the client's id, and the lease's.
    first: number of the first block in it. source: LOCATIONs. keys: of 16 bytes.
    followed: whoever reads them is to report that (see RequestRecord).
    """

    nonce: bytes
    node: int
    owner: int
    lease: int
    first: int
    source: bytes
    keys: bytes
    followed: bool = False


class Lease:
    """Leased blocks of one call.

    source, staged: (n,) LOCATION of where each block lies, and of the slot on this node that it is pulled into
    (slab_gen 0: none). keys: (n, 16). found: how many blocks lay in this process's memory, on another node, and in an
    external tier when they were leased. cut: why it has fewer than the directory leased, and the index of the node that
    this is about. record: of the request that it is for, while somebody follows those.
    """

    def __init__(
        self,
        session: Session,
        store: StoreClient | None,
        block_bytes: int,
        name: tuple[bytes, int, int, int, int],
        source: Locations,
        keys: NDArray[np.uint8],
    ) -> None:
        """store: of the reader's node. name: nonce, node, owner, lease and first of Leased."""
        self._session, self._store, self._block_bytes = session, store, block_bytes
        self._nonce, self._node, self._owner, self.id, self._first = name
        self._piece_blocks = piece_blocks(block_bytes)
        self._begun: dict[int, tuple[int, Any]] = {}  # by first block: blocks of a pull that was begun, and its answer
        self.source, self.keys, self.staged = source, keys, np.zeros(len(source), LOCATION)
        self._external = is_tier(source["node"])
        here, external = int(np.count_nonzero(self._here())), int(np.count_nonzero(self._external))
        self.found = {"memory": here, "external": external, "node": len(source) - here - external}
        self.cut = "", -1
        self.record: RequestRecord | None = None
        self._wait_budget_s: float | None = None
        self._window_lost = False  # the last question for staging slots was not answered: see NextWindowRequest.again
        self._since = time.monotonic()

    @classmethod
    def granted(
        cls, session: Session, keys: Keys, block_s: float, prefetch: bool, lease: int, answer: Matched | None
    ) -> Self:
        """keys: that were asked for. block_s: seconds that the engine takes to compute a block. prefetch: see Match.

        lease, answer: what the directory client's `match` of these keys returned.
        """
        local, directory = session.local, session.directory
        source = np.frombuffer(answer.source if answer else b"", LOCATION)
        staged = np.frombuffer(answer.staged, LOCATION) if answer and answer.staged else None
        ours = source["node"] if staged is None else np.where(staged["node"] > 0, staged["node"], source["node"])
        cut = "", -1
        if local is None or (answer and len(source) and not local.has(ours, answer.epoch)):
            cut = ("this node has no store", -1) if local is None else ("this process is yet to find its new store", -1)
            session.refresh()  # this process has an old index of its node, or old memory
            source, staged = source[:0], None
        elif staged is not None and (stop := _reached(local, source, local.index)) < len(source):
            cut = SILENT, int(source["node"][stop])
            source, staged = source[:stop], staged[:stop]
        nonce, node = (local.arena.nonce, local.index) if local else (b"", -1)
        name = (nonce, node, directory.client, lease, 0)
        made = cls(session, local, keys.cache.block_bytes, name, source, np.asarray(keys)[: len(source)])
        made.cut = cut
        if staged is not None:
            made.staged[:] = staged
        external = made._limit_wait(block_s)
        if not len(source):
            made.release()
        elif external or prefetch:
            made._begin()
        return made

    @classmethod
    def granted_part(
        cls, session: Session, memory: str, keys: Keys, block_s: float, lease: int, part: MatchedPart
    ) -> Self:
        """Of `match_parts`, for another process to read on its node. memory: what the directory calls that one's."""
        source, name = np.frombuffer(part.source, LOCATION), (part.nonce, part.node, session.directory.client, lease, 0)
        store = session.store_of(memory) if is_tier(source["node"]).any() else None
        made = cls(session, store, keys.cache.block_bytes, name, source, np.asarray(keys)[: len(source)])
        if made._limit_wait(block_s) and made._staged(np.flatnonzero(~made._here()), 0) is not None:
            made._begin()
        return made

    @classmethod
    def borrowed(cls, session: Session, block_bytes: int, leased: Leased) -> Self:
        """To read by another process's lease, which it has for this node's memory."""
        source = np.frombuffer(leased.source, LOCATION)
        keys = np.frombuffer(leased.keys, np.uint8).reshape(-1, KEY_BYTES)
        return cls(session, session.local, block_bytes, leased[:5], source, keys)

    def _limit_wait(self, block_s: float) -> int:
        """Have reads wait for an external tier as long as computing its blocks takes. Returns how many those are."""
        external = self.found["external"]
        self._wait_budget_s = block_s * external if external else None
        return external

    def __len__(self) -> int:
        return len(self.source)

    def leased(self, first: int, stop: int) -> Leased:
        """Blocks [first, stop), for another process to read."""
        source, keys = self.source[first:stop].tobytes(), self.keys[first:stop].tobytes()
        name = (self._nonce, self._node, self._owner, self.id, self._first + first)
        return Leased(*name, source, keys, self.record is not None)

    def release(self) -> None:
        """Let the blocks go. The directory learns of it with the next call."""
        self._session.directory.release(self.id)

    def read(self, rows: Rows, verify: bool) -> int:
        """Copy the blocks out, rows[i] of block i. Returns how many leading rows hold their block."""
        begin, metrics = time.monotonic(), self._session.directory.metrics
        with span("read", pool=self._session.name, blocks=len(self), **self.found) as it:
            count = self._read(rows, verify)
            tell(it, read_blocks=count, bytes=count * self._block_bytes)
        metrics.observe("read_seconds", time.monotonic() - begin)
        metrics.add("read_bytes_total", count * self._block_bytes)
        return count

    def _read(self, rows: Rows, verify: bool) -> int:
        if self._here().all():
            return _leading(self._copy(self.source, self.keys, rows, verify))
        valid = np.zeros(len(self), np.bool_)
        for blocks, where in self._arrivals(len(self), stream=True):
            valid[blocks] = self._copy(where, self.keys[blocks], rows[blocks], verify)
        if self._owner != self._session.directory.client:  # who may release it as soon as this returns
            self._session.directory.heartbeat()
        return _leading(valid)

    def fetch(self, whole: bool) -> int:
        """Bring blocks to this node: as many as the staging window holds, or the whole lease through it.

        Returns how many leading blocks are on this node now.
        """
        there, stop = self._here(), len(self)
        if there.all():
            return stop
        if whole:
            self._wait_budget_s = None
        else:
            away = np.flatnonzero(~there)
            staged = self._staged(away, 0)
            if staged is None or len(staged) < len(away):
                stop = int(away[0 if staged is None else len(staged)])
        for blocks, where in self._arrivals(stop, stream=whole):
            there[blocks] = True
            if not whole:  # else the slots are given back meanwhile, and must not be read later
                self._moved(blocks, where)
        return _leading(there[:stop])

    def give_back(self) -> None:
        """Its blocks were read: let others have its staging slots, as the next lease of this reader. Reads ask anew."""
        if not (self.staged["slab_gen"] > 0).any():
            return
        stop = self._first + len(self)
        request = NextWindowRequest(self._owner, self.id, stop, stop, self._block_bytes)
        answer = self._session.directory.next_window(request)
        self._window_lost = answer is None
        if answer and answer.passed:
            self._moved(slice(None), np.frombuffer(answer.passed, LOCATION)[self._first :])
        self.staged["slab_gen"] = 0

    def fetch_external(self) -> int:
        """Bring blocks of an external tier to this node, as many as the staging window holds.

        Returns how many leading blocks are in memory then, of this node or another.
        """
        if self._external.any():
            self.fetch(whole=False)
        return _leading(~is_tier(self.source["node"]))

    def _moved(self, blocks: Blocks | slice, source: Locations) -> None:
        """Blocks are elsewhere now."""
        if not self.source.flags.writeable:  # it is the directory's answer, which most leases never alter
            self.source = self.source.copy()
        self.source[blocks] = source

    def _here(self) -> NDArray[np.bool_]:
        here: NDArray[np.bool_] = self.source["node"] == self._node
        return here

    def _begin(self) -> None:
        """Begin the first pulls now: what they bring is there when it is read."""
        away = np.flatnonzero(~self._here())[: PIECES_AHEAD * self._piece_blocks]
        if self._store is not None:
            for piece in pieces(self._with_slots(away), self._piece_blocks):
                for part in self._parts(piece):
                    self._begun[int(part[0])] = len(part), self._start(self._store, part)

    def _parts(self, piece: Blocks) -> list[Blocks]:
        """A piece by where it is pulled from: other nodes' memory is not to wait for a tier."""
        external = self._external[piece]
        return [part for part in (piece[~external], piece[external]) if len(part)]

    def _start(self, store: StoreClient, part: Blocks) -> Any:
        """The pull of a part, which may have begun with the match."""
        blocks, answer = self._begun.pop(int(part[0]), (0, None))
        if blocks == len(part):
            return answer
        external = bool(self._external[part[0]])
        return store.pull(self.source[part], self.keys[part], self.staged[part], external)

    def _with_slots(self, away: Blocks) -> Blocks:
        """The leading ones that have staging slots."""
        return away[: _leading(self.staged["slab_gen"][away] > 0)]

    def _staged(self, piece: Blocks, start: int) -> Blocks | None:
        """Those leading blocks of a piece that have staging slots, after asking for some. None: they are gone.

        start: those of blocks before it, or behind the piece, are given back.
        """
        if len(self._with_slots(piece)) == len(piece):
            return piece
        stop, first = int(piece[-1]) + 1, self._first
        size, again = self._block_bytes, self._window_lost
        request = NextWindowRequest(self._owner, self.id, first + start, first + stop, size, again)
        answer = self._session.directory.next_window(request)
        self._window_lost = answer is None
        if answer is None:  # no directory, or one that does not know the lease
            return None
        if answer.passed:
            self._moved(slice(start), np.frombuffer(answer.passed, LOCATION)[first:])
        slots = np.frombuffer(answer.staged, LOCATION)
        ours = (slots["node"] == self._node) | (slots["node"] == 0)
        if len(slots) < stop - start or not ours.all():
            return None
        self.staged["slab_gen"][:start] = self.staged["slab_gen"][stop:] = 0
        self.staged[start:stop] = slots
        return self._with_slots(piece)

    def _arrivals(self, stop: int, stream: bool) -> Iterator[tuple[Blocks, Locations]]:
        """Bring blocks before `stop` to this node, piece by piece. Yields (blocks, where they are now), as they arrive.

        Those that are here already come first, while the first pieces are on their way. stream: what was yielded has
        passed by the next step: its staging slots are taken for others. Ends with the first piece that does not arrive.
        """
        store, here = self._store, self._here()[:stop]
        if store is None:
            self._fall_short("this node has no store")
            return
        passed, away = np.zeros(stop, np.bool_), np.flatnonzero(~here[: self._before_silence(store, stop)])
        pulls: dict[Any, Blocks] = {}
        at, end, pause, broken = 0, 0.0, WINDOW_POLL_S, False

        def begin() -> None:
            """Begin pulls until enough are on their way, as far as there are staging slots."""
            nonlocal at, broken
            while at < len(away) and len(pulls) < PIECES_AHEAD and not broken:
                start = _leading(passed) if stream else 0
                piece = self._staged(away[at : at + self._piece_blocks], start)
                broken = piece is None
                if broken:
                    self._fall_short("the directory gave no staging slots, or does not answer")
                if piece is None or not len(piece):
                    break
                for part in self._parts(piece):
                    pulls[self._start(store, part)] = part
                at += len(piece)

        begin()
        if here.any():
            yield np.flatnonzero(here), self.source[:stop][here]
            passed[here] = True
        while True:
            begin()
            if not pulls:
                if broken or at == len(away) or not self._wait_for_window(end, pause):
                    return
                end = end or time.monotonic() + WINDOW_DEADLINES * self._session.directory.deadline
                pause = min(2 * pause, WINDOW_REST_S)
                continue
            found = self._first_of(store, pulls)
            if found is None:
                return
            (part, blocks), end, pause = found, 0.0, WINDOW_POLL_S
            broken = broken or len(blocks) < len(part)
            begin()
            yield blocks, self.staged[blocks]
            passed[part] = True

    def _before_silence(self, store: StoreClient, stop: int) -> int:
        """How many blocks, of those before `stop`, come before the first one of a silent node. Reports one."""
        reached = _reached(store, self.source[:stop], self._node)
        if reached < stop:
            self._fall_short(SILENT, int(self.source["node"][reached]))
            self._session.directory.fault(
                "silent", f"{stop - reached} blocks are of nodes that do not answer, or behind"
            )
        return reached

    def _first_of(self, store: StoreClient, pulls: dict[Any, Blocks]) -> tuple[Blocks, Blocks] | None:
        """Wait for one of these pulls. Returns (its blocks, those that arrived); None: all are late, and given up."""
        since = time.monotonic()
        with span("pull", pool=self._session.name, pieces=len(pulls)):
            answer = store.first(list(pulls), self._deadline(list(pulls.values())))
        if self.record is not None:
            self.record.pulled(time.monotonic() - since)
        if answer is None:
            late = np.concatenate(list(pulls.values()))
            self._fall_short_of(LATE, late)
            self._session.directory.fault("pull", f"{len(pulls)} pieces are late")
            store.gave_up(self.source["node"][late])
            self._session.refresh()
            return None
        part = pulls.pop(answer)
        arrived = self._arrived(answer, part)
        if not arrived.all():
            self._fall_short_of(FAILED_TO, part[~arrived])
        if not arrived.any() and time.monotonic() - since > LATE_S:
            store.gave_up(self.source["node"][part])
        return part, part[arrived]

    def _wait_for_window(self, end: float, pause: float) -> bool:
        """Give other readers time to go on, which use up the staging window. False past `end`, unless that is 0."""
        if end and time.monotonic() > end:
            self._fall_short("other readers use up this node's staging window")
            self._session.directory.fault("window", "other readers use up this node's staging window")
            return False
        with giving_way():  # to those that have slots, and must report what came there
            time.sleep(pause)
        return True

    def _deadline(self, parts: list[Blocks]) -> float:
        """Seconds to wait for pulls: less than their tokens would take to compute, where only a tier has them."""
        size = self._block_bytes * sum(map(len, parts))
        if self._wait_budget_s is None or not all(self._external[part[0]] for part in parts):
            return data_deadline(size)
        left = self._since + max(WAIT_BUDGET_S, self._wait_budget_s) - time.monotonic()
        return max(0.0, min(data_deadline(size), left))

    def _copy(self, locations: Locations, keys: NDArray[np.uint8], rows: Rows, verify: bool) -> NDArray[np.bool_]:
        """Read blocks out of slots of this node; which of them are valid."""
        local, directory = self._session.local, self._session.directory
        if local is None or local is not self._store or not len(locations):  # replaced meanwhile
            if len(locations):
                self._fall_short("the store of this node was replaced")
            return np.zeros(len(locations), np.bool_)
        begin = time.monotonic()
        try:
            ok = local.arena.read(locations, keys, rows, verify)
        except DeviceError as error:  # the blocks are good: they are not reported as corrupt
            self._fall_short("the GPU could not copy")
            directory.fault("gpu", error)
            return np.zeros(len(locations), np.bool_)
        if self.record is not None:
            self.record.copied(time.monotonic() - begin)
        if not ok.all():
            self._fall_short("blocks were evicted while they were read, or are not what was stored")
            directory.corrupt(local.wrong(locations[~ok], keys[~ok]))
            directory.fault("read", f"{int((~ok).sum())} blocks were not what the directory said")
        return ok

    def _fall_short(self, why: str, about: int = -1) -> None:
        if self.record is not None:
            self.record.fall_short(why, about)

    def _fall_short_of(self, what: tuple[str, str], blocks: Blocks) -> None:
        """what: LATE or FAILED_TO. blocks: that did not come."""
        external = bool(self._external[blocks[0]])
        self._fall_short(what[external], -1 if external else int(self.source["node"][blocks[0]]))

    def _arrived(self, answer: Any, part: Blocks) -> NDArray[np.bool_]:
        """Which blocks of a pull are in their staging slots now."""
        store, directory = self._store, self._session.directory
        if store is None:
            return np.zeros(len(part), np.bool_)
        target = self.staged[part]
        verdicts = store.verdicts(answer, target, directory)
        if (verdicts != PULLED).any():
            self._session.refresh()  # the store may be another actor now
        directory.pulled(target[verdicts == PULLED])
        directory.corrupt(self.source[part][verdicts == ALTERED])
        arrived: NDArray[np.bool_] = verdicts == PULLED
        return arrived


def _reached(store: StoreClient, source: Locations, node: int) -> int:
    """How many leading blocks come neither from nor through who does not answer. node: what they call this one."""
    away = np.flatnonzero(source["node"] != node)
    silent = away[~store.reaches(source["node"][away])] if len(away) else away
    return int(silent[0]) if len(silent) else len(source)


def _leading(ok: NDArray[np.bool_]) -> int:
    return len(ok) if ok.all() else int(np.argmin(ok))
