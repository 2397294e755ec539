"""Blocks that stay until somebody unpins them, in memory or below."""

import numpy as np
from numpy.typing import NDArray

from raykv.directory.kernels import index, leases
from raykv.directory.size_classes import Rows, SizeClasses

Held = list[tuple[int, int]]


class Pins(dict[bytes, tuple[int, int]]):
    """By key, the row that is held for it, and its generation: of what lies below, else of its primary."""

    def __init__(self, size_classes: SizeClasses) -> None:
        self._size_classes = size_classes

    def pin(self, keys: list[bytes]) -> int:
        """Returns how many of the keys are pinned now."""
        new = list(dict.fromkeys(key for key in keys if key not in self))
        k = np.frombuffer(b"".join(new), np.uint64).reshape(-1, 2)
        firsts, rows, gens = (np.empty(len(new), np.int64) for _ in range(3))
        index.find(self._size_classes.c, k, firsts)
        leases.pin_lasting(self._size_classes.c, firsts, rows, gens)
        self.update((key, at) for key, *at in zip(new, rows.tolist(), gens.tolist(), strict=True) if at[0] >= 0)  # type: ignore[misc]
        return sum(key in self for key in keys)

    def unpin(self, keys: list[bytes]) -> int:
        """Returns how many of the keys were pinned."""
        held = [self.pop(key) for key in keys if key in self]
        self._release(held)
        return len(held)

    def renew(self, keys: list[bytes]) -> None:
        """Hold the copies that are to stay by now: memory is for others where a key lies below."""
        before = {key: self.pop(key) for key in keys if key in self}
        self.pin(list(before))
        self._release(list(before.values()))

    def settle(self) -> None:
        """Where a pinned block was dropped, went with its node, or is the primary no more, another copy is pinned."""
        rows, gens = self.rows(), np.array([gen for _, gen in self.values()], np.int64)
        now = self._size_classes.c.rows[rows]
        stale = (now["gen"] != gens) | (now["state"] == index.DROPPED) | (now["state"] == index.REPLICA)
        if stale.any():
            keys = list(self)
            self.renew([keys[i] for i in np.flatnonzero(stale)])

    def rows(self) -> Rows:
        return np.array([row for row, _ in self.values()], np.int64)

    def _release(self, held: Held) -> None:
        at: NDArray[np.int64] = np.array(held, np.int64).reshape(-1, 2)
        rows, gens = np.ascontiguousarray(at.T)
        leases.release(self._size_classes.c, rows, gens, rows[:0], gens[:0])
