"""Blocks that stay until somebody unpins them, or for a time, in memory or in an external tier.

Where a writer would be refused, pins with a priority are given up: the lowest priority first, then the oldest pin.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import inf

import numpy as np
from numpy.typing import NDArray

from raykv.directory.kernels import columns, leases, table
from raykv.directory.state.arrays import RowArray, key_array
from raykv.directory.state.size_classes import SizeClasses


class Pins(dict[bytes, tuple[int, int]]):
    """By key: the row that its pin holds (its copy in a tier, else its primary), and the row's generation."""

    def __init__(self, size_classes: SizeClasses) -> None:
        self._size_classes = size_classes
        self._ends: dict[bytes, float] = {}  # end times, of pins with a ttl
        self._next_end = inf  # the first of these times, or earlier
        self._priorities: dict[bytes, int] = {}  # of pins that may be given up
        self._by_priority: dict[int, dict[bytes, None]] = {}  # the same pins by priority, oldest first
        self._lasting: dict[bytes, int] = {}  # the other pins, and the bytes of each in the memory of a node
        self._lasting_bytes = 0  # sum of `_lasting`

    def pin(self, keys: list[bytes], end: float = inf, priority: int | None = None, limit: int | None = None) -> int:
        """Pin keys that are stored, until `end`. If a writer needs room, pins give way by `priority`; None: never.

        The new terms also replace the terms of earlier pins. limit: bytes of nodes' memory for all pins that never give
        way. Keys beyond the limit, the last of `keys`, stay as they were before. Returns how many of `keys` are pinned
        on the new terms.
        """
        before = {key for key in keys if key in self}
        self._hold(keys)
        over = self._beyond(limit, keys) if limit is not None else set()
        self.unpin([key for key in over if key not in before])
        pinned = [key for key in keys if key in self and key not in over]
        self._forget_terms(pinned)
        if end < inf:
            self._ends.update(dict.fromkeys(pinned, end))
            self._next_end = min(self._next_end, end)
        if priority is not None:
            self._priorities.update(dict.fromkeys(pinned, priority))
            self._by_priority.setdefault(priority, {}).update(dict.fromkeys(pinned))
        else:
            self._let_last(pinned)
        return len(pinned)

    def _beyond(self, limit: int, keys: list[bytes]) -> set[bytes]:
        """The last of these pinned keys: without them, the lasting pins stay within `limit` bytes."""
        sizes = self._memory_bytes([key for key in dict.fromkeys(keys) if key in self and key not in self._lasting])
        over, beyond = self._lasting_bytes + sum(sizes.values()) - limit, set[bytes]()
        for key, size in reversed(sizes.items() if over > 0 else ()):
            if over > 0 and size:
                beyond.add(key)
                over -= size
        return beyond

    def _let_last(self, keys: list[bytes]) -> None:
        """These pins never give way, whether or not they did before."""
        sizes = self._memory_bytes(keys)
        self._lasting_bytes += sum(sizes.values()) - sum(self._lasting.get(key, 0) for key in sizes)
        self._lasting.update(sizes)

    def _memory_bytes(self, keys: list[bytes]) -> dict[bytes, int]:
        """Bytes of each pinned key in the memory of a node; 0 on a GPU and in an external tier."""
        size_classes = self._size_classes.size_classes_of(np.array([self[key][0] for key in keys], np.int64))
        sizes: NDArray[np.int64] = self._size_classes.c.size_classes["charge"][size_classes]
        return dict(zip(keys, sizes.tolist(), strict=True))

    def give_up(self, size_class: int, count: int, may_go: Callable[[int, int], bool]) -> bool:
        """Unpin at most `count` blocks of a size class that nothing else holds. Returns whether there were any.

        may_go(tenant, count): whether one more block of the tenant may be evicted after `count` blocks of this tenant.
        tenant: the tenant's number.
        """
        given_up, of_tenant = list[bytes](), Counter[int]()
        for key in self._held_alone(size_class):
            if len(given_up) == count:
                break
            tenant = self._size_classes.tenant_of_row(self[key][0])
            if may_go(tenant, of_tenant[tenant]):
                given_up.append(key)
                of_tenant[tenant] += 1
        self.unpin(given_up)
        return bool(given_up)

    def _held_alone(self, size_class: int) -> Iterator[bytes]:
        """Keys that may be given up, in order: blocks of the size class that could be evicted without their pins."""
        for _, pinned in sorted(self._by_priority.items()):
            keys = list(pinned)
            rows, gens = _rows_and_gens(map(self.__getitem__, keys))
            held = self._size_classes.c.rows[rows]
            alone = (held["gen"] == gens) & (held["state"] == columns.READY) & (held["holds"] == 1)
            alone &= self._size_classes.size_classes_of(rows) == size_class
            yield from (keys[i] for i in np.flatnonzero(alone))

    def _forget_terms(self, keys: list[bytes]) -> None:
        self._lasting_bytes -= sum(self._lasting.pop(key, 0) for key in keys)
        for key in keys if self._ends else ():
            self._ends.pop(key, None)
        for key in keys if self._priorities else ():
            if (priority := self._priorities.pop(key, None)) is not None:
                del self._by_priority[priority][key]
                if not self._by_priority[priority]:
                    del self._by_priority[priority]

    def expire(self, now: float) -> None:
        """End pins whose time is over."""
        if now >= self._next_end:
            self.unpin([key for key in self if self._ends.get(key, inf) <= now])
            self._next_end = min(self._ends.values(), default=inf)

    def _hold(self, keys: list[bytes]) -> None:
        new = list(dict.fromkeys(key for key in keys if key not in self))
        firsts, rows, gens = (np.empty(len(new), np.int64) for _ in range(3))
        table.find(self._size_classes.c, key_array(b"".join(new)), firsts)
        leases.hold_lasting(self._size_classes.c, firsts, rows, gens)
        self.update(
            (key, (row, gen)) for key, row, gen in zip(new, rows.tolist(), gens.tolist(), strict=True) if row >= 0
        )

    def unpin(self, keys: list[bytes]) -> int:
        """End pins. Returns how many of the keys were pinned."""
        held = [self.pop(key) for key in keys if key in self]
        self._forget_terms(keys)
        self._release(held)
        return len(held)

    def renew(self, keys: list[bytes]) -> None:
        """Hold the present lasting copy of each key. Once a key is in an external tier, its copy in memory may go."""
        before = {key: self.pop(key) for key in keys if key in self}
        self._hold(list(before))
        self._forget_terms([key for key in before if key not in self])
        self._let_last([key for key in before if key in self._lasting])
        self._release(list(before.values()))

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

    def _release(self, held: list[tuple[int, int]]) -> None:
        rows, gens = _rows_and_gens(held)
        leases.release(self._size_classes.c, rows, gens, rows[:0], gens[:0])


def _rows_and_gens(held: Iterable[tuple[int, int]]) -> tuple[RowArray, RowArray]:
    rows, gens = np.ascontiguousarray(np.fromiter(chain.from_iterable(held), np.int64).reshape(-1, 2).T)
    return rows, gens
