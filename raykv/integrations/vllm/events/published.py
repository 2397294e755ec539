"""Keeps track of the chunks announced to routers, and decides what to announce next. Uses no vLLM, clock or I/O.

Routers count KV events: they drop a block when the number of removals equals the number of announcements. So this
module remembers how often each chunk was announced, and publishes the same number of removals. Extra removals have no
effect on a router that does not count.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import NamedTuple

CHUNKS = 1 << 17  # maximum number of announced chunks (about 2 KB each); beyond it, the oldest chunk is withdrawn
OFFERED_S = 5.0  # maximum seconds for an offered chunk to appear in the pool
AGAIN_S = 0.05  # seconds between two questions about offered chunks
ABSENT_S = 2.0  # seconds after which an absent chunk counts as gone; a restarted node store may bring it back earlier
SETTLE_S = 15.0  # seconds for a new directory to learn which blocks the nodes have
REPEATS = 8  # maximum number of announcements of a chunk; the next announcement first withdraws all but one


class Told(NamedTuple):
    """A chunk that routers know: its event, its number of announcements, and the last announcement's time and step."""

    event: bytes
    times: int
    at: float
    step: int


class Change(NamedTuple):
    """The next events about a chunk: first `removed` removals, then, if `stored`, an announcement."""

    event: bytes
    removed: int
    stored: bool


class Published:
    """Announced and offered chunks, by vLLM's hash. For one thread. now: seconds of any monotonic clock."""

    def __init__(self, refresh_s: float, refresh_steps: int, chunks: int = CHUNKS) -> None:
        """refresh_s, refresh_steps: seconds, and engine steps, after which a chunk is announced again."""
        self._refresh_s, self._refresh_steps, self._limit = refresh_s, refresh_steps, chunks
        self._told: OrderedDict[bytes, Told] = OrderedDict()  # ordered by the last announcement, oldest first
        self._in_turn: OrderedDict[bytes, None] = OrderedDict()  # announced chunks, in the order to ask for them
        self._absent: dict[bytes, float] = {}  # announced chunks that the directory lacks, and since when
        self._offered: dict[bytes, tuple[bytes, float]] = {}  # chunks not announced yet: event, and time of the offer
        self._withdrawn: deque[Told] = deque()
        self._epoch, self._settled = 0, 0.0
        self._asked = 0.0

    @property
    def waits(self) -> bool:
        """Whether some offered chunks have not appeared in the pool yet."""
        return bool(self._offered)

    @property
    def leaves(self) -> bool:
        """Whether some withdrawals have not been published yet."""
        return bool(self._withdrawn)

    def knows(self, chunk: bytes) -> bool:
        return chunk in self._told or chunk in self._offered

    def offer(self, chunk: bytes, event: bytes, now: float) -> None:
        """Offer a chunk that the engine stored or read. event: the event to publish once the pool has the chunk."""
        if not self.knows(chunk) and len(self._offered) < self._limit:
            self._offered[chunk] = event, now

    def withdraw_all(self) -> None:
        """Withdraw all announced chunks, and forget the offered chunks."""
        self._withdrawn.extend(self._told.values())
        for chunks in (self._told, self._in_turn, self._absent, self._offered):
            chunks.clear()

    def to_ask(self, limit: int, in_turn: bool, now: float) -> list[bytes]:
        """Return at most `limit` chunks to ask the directory for. in_turn: whether to check announced chunks too.

        Returns no chunks until all withdrawals are published, as withdrawn chunks may have been offered again.
        """
        if self._withdrawn:
            return []
        asked: list[bytes] = []
        if now >= self._asked + AGAIN_S:
            self._asked = now
            asked += islice(self._offered, limit)
        missed = takewhile(lambda absent: now >= absent[1] + ABSENT_S, self._absent.items())
        asked += (chunk for chunk, _ in islice(missed, limit - len(asked)))
        if in_turn:
            turn = list(islice(self._in_turn, limit - len(asked)))
            for chunk in turn:
                self._in_turn.move_to_end(chunk)
            asked += (chunk for chunk in turn if chunk not in self._absent)
        return asked

    def answered(self, chunks: Sequence[bytes], found: bytes, epoch: int, step: int, now: float) -> list[Change]:
        """Return the changes after an answer of the directory. found: 1 or 0 for each chunk."""
        if epoch != self._epoch:
            self._epoch, self._settled = epoch, now + SETTLE_S
            self._absent.clear()
        changes: list[Change] = []
        for chunk, there in zip(chunks, found, strict=True):
            if chunk in self._offered:
                if there:
                    changes += self._appeared(chunk, step, now)
                elif now >= self._offered[chunk][1] + OFFERED_S:  # the pool refused the chunk
                    del self._offered[chunk]
            elif there:
                self._absent.pop(chunk, None)
            elif chunk in self._told and now >= self._settled:
                since = self._absent.setdefault(chunk, now)
                if now >= since + ABSENT_S:
                    changes.append(self._remove(chunk))
        return changes

    def _appeared(self, chunk: bytes, step: int, now: float) -> list[Change]:
        event, _ = self._offered.pop(chunk)
        changes = []
        if len(self._told) >= self._limit:
            changes.append(self._remove(next(iter(self._told))))
        self._told[chunk] = Told(event, 1, now, step)
        self._in_turn[chunk] = None
        return [*changes, Change(event, 0, True)]

    def _remove(self, chunk: bytes) -> Change:
        del self._in_turn[chunk]
        self._absent.pop(chunk, None)
        return _removed(self._told.pop(chunk))

    def withdrawn(self, limit: int) -> list[Change]:
        """Return at most `limit` changes for withdrawn chunks."""
        return [_removed(self._withdrawn.popleft()) for _ in range(min(limit, len(self._withdrawn)))]

    def refresh(self, limit: int, step: int, now: float) -> list[Change]:
        """Return at most `limit` repeated announcements, for routers that joined late."""
        changes = []
        for chunk, told in list(islice(self._told.items(), limit)):
            if now < told.at + self._refresh_s and step < told.step + self._refresh_steps:
                break
            afresh = told.times - 1 if told.times >= REPEATS else 0
            self._told[chunk] = Told(told.event, told.times - afresh + 1, now, step)
            self._told.move_to_end(chunk)
            changes.append(Change(told.event, afresh, True))
        return changes


def _removed(told: Told) -> Change:
    return Change(told.event, told.times, False)
