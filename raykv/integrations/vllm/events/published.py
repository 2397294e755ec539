"""Which chunks routers were told of, and what they are to be told next. No vLLM, no clock and no I/O.

Routers count KV events: to them a block is gone when it was removed as often as it was stored. So it is known how often
a chunk was told, and it goes with as many removals, which say nothing new to those that do not count.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import NamedTuple

CHUNKS = 1 << 17  # that routers know of, about 2 KB each; of more, those told longest ago are withdrawn
OFFERED_S = 5.0  # for a chunk that was offered to appear in the pool
AGAIN_S = 0.05  # between two questions for chunks that were offered
ABSENT_S = 2.0  # between two questions after which an absent chunk is gone: a node store may have been restarted
SETTLE_S = 15.0  # for a new directory to learn what the nodes have
REPEATS = 8  # that a chunk was told before it is told afresh


class Told(NamedTuple):
    """A chunk that routers know of: its event, how often they were told, and when and at which step last."""

    event: bytes
    times: int
    at: float
    step: int


class Change(NamedTuple):
    """What routers are to be told of a chunk: that it is removed, so many times, and then that it is stored, or not."""

    event: bytes
    removed: int
    stored: bool


class Published:
    """Chunks by vLLM's hash. For one thread. Every call takes the time as `now`, in seconds of any monotonic clock."""

    def __init__(self, refresh_s: float, refresh_steps: int, chunks: int = CHUNKS) -> None:
        """refresh_s, refresh_steps: after so much time, or so many steps of the engine, a chunk is told again."""
        self._refresh_s, self._refresh_steps, self._limit = refresh_s, refresh_steps, chunks
        self._told: OrderedDict[bytes, Told] = OrderedDict()  # told longest ago first
        self._in_turn: OrderedDict[bytes, None] = OrderedDict()  # of them, whom to ask the directory for next
        self._absent: dict[bytes, float] = {}  # of them, since when the directory does not have them
        self._offered: dict[bytes, tuple[bytes, float]] = {}  # not told yet: event, and since when
        self._withdrawn: deque[Told] = deque()
        self._epoch, self._settled = 0, 0.0
        self._asked = 0.0

    @property
    def waits(self) -> bool:
        """Whether chunks were offered that are not seen in the pool yet."""
        return bool(self._offered)

    @property
    def leaves(self) -> bool:
        """Whether routers are still to be told that chunks are withdrawn."""
        return bool(self._withdrawn)

    def knows(self, chunk: bytes) -> bool:
        return chunk in self._told or chunk in self._offered

    def offer(self, chunk: bytes, event: bytes, now: float) -> None:
        """A chunk that the pool was given, or had. event: what routers are told once it is there."""
        if not self.knows(chunk) and len(self._offered) < self._limit:
            self._offered[chunk] = event, now

    def withdraw_all(self) -> None:
        """Nothing of this is to be had any more."""
        self._withdrawn.extend(self._told.values())
        for chunks in (self._told, self._in_turn, self._absent, self._offered):
            chunks.clear()

    def to_ask(self, limit: int, in_turn: bool, now: float) -> list[bytes]:
        """Chunks that the directory is to be asked for, at most `limit`. in_turn: those too that are only to be there.

        Nothing while routers are still to be told that others are withdrawn, which may be the same.
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
        """What follows from the directory's answer. found: 1 or 0 a chunk. epoch: of the directory."""
        if epoch != self._epoch:
            self._epoch, self._settled = epoch, now + SETTLE_S
            self._absent.clear()
        changes: list[Change] = []
        for chunk, there in zip(chunks, found, strict=True):
            if chunk in self._offered:
                changes += self._appeared(chunk, step, now) if there else self._awaited(chunk, now)
            elif there:
                self._absent.pop(chunk, None)
            elif chunk in self._told and now >= self._settled and self._is_gone(chunk, now):
                changes.append(self._remove(chunk))
        return changes

    def _is_gone(self, chunk: bytes, now: float) -> bool:
        return now >= self._absent.setdefault(chunk, now) + ABSENT_S

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

    def _awaited(self, chunk: bytes, now: float) -> list[Change]:
        if now >= self._offered[chunk][1] + OFFERED_S:  # the pool refused it
            del self._offered[chunk]
        return []

    def withdrawn(self, limit: int) -> list[Change]:
        """At most so many of those that are withdrawn: routers are told in turn."""
        return [_removed(self._withdrawn.popleft()) for _ in range(min(limit, len(self._withdrawn)))]

    def refresh(self, limit: int, step: int, now: float) -> list[Change]:
        """At most so many that are to be told again, for routers that joined late."""
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
