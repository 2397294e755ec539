"""Blocks that stay until somebody unpins them, or for a time, in memory or in an external tier."""

from math import inf

import numpy as np
from numpy.typing import NDArray

from raykv.directory.arrays import RowArray, key_array
from raykv.directory.kernels import columns, index, leases
from raykv.directory.size_classes import SizeClasses


class Pins(dict[bytes, tuple[int, int]]):
    """By key, the row that is held for it, and the row's generation: the copy in an external tier, else the primary."""

    def __init__(self, size_classes: SizeClasses) -> None:
        self._size_classes = size_classes
        self._ends: dict[bytes, float] = {}  # when pins end that do so by themselves
        self._next_end = inf  # not after the first of them

    def pin(self, keys: list[bytes], end: float = inf) -> int:
        """Pin the keys that are stored until `end`, also those that were until another time.

        Returns how many of `keys` are pinned now.
        """
        self._hold(keys)
        pinned = [key for key in keys if key in self]
        for key in pinned:
            if end < inf:
                self._ends[key] = end
            else:
                self._ends.pop(key, None)
        self._next_end = min(self._next_end, end)
        return len(pinned)

    def expire(self, now: float) -> None:
        """End those whose time is over."""
        if now >= self._next_end:
            self.unpin([key for key in self if self._ends.get(key, inf) <= now])
            self._ends = {key: end for key, end in self._ends.items() if key in self}
            self._next_end = min(self._ends.values(), default=inf)

    def _hold(self, keys: list[bytes]) -> None:
        new = list(dict.fromkeys(key for key in keys if key not in self))
        firsts, rows, gens = (np.empty(len(new), np.int64) for _ in range(3))
        index.find(self._size_classes.c, key_array(b"".join(new)), firsts)
        leases.hold_lasting(self._size_classes.c, firsts, rows, gens)
        self.update(
            (key, (row, gen)) for key, row, gen in zip(new, rows.tolist(), gens.tolist(), strict=True) if row >= 0
        )

    def unpin(self, keys: list[bytes]) -> int:
        """Returns how many of the keys were pinned."""
        held = [self.pop(key) for key in keys if key in self]
        for key in keys if self._ends else ():
            self._ends.pop(key, None)
        self._release(held)
        return len(held)

    def renew(self, keys: list[bytes]) -> None:
        """Hold the copies that are to stay now: once a key is in an external tier, its copy in memory may go."""
        before = {key: self.pop(key) for key in keys if key in self}
        self._hold(list(before))
        self._release(list(before.values()))

    def repair(self) -> None:
        """Pin another copy of each key whose pinned one was dropped, went with its node or is no longer the primary."""
        rows, gens = self.rows(), np.array([gen for _, gen in self.values()], np.int64)
        held = self._size_classes.c.rows[rows]
        stale = (held["gen"] != gens) | (held["state"] == columns.DROPPED) | (held["state"] == columns.REPLICA)
        if stale.any():
            keys = list(self)
            self.renew([keys[i] for i in np.flatnonzero(stale)])

    def rows(self) -> RowArray:
        return np.array([row for row, _ in self.values()], np.int64)

    def _release(self, held: list[tuple[int, int]]) -> None:
        columns: NDArray[np.int64] = np.array(held, np.int64).reshape(-1, 2)
        rows, gens = np.ascontiguousarray(columns.T)
        leases.release(self._size_classes.c, rows, gens, rows[:0], gens[:0])
