"""What goes down from a GPU to the memory of its node, before its room is needed.

A block that was copied there is a primary in memory from then on, and a replica on the GPU, whose eviction loses
nothing. While it is copied its row in memory is SINKING, which nobody may evict or read.
"""

import numpy as np
from numpy.typing import NDArray

from raykv.calls import Cooled
from raykv.compile import kernel
from raykv.config import MIB
from raykv.holds import has_primary
from raykv.index import (
    DROPPED,
    READY,
    REPLICA,
    SINKING,
    delete,
    grant,
    link_old,
    list_of,
    listed,
    probe,
    suspend,
    touch,
    unlink,
)
from raykv.memory import Memory, Node
from raykv.placement import evict, oldest, room, take
from raykv.shelves import Places, Rows, Shelves

SHARE = 0.25  # of a GPU's slots that can be had for nothing
BYTES_PER_CALL = 64 * MIB


@kernel
def lacks(c, shelf, slots, share):  # type: ignore[no-untyped-def]
    """How many more of a shelf's slots should be free, or a replica's, beside its staging window."""
    return max(0, np.int64(np.ceil(slots * share)) - max(0, room(c, shelf)))


@kernel
def cool(c, shelf, below, want, source, target):  # type: ignore[no-untyped-def]
    """Choose a GPU's oldest primaries, and a slot for each in the memory below: of the oldest there, if need be.

    source[i], target[i]: the row on the GPU, which nobody holds for that, and the SINKING one. Returns how many.
    """
    n, row = 0, oldest(c, shelf)
    while row >= 0 and n < want:
        before = np.int64(c.rows[row].prev)
        if c.rows[row].pins == 0 and not _sinks(c, row):
            if room(c, below) > 0:
                place = take(c, below)
            elif oldest(c, below) >= 0:
                place = evict(c, below)
            else:
                break
            grant(c, place, c.rows[row].k0, c.rows[row].k1, SINKING)
            source[n] = row
            target[n] = place
            n += 1
        row = before
    return n


@kernel
def _sinks(c, row):  # type: ignore[no-untyped-def]
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0:
        if c.rows[other].state == SINKING and c.rows[other].pins > 0:
            return True
        other = np.int64(c.rows[other].same)
    return False


@kernel
def cooled(c, rows, gens, stored):  # type: ignore[no-untyped-def]
    """SINKING rows that were stored are primaries from now on, and those of a GPU replicas, the first to go.

    The others are for a sweep: somebody may still write there. Idempotent. Returns how many were stored.
    """
    count = 0
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row < 0 or c.rows[row].gen != gens[i]:
            continue
        state = c.rows[row].state
        if state == DROPPED and c.rows[row].pins == 1:
            suspend(c, row)
        elif state == SINKING and not stored[i]:
            delete(c, row)
            suspend(c, row)
        elif state == SINKING:
            c.rows[row].state = REPLICA if has_primary(c, row) else READY
            c.rows[row].pins = 0
            touch(c, row)
            _step_back(c, row)
            count += 1
    return count


@kernel
def _step_back(c, row):  # type: ignore[no-untyped-def]
    """Make the other primaries of a new one's key replicas, older than all others where they are."""
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0 and c.rows[row].state == READY:
        if other != row and c.rows[other].state == READY:
            if listed(c, other):
                unlink(c, list_of(c, other, READY), other)
            c.rows[other].state = REPLICA
            if c.rows[other].pins == 0:
                link_old(c, list_of(c, other, REPLICA), other)
        other = np.int64(c.rows[other].same)


class Cooling:
    """What is on its way down from GPUs."""

    def __init__(self, shelves: Shelves, memory: Memory) -> None:
        self._shelves, self._memory = shelves, memory
        self._under_way: dict[str, tuple[Rows, Rows]] = {}  # by the GPU's name: rows in memory, and their generations

    def next(self, node: Node, host: Node) -> Cooled:
        """What of a GPU's blocks goes down next."""
        source, target, keys = [], [np.zeros(0, np.int64)], []
        slots = self._memory.slots(node)
        for stride, shelf in node.shelves.items():
            want = min(BYTES_PER_CALL // stride, int(lacks(self._shelves.c, shelf, slots[stride], SHARE)))
            if node.spare or not want:
                continue
            below = self._memory.shelf(host, stride)
            self._memory.provision(host, below, stride, want)
            c, rows, places = self._shelves.c, np.empty(want, np.int64), np.empty(want, np.int64)
            n = cool(c, shelf, below, want, rows, places)
            source.append(self._shelves.describe(rows[:n], stride)[1].tobytes())
            keys.append(np.stack([c.rows["k0"][rows[:n]], c.rows["k1"][rows[:n]]], axis=1).tobytes())
            target.append(places[:n])
        rows = np.concatenate(target)
        self._under_way[node.name] = rows, self._shelves.c.rows["gen"][rows]
        return Cooled(b"".join(source), b"".join(keys), self._shelves.describe(rows, 0)[1].tobytes())

    def settle(self, node: Node, places: Places, stored: NDArray[np.uint8]) -> int:
        """What became of the last answer; those of which nothing is said did not go down. Returns how many did."""
        count = int(cooled(self._shelves.c, *self._shelves.rows_of(places), stored))
        rows, gens = self._under_way.pop(node.name, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        cooled(self._shelves.c, rows, gens, np.zeros(len(rows), np.uint8))
        return count
