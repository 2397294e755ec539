"""An arena whose blocks must survive all messages and reads from outside, however wrong."""

import contextlib
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from helpers.arena import worker as w
from helpers.arena.worker import PRINT, SLAB, locations
from raykv.arena.arena import Arena

SIZE = 5000  # bytes of a block, which takes a slot of two pages
BLOCKS = 24  # half of them in the last slots of a slab
OFFERED, SLABS = 2, 3
Locations = NDArray[np.void]
Bytes = NDArray[np.uint8]


class Guarded:
    """An arena of three slabs, two of them offered. at, keys, blocks: the blocks that were stored there."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        last = SLAB // 8192 - 1
        slots = [slot for i in range(BLOCKS // 4) for slot in (i, last - i)]
        self.at = np.concatenate([locations(slots, range(2, 2 + len(slots)), size=SIZE, slab=slab) for slab in (0, 1)])
        self.at["gen"] = w.GEN + 2 + np.arange(len(self.at))
        random = np.random.default_rng(7)
        self.keys = random.integers(0, 256, (len(self.at), 16), np.uint8)
        self.blocks = random.integers(0, 256, (len(self.at), SIZE), np.uint8)
        assert arena.write(self.at, self.keys, self.blocks).all()

    def grants(self, gen: int) -> Locations:
        """Grants of slots in the middle of the slabs, where no block lies."""
        grants = self.at.copy()
        grants["slot"] = 100 + np.arange(len(grants))
        grants["gen"] = w.GEN + 1000 + gen * len(grants) + np.arange(len(grants))
        return grants

    def there(self, which: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """(n,) which blocks are there. AssertionError if a read gave other bytes, or if a block is lost.

        which: (n,) the blocks that may be lost.
        """
        out = np.zeros_like(self.blocks)
        ok = self.arena.read(self.at, self.keys, out)
        assert (out[ok] == self.blocks[ok]).all(), "a read gave other bytes"
        lost = ~ok if which is None else ~ok & ~which
        assert not lost.any(), f"blocks {np.flatnonzero(lost).tolist()} are lost"
        return ok


@contextlib.contextmanager
def guarded(name: str = "") -> Iterator[Guarded]:
    """The arena is in a file of this process, which is removed afterwards."""
    arena = Arena.create(f"/dev/shm/raykv-doors-{os.getpid()}{name}", PRINT, SLAB, SLABS)
    try:
        for _ in range(OFFERED):
            assert arena.offer_next()
        assert arena.raise_epoch(w.EPOCH)
        yield Guarded(arena)
    finally:
        arena.close(unlink=True)
