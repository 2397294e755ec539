"""Blocks that stay until somebody unpins them, in memory or in an external tier."""

from collections.abc import Iterable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from raykv.directory.kernels import columns, leases, table
from raykv.directory.state.arrays import RowArray, key_array
from raykv.directory.state.size_classes import SizeClasses


class Pins(dict[bytes, tuple[int, int]]):
    """Maps each pinned key to the held row (the key's copy in a tier, else its primary) and the row's generation."""

    def __init__(self, size_classes: SizeClasses) -> None:
        self._size_classes = size_classes
        self._sizes: dict[bytes, int] = {}  # bytes of each pin in the memory of a node; 0 on a GPU and in a tier
        self._bytes = 0  # sum of `_sizes`

    def pin(self, keys: list[bytes], limit: int | None = None) -> int:
        """Pin keys that are stored.

        limit: maximum bytes of nodes' memory for all pins. If the limit is reached, keys at the end of `keys` get no
        new pin. Earlier pins stay. Returns how many of `keys` are pinned.
        """
        new = self._hold(keys)
        if limit is not None:
            self.unpin(self._beyond(limit, new))
        return sum(key in self for key in keys)

    def _beyond(self, limit: int, keys: list[bytes]) -> list[bytes]:
        """Return the keys to unpin so that all pins fit in `limit` bytes, last keys first. keys: newly pinned keys."""
        over, beyond = self._bytes - limit, list[bytes]()
        for key in reversed(keys if over > 0 else ()):
            if over > 0 and self._sizes[key]:
                beyond.append(key)
                over -= self._sizes[key]
        return beyond[::-1]

    def _hold(self, keys: list[bytes]) -> list[bytes]:
        """Hold the lasting copy of each key that has no pin. Returns the keys that have a copy to hold."""
        missing = list(dict.fromkeys(key for key in keys if key not in self))
        firsts, rows, gens = (np.empty(len(missing), np.int64) for _ in range(3))
        table.find(self._size_classes.c, key_array(b"".join(missing)), firsts)
        leases.hold_lasting(self._size_classes.c, firsts, rows, gens)
        there = np.flatnonzero(rows >= 0)
        new = [missing[i] for i in there]
        self.update(zip(new, zip(rows[there].tolist(), gens[there].tolist(), strict=True), strict=True))
        size_classes = self._size_classes.size_classes_of(rows[there])
        sizes: NDArray[np.int64] = self._size_classes.c.size_classes["charge"][size_classes]
        self._sizes.update(zip(new, sizes.tolist(), strict=True))
        self._bytes += int(sizes.sum())
        return new

    def _take(self, keys: list[bytes]) -> dict[bytes, tuple[int, int]]:
        """Remove the pins of keys. The caller must release the rows that these pins hold."""
        taken = {key: self.pop(key) for key in keys if key in self}
        self._bytes -= sum(self._sizes.pop(key) for key in taken)
        return taken

    def unpin(self, keys: list[bytes]) -> int:
        """End pins. Returns how many of the keys were pinned."""
        taken = self._take(keys)
        self._release(taken)
        return len(taken)

    def renew(self, keys: list[bytes]) -> None:
        """Move pins to the keys' present lasting copies. If these are in a tier, copies in memory may be evicted."""
        taken = self._take(keys)
        self._hold(list(taken))
        self._release(taken)

    def repair(self) -> None:
        """Pin another copy where the pinned copy was dropped, is lost with its node, or is no longer the primary."""
        rows, gens = _rows_and_gens(self.values())
        held = self._size_classes.c.rows[rows]
        stale = (held["gen"] != gens) | (held["state"] == columns.DROPPED) | (held["state"] == columns.REPLICA)
        if stale.any():
            keys = list(self)
            self.renew([keys[i] for i in np.flatnonzero(stale)])

    def rows(self) -> RowArray:
        return _rows_and_gens(self.values())[0]

    def _release(self, taken: dict[bytes, tuple[int, int]]) -> None:
        rows, gens = _rows_and_gens(taken.values())
        leases.release(self._size_classes.c, rows, gens, rows[:0], gens[:0])


def _rows_and_gens(held: Iterable[tuple[int, int]]) -> tuple[RowArray, RowArray]:
    rows, gens = np.ascontiguousarray(np.fromiter(chain.from_iterable(held), np.int64).reshape(-1, 2).T)
    return rows, gens
