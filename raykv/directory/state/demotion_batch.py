"""The blocks that one answer demotes, from memory to a tier or from a GPU to memory, and how many it may demote."""

import numpy as np

from raykv.config import KEYS_PER_CALL
from raykv.directory.state.arrays import RowArray
from raykv.directory.state.size_classes import SizeClasses


def blocks_per_call(stride: int, left: int, budget: int) -> int:
    """Return how many blocks of `stride` bytes an answer may still demote. left: unused bytes of the answer's `budget`.

    If the whole budget is unused, the answer may demote one block of any size.
    """
    return min(max(left // stride, int(left == budget)), KEYS_PER_CALL)


class Batch:
    """The blocks of one answer: the source, key and target of each block."""

    def __init__(self, size_classes: SizeClasses) -> None:
        self._size_classes = size_classes
        self._source: list[bytes] = []
        self._target = [np.zeros(0, np.int64)]

    def add(self, stride: int, source: RowArray, target: RowArray) -> None:
        """Add blocks in slots of `stride` bytes."""
        self._source.append(self._size_classes.describe(source, stride).tobytes())
        self._target.append(target)

    @property
    def target(self) -> RowArray:
        return np.concatenate(self._target)

    def fields(self) -> tuple[bytes, bytes, bytes]:
        """Return the fields (source, keys, target) of a message."""
        rows = self.target
        target = self._size_classes.describe(rows, 0).tobytes()
        return b"".join(self._source), self._size_classes.keys_of(rows), target
