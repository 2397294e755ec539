"""Blocks that stay until somebody unpins them, in memory or below."""

import numpy as np
from numpy.typing import NDArray

from raykv import holds, index
from raykv.shelves import Rows, Shelves


class Pins(dict[bytes, tuple[int, int]]):
    """By key, the row that is held for it, and its generation: of its primary, else of what lies below."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves

    def pin(self, key: bytes) -> bool:
        """Returns whether the key is pinned now."""
        if key not in self:
            self._hold(key, int(holds.lasting(self._shelves.c, self._first(key))))
        return key in self

    def unpin(self, key: bytes) -> None:
        row, gen = self.pop(key, (-1, 0))
        holds.let_go(self._shelves.c, *one(row, gen), *one(-1, 0))

    def settle(self) -> None:
        """Where a pinned block was dropped, or went with its node, another copy is pinned, if there is one."""
        rows = self._shelves.c.rows
        for key, (row, gen) in list(self.items()):
            if rows[row]["gen"] != gen or rows[row]["state"] == index.DROPPED:
                self.unpin(key)
                self.pin(key)

    def move_below(self, keys: list[bytes]) -> None:
        """What is pinned in memory and lies below by now is pinned there: its memory is for others."""
        for key in keys:
            row, gen = self.get(key, (-1, 0))
            there = int(holds.lying_below(self._shelves.c, self._first(key))) if row >= 0 else -1
            if there >= 0 and there != row:
                self._hold(key, there)
                holds.let_go(self._shelves.c, *one(row, gen), *one(-1, 0))

    def rows(self) -> Rows:
        return np.array([row for row, _ in self.values()], np.int64)

    def _hold(self, key: bytes, row: int) -> None:
        if row >= 0:
            index.pin(self._shelves.c, row)
            self[key] = row, int(self._shelves.c.rows[row]["gen"])

    def _first(self, key: bytes) -> int:
        """The key's first row."""
        firsts: NDArray[np.int64] = np.empty(1, np.int64)
        index.find(self._shelves.c, np.frombuffer(key, np.uint64).reshape(1, 2), firsts)
        return int(firsts[0])


def one(row: int, gen: int) -> tuple[Rows, Rows]:
    """A row as kernels take many."""
    return np.array([row], np.int64), np.array([gen], np.int64)
