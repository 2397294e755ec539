"""A request's question to the pool, its answer, and the chunks that the request must then compute.

`manager.py: RayKVManager` asks the question, and tells vLLM about the hit.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import get_offload_group_idx

from raykv.client.leases.joint_match import JointMatch
from raykv.integrations.vllm.chunks.chunks import Origin, PartToLoad
from raykv.integrations.vllm.identity.groups import Group
from raykv.integrations.vllm.scheduler.waiting import Wait
from raykv.protocol.location import LOCATION


class Found(NamedTuple):
    """A request's chunks that the pool has in memory.

    chunks: by group, the numbers of the leased chunks. ready: by group, the numbers of the leased chunks and of the
    `ahead` chunks after them, which are ready but not leased. failed: whether the look-up failed.
    """

    match: JointMatch
    chunks: dict[int, range]
    ready: dict[int, range]
    failed: bool = False


class RankPart(NamedTuple):
    """A rank's part of a group's chunks. number: index of the part among the rank's parts."""

    rank: int
    group: Group
    number: int


@dataclass
class Ask:
    """A request's question to the pool. first: by group, the number of the first chunk asked for.

    computes: whether other engines may wait for this request to compute the missing chunks. answer: result of the last
    look-up. wait: set once the request waits for another engine.
    """

    keys: dict[int, list[bytes]]
    first: dict[int, int]
    origin: Origin
    computes: bool
    answer: Future[Found] = field(init=False)
    wait: Wait | None = None
    loading: bool = False
    counted: bool = False

    def has(self, key: bytes, number: int | None) -> bool:
        """Whether the pool has a chunk for the request. number: the chunk's number in its group."""
        group, found = get_offload_group_idx(key), self.answer.result()
        if number not in found.ready.get(group, ()):
            return False
        return self.keys[group][(number or 0) - self.first[group]] == key

    def part_to_load(self, of: RankPart, number: int, chunks: range) -> PartToLoad:
        """Return the leased chunks of a part.

        number: index of the part in the match. chunks: numbers of the wanted chunks.
        """
        first, match = self.first[of.group.group_idx], self.answer.result().match
        leased = match.leased(number, chunks.start - first, chunks.stop - first) if chunks else []
        away = any((np.frombuffer(piece.source, LOCATION)["node"] != piece.name.node).any() for piece in leased)
        return PartToLoad(of.group.place, of.number, away, leased)

    def release(self) -> None:
        """Release the leases now, or when the answer arrives."""
        if not self.answer.cancel():
            self.answer.add_done_callback(lambda answer: answer.result().match.release())

    def end_intent(self) -> None:
        """End the request's intent, so that other engines no longer wait for this request."""
        if not self.answer.cancel():
            self.answer.add_done_callback(lambda answer: answer.result().match.end_intent())


@dataclass
class Computing:
    """The first group's chunks that a request must compute, and since when. Other engines may wait for these chunks.

    ask: the question that registered the request's intent, which other engines rely on. missed: chunks not yet offered
    to the workers. offered: chunks that still wait for `complete_store`. measured: whether this engine's speed has been
    measured, or can't be measured because another request computes the chunks.
    """

    since: float
    ask: Ask
    missed: set[bytes]
    offered: set[bytes] = field(default_factory=set)
    measured: bool = False

    def offer(self, keys: Collection[bytes]) -> None:
        """Note that these chunks are offered to the workers."""
        offered = self.missed.intersection(keys)
        self.missed -= offered
        self.offered |= offered
