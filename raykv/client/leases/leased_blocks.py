"""Locations of a lease's blocks, and the slots on this node into which the blocks are pulled."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.client.directory_client import DirectoryClient
from raykv.client.request_record import RequestRecord
from raykv.protocol.clients import NextWindowRequest
from raykv.protocol.location import LOCATION, Locations, is_tier

Blocks = NDArray[np.intp]  # indices of blocks in a lease, ascending


class LeaseName(NamedTuple):
    """A name of leased blocks. Any process of the reader's node may use it, until the lease is released."""

    nonce: bytes  # nonce of the arena of the reader's node
    node: int  # index of that node's memory in locations
    owner: int  # id of the client that has the lease
    lease: int
    first: int  # index in the lease of the first block


class LeasedBlocks:
    """Blocks of one lease.

    source: (n,) LOCATION of each block. found: numbers of blocks that were in this process's memory, on other nodes and
    in an external tier when they were leased. staged: (n,) LOCATION of the staging slot on this node for each block
    (slab_gen 0: none). keys: (n, 16). external: (n,) bool: whether a block was in an external tier when it was leased.
    follows: whether reads use the copies that the directory names after the match. record: the record of the blocks'
    request, set while somebody follows requests.
    """

    def __init__(
        self,
        directory: DirectoryClient,
        block_bytes: int,
        name: LeaseName,
        source: Locations,
        keys: NDArray[np.uint8],
        all_here: bool = False,
    ) -> None:
        """all_here: whether all blocks are known to be in the memory of this node."""
        self.name, self.block_bytes = name, block_bytes
        self.source, self.keys, self.staged = source, keys, np.zeros(len(source), LOCATION)
        self.external = np.zeros(len(source), np.bool_) if all_here else is_tier(source["node"])
        here, external = len(source), 0
        if not all_here:
            here, external = int(np.count_nonzero(self.here())), int(np.count_nonzero(self.external))
        self.found = {"memory": here, "external": external, "node": len(source) - here - external}
        self.record: RequestRecord | None = None
        self._directory = directory
        self._window_lost = False  # whether the last NextWindowRequest got no answer: see its `again`
        self._leased: Locations | None = None  # where the blocks were when they were leased, if `source` has changed
        self.follows = True

    def __len__(self) -> int:
        return len(self.source)

    def here(self) -> NDArray[np.bool_]:
        """(n,) bool: whether a block is in the memory of this node."""
        here: NDArray[np.bool_] = self.source["node"] == self.name.node
        return here

    def move(self, blocks: Blocks | slice, source: Locations) -> None:
        """Set the current locations of blocks."""
        if not self.source.flags.writeable:  # a view of the directory's answer, which most leases never change
            self.source = self.source.copy()
        self.source[blocks] = source

    def with_slots(self, away: Blocks) -> Blocks:
        """Return the leading blocks of `away` that have staging slots."""
        return away[: leading(self.staged["slab_gen"][away] > 0)]

    def take_slots(self, piece: Blocks, start: int, may_wait: bool = False) -> Blocks | None:
        """Request the staging slots that a piece lacks. Returns the leading blocks of the piece that then have slots.

        Gives back slots of blocks before `start` and after the piece. Returns None if there was no answer or the lease
        is gone. may_wait: see NextWindowRequest.
        """
        if len(self.with_slots(piece)) == len(piece):
            return piece
        stop = int(piece[-1]) + 1
        slots = self._next_window(start, stop, may_wait)
        ours = None if slots is None else (slots["node"] == self.name.node) | (slots["node"] == 0)
        if slots is None or ours is None or len(slots) < stop - start or not ours.all():
            return None
        self.staged["slab_gen"][:start] = self.staged["slab_gen"][stop:] = 0
        self.staged[start:stop] = slots
        return self.with_slots(piece)

    def go_back(self) -> None:
        """From now on, read all blocks from the places where they were leased.

        The lease no longer protects these copies from eviction, but most of them still exist.
        """
        self.follows = False
        if self._leased is not None:
            away = ~self.here()
            self.source[away] = self._leased[away]

    def give_back_slots(self) -> None:
        """Free the staging slots of blocks that were read, for other leases. A later read requests slots again."""
        if (self.staged["slab_gen"] > 0).any():
            self._next_window(len(self), len(self))
            self.staged["slab_gen"] = 0

    def _next_window(self, start: int, stop: int, may_wait: bool = False) -> Locations | None:
        """Request slots for blocks [start, stop). Gives back other blocks' slots, and notes which copies to read.

        Returns None if the directory did not answer.
        """
        first = self.name.first
        blocks = first + start, first + stop, self.block_bytes
        request = NextWindowRequest(self.name.owner, self.name.lease, *blocks, self._window_lost, may_wait)
        answer = self._directory.next_window(request)
        self._window_lost = answer is None
        if answer is None:
            return None
        if answer.passed:
            self.move(slice(start), np.frombuffer(answer.passed, LOCATION)[first:])
        if self.follows:
            self._follow(start, np.frombuffer(answer.source, LOCATION))
        slots: Locations = np.frombuffer(answer.staged, LOCATION)
        return slots

    def _follow(self, start: int, source: Locations) -> None:
        """From now on, read the copies that the directory names. source: locations of the blocks from `start` on."""
        away = np.flatnonzero(~self.here()[start : start + len(source)])
        if (self.source[start + away] != source[away]).any():
            self._leased = self.source.copy() if self._leased is None else self._leased
            self.move(start + away, source[away])

    def fall_short(self, why: str, about: int = -1) -> None:
        """Note why fewer blocks are read than were leased. about: index of the node that the reason is about."""
        if self.record is not None:
            self.record.fall_short(why, about)


def leading(ok: NDArray[np.bool_]) -> int:
    """Return the number of leading elements that are True."""
    return len(ok) if ok.all() else int(np.argmin(ok))
