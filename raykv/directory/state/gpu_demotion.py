"""Chooses the blocks that a GPU's store copies from the GPU to the memory of its node.

Demotion keeps a share of the GPU's slots free or clean: the block in a clean slot can be evicted without loss.
tier_catalog.py chooses the blocks for external tiers.
"""

import numpy as np
from numpy.typing import NDArray

from raykv.config import MIB
from raykv.directory.kernels import demotion
from raykv.directory.kernels.columns import Goal
from raykv.directory.state.allocator import Allocator, Node
from raykv.directory.state.arrays import RowArray
from raykv.directory.state.demotion_batch import Batch, blocks_per_call
from raykv.directory.state.size_classes import SizeClasses
from raykv.protocol.location import LOCATION, Locations
from raykv.protocol.tiers import GpuDemotions

SHARE = 0.25  # share of a GPU's slots to keep free or clean
BYTES_PER_CALL = 64 * MIB  # maximum bytes that one answer demotes from a GPU, for each slot size


class GpuDemotion:
    """Demotion from every GPU to the memory of its node. Only a report on the last answer to a GPU counts."""

    def __init__(self, size_classes: SizeClasses, allocator: Allocator) -> None:
        self._size_classes, self._allocator = size_classes, allocator
        self._under_way: dict[str, RowArray] = {}  # DEMOTING rows by the GPU's name; -1 where the slab was closed

    def next(self, node: Node, host: Node) -> GpuDemotions:
        """Choose blocks of a GPU, oldest first, and slots for them in its node's memory."""
        batch = Batch(self._size_classes)
        slots = self._allocator.slots(node)
        for stride, size_class in node.size_classes.items():
            short = int(demotion.shortfall(self._size_classes.c, Goal(size_class, slots[stride], SHARE)))
            want = min(short, blocks_per_call(stride, BYTES_PER_CALL, BYTES_PER_CALL))
            if node.spare or want <= 0 or (host_class := self._allocator.size_class(host, stride)) < 0:
                continue
            self._allocator.make_room(host, host_class, stride, want)
            source, target = np.empty((2, want), np.int64)
            n = demotion.demote_gpu(self._size_classes.c, size_class, host_class, want, source, target)
            batch.add(stride, source[:n], target[:n])
        self._under_way[node.name] = batch.target
        return GpuDemotions(*batch.fields())

    def demoted(self, name: str, locations: Locations, stored: NDArray[np.uint8]) -> int:
        """Finish the last answer. Blocks that the report names as stored are now demoted. Returns their number.

        A report on an earlier answer has no effect: that answer's rows are already quarantined, or hold other blocks.
        """
        c, (rows, gens) = self._size_classes.c, self._size_classes.rows_of(locations[stored > 0])
        done = rows[c.rows["gen"][rows] == gens]
        under_way = self._under_way.pop(name, np.zeros(0, np.int64))
        return int(demotion.gpu_demoted(c, under_way, np.isin(under_way, done)))

    def cancel(self, name: str) -> None:
        """Finish the last answer to a GPU that is gone: no block of this answer was stored."""
        self.demoted(name, np.zeros(0, LOCATION), np.zeros(0, np.uint8))

    def invalidate(self) -> None:
        """Forget the rows of closed slabs."""
        for rows in self._under_way.values():
            self._size_classes.invalidate(rows, rows)
