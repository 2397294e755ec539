"""Copies blocks between a node's arenas and its external tier. Every copy is verified. No copy waits for Ray."""

import numpy as np
from numpy.typing import NDArray

from raykv.arena.arena import Arena
from raykv.arena.buffers import rows_of
from raykv.arena.checksum import judge
from raykv.protocol.location import Locations
from raykv.protocol.transfers import ALTERED, FAILED, BlocksRead
from raykv.tiers.guarded import GuardedTier


class TierCopier:
    """The copies that a node store makes to and from its external tier. Thread-safe."""

    def __init__(self, arena: Arena, external: GuardedTier) -> None:
        """arena: the arena in the node's memory, from which blocks are demoted."""
        self._arena, self.external = arena, external

    def demote(self, source: Locations, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy blocks of the arena to the tier.

        source: (n,) LOCATION, with the slots' sizes as `bytes`; the blocks' sizes are read from the headers. keys:
        (n, 16). Returns (n,) bool: which blocks are in the tier now. A block that lost its slot during the copy counts
        as not stored.
        """
        source = self._arena.with_lengths(source)
        sums, positions, there = self._arena.read_headers(source, keys, used=False)
        stored = np.zeros(len(source), np.bool_)
        which = np.flatnonzero(there)
        if len(which):
            bodies = [self._arena.views(source[i : i + 1])[0].data for i in which]
            stored[which] = self.external.store(keys[which], sums[which], positions[which], bodies)
            _, _, unchanged = self._arena.read_headers(source, keys, used=False)
            stored &= unchanged
        return stored

    def load(self, keys: NDArray[np.uint8], arena: Arena, target: Locations) -> NDArray[np.uint8]:
        """Copy blocks from the tier into granted slots of one of this node's arenas.

        keys: (n, 16). target: (n,) LOCATION, all of the same size. Returns (n,) verdicts: FAILED, PULLED, or ALTERED. A
        block is ALTERED if the tier lacks the block or has different bytes.
        """
        verdicts = np.full(len(target), FAILED, np.uint8)
        size = int(target["bytes"][0])
        for piece, rows, sums, positions, there in self.external.load(keys, size):
            ok, found = np.flatnonzero(there), verdicts[piece]
            found[~there] = ALTERED
            written = arena.write(target[piece][ok], keys[piece][ok], rows_of([rows])[ok], positions[ok], sums[ok])
            found[ok] = judge(written, (rows[i] for i in ok), sums[ok])
        return verdicts

    def read(self, keys: NDArray[np.uint8], size: int) -> BlocksRead:
        """Read blocks of `size` bytes for another node, which verifies them. keys: (n, 16)."""
        mask, sums, positions = (
            np.zeros(len(keys), np.uint8),
            np.zeros(len(keys), np.uint64),
            np.zeros(len(keys), "<u4"),
        )
        runs = []
        for piece, rows, piece_sums, piece_positions, there in self.external.load(keys, size):
            mask[piece], sums[piece], positions[piece] = there, piece_sums, piece_positions
            runs.append(rows[there].reshape(-1))
        return BlocksRead(mask.tobytes(), sums.tobytes(), positions.tobytes(), runs)
