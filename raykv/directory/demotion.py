"""What goes down from a GPU to the memory of its node, before its room is needed.

A block that was copied there is a primary in memory from then on, and a replica on the GPU, whose eviction loses
nothing. While it is copied its row in memory is DEMOTING, which nobody may evict or read.
"""

import numpy as np
from numpy.typing import NDArray

from raykv.config import KEYS_PER_CALL, MIB
from raykv.directory.allocator import Allocator, Node
from raykv.directory.kernels.index import (
    DEMOTING,
    DROPPED,
    FLOAT,
    INT,
    MASK,
    READY,
    REPLICA,
    ROWS,
    C,
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
from raykv.directory.kernels.leases import has_primary
from raykv.directory.kernels.placement import evict, oldest, room, take
from raykv.directory.size_classes import Locations, Rows, SizeClasses
from raykv.protocol import GpuDemotions
from raykv.system.jit import kernel

SHARE = 0.25  # of a GPU's slots that can be had for nothing
BYTES_PER_CALL = 64 * MIB  # of each size; one block at least


@kernel(C, INT, INT, FLOAT)
def lacks(c, size_class, slots, share):  # type: ignore[no-untyped-def]
    """How many more of a size class's slots should be free, or a replica's, beside its staging window."""
    return max(0, np.int64(np.ceil(slots * share)) - max(0, room(c, size_class)))


@kernel(C, INT, INT, INT, ROWS, ROWS)
def demote_gpu(c, size_class, host_class, want, source, target):  # type: ignore[no-untyped-def]
    """Choose a GPU's oldest primaries, and a slot for each in the memory below: of the oldest there, if need be.

    source[i], target[i]: the row on the GPU, which nobody holds for that, and the DEMOTING one. Returns how many.
    """
    n, row = 0, oldest(c, size_class)
    while row >= 0 and n < want:
        before = np.int64(c.rows[row].prev)
        if c.rows[row].pins == 0 and not _sinks(c, row):
            if room(c, host_class) > 0:
                target_row = take(c, host_class)
            elif oldest(c, host_class) >= 0:
                target_row = evict(c, host_class)
            else:
                break
            grant(c, target_row, c.rows[row].k0, c.rows[row].k1, DEMOTING)
            c.rows[target_row].uses = c.rows[row].uses
            source[n] = row
            target[n] = target_row
            n += 1
        row = before
    return n


@kernel
def _sinks(c, row):  # type: ignore[no-untyped-def]
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0:
        if c.rows[other].state == DEMOTING and c.rows[other].pins > 0:
            return True
        other = np.int64(c.rows[other].same)
    return False


@kernel(C, ROWS, MASK)
def gpu_demoted(c, rows, stored):  # type: ignore[no-untyped-def]
    """DEMOTING rows that were stored are primaries from now on, and those of a GPU replicas, the first to go.

    The others are for a sweep: somebody may still write there. Returns how many were stored.
    """
    count = 0
    for i in range(len(rows)):
        row = np.int64(rows[i])
        if row < 0:
            continue
        if c.rows[row].state == DROPPED:
            suspend(c, row)
        elif not stored[i]:
            delete(c, row)
            suspend(c, row)
        else:
            c.rows[row].state = REPLICA if has_primary(c, row) else READY
            c.rows[row].pins = 0
            touch(c, row)
            count += 1
    for i in range(len(rows)):  # the youngest first, so that the oldest is before it in turn
        row = np.int64(rows[len(rows) - 1 - i])
        if row >= 0 and c.rows[row].state == READY:
            _step_back(c, row)
    return count


@kernel
def _step_back(c, row):  # type: ignore[no-untyped-def]
    """Make the other primaries of a new one's key replicas, older than all others where they are."""
    other = (c.table[probe(c, c.rows[row].k0, c.rows[row].k1)] & 0xFFFFFFFF) - 1
    while other >= 0:
        if other != row and c.rows[other].state == READY:
            if listed(c, other):
                unlink(c, list_of(c, other, READY), other)
            c.rows[other].state = REPLICA
            if c.rows[other].pins == 0:
                link_old(c, list_of(c, other, REPLICA), other)
        other = np.int64(c.rows[other].same)


class GpuDemotion:
    """What is on its way down from GPUs."""

    def __init__(self, size_classes: SizeClasses, memory: Allocator) -> None:
        self._size_classes, self._allocator = size_classes, memory
        self._under_way: dict[str, Rows] = {}  # in memory, by the GPU's name; -1 where the slab was closed

    def next(self, node: Node, host: Node) -> GpuDemotions:
        """What of a GPU's blocks goes down next."""
        source, target, keys = [], [np.zeros(0, np.int64)], []
        slots = self._allocator.slots(node)
        for stride, size_class in node.size_classes.items():
            lacking = int(lacks(self._size_classes.c, size_class, slots[stride], SHARE))
            want = min(lacking, max(1, BYTES_PER_CALL // stride), KEYS_PER_CALL)
            if node.spare or want == 0 or (host_class := self._allocator.size_class(host, stride)) < 0:
                continue
            self._allocator.make_room(host, host_class, stride, want)
            c, rows, locations = self._size_classes.c, np.empty(want, np.int64), np.empty(want, np.int64)
            n = demote_gpu(c, size_class, host_class, want, rows, locations)
            source.append(self._size_classes.describe(rows[:n], stride)[1].tobytes())
            keys.append(np.stack([c.rows["k0"][rows[:n]], c.rows["k1"][rows[:n]]], axis=1).tobytes())
            target.append(locations[:n])
        rows = np.concatenate(target)
        self._under_way[node.name] = rows
        return GpuDemotions(b"".join(source), b"".join(keys), self._size_classes.describe(rows, 0)[1].tobytes())

    def settle(self, name: str, locations: Locations, stored: NDArray[np.uint8]) -> int:
        """What became of the last answer; those of which nothing is said did not go down. Returns how many did.

        Nothing else that is said counts: rows of an earlier answer are for a sweep by now, or another's.
        """
        c, (there, gens) = self._size_classes.c, self._size_classes.rows_of(locations[stored > 0])
        done = there[c.rows["gen"][there] == gens]
        rows = self._under_way.pop(name, np.zeros(0, np.int64))
        return int(gpu_demoted(c, rows, np.isin(rows, done)))

    def invalidate(self) -> None:
        """Rows of slabs that were closed are on their way no more."""
        for rows in self._under_way.values():
            self._size_classes.invalidate(rows, rows)
