"""Messages to node stores, from clients and other stores: map an arena, fetch blocks."""

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.protocol.location import KEY_BYTES, LOCATION, SLAB_BYTES_MAX, Locations

FAILED, PULLED, ALTERED = range(3)  # verdicts on the transfer of a block


def seconds_left(end: float) -> float:
    """Return the seconds until `end` (time.monotonic()), at least 0.001, as some calls read 0 as "no deadline"."""
    return max(0.001, end - time.monotonic())


def data_deadline(size: int) -> float:
    """Return the seconds that a transfer of `size` bytes may take: 2 s, for a busy machine, plus 1 s per 100 MB."""
    return 2.0 + size / 100e6


class StoreDescription(NamedTuple):
    """An arena that a client maps: the arena of a node, or of one of its GPUs."""

    name: str  # the directory's name of the memory
    path: str
    nonce: bytes
    node: int  # index of the memory in locations
    handle: bytes  # CUDA IPC handle; empty for host memory


class Transfer(NamedTuple):
    """Blocks to fetch into granted slots.

    Arrays have equal lengths. Answer: uint8 verdicts FAILED, PULLED or ALTERED.
    """

    source: bytes  # locations
    keys: bytes
    target: bytes  # locations

    def arrays(self) -> tuple[Locations, NDArray[np.uint8], Locations]:
        """Return source (n,) LOCATION, keys (n, 16) and target (n,) LOCATION.

        ValueError for arrays of different lengths, or blocks of different sizes.
        """
        source, target = np.frombuffer(self.source, LOCATION), np.frombuffer(self.target, LOCATION)
        keys = np.frombuffer(self.keys, np.uint8).reshape(-1, KEY_BYTES)
        if not len(source) == len(keys) == len(target):
            raise ValueError(f"{len(source)} sources, {len(keys)} keys and {len(target)} targets: give one of each")
        sizes = np.unique([source["bytes"], target["bytes"]]).tolist()
        if len(source) and (len(sizes) > 1 or not 0 < sizes[0] <= SLAB_BYTES_MAX):
            raise ValueError(f"blocks of {', '.join(map(str, sizes))} bytes: give all of one size that a slab holds")
        return source, keys, target


def verdicts_of(answer: bytes, count: int) -> NDArray[np.uint8]:
    """Return (count,) uint8 verdicts from another process. Unknown verdicts become FAILED.

    ValueError if the number of verdicts is not `count`.
    """
    verdicts = np.frombuffer(answer, np.uint8)
    if len(verdicts) != count:
        raise ValueError(f"{len(verdicts)} verdicts for {count} blocks")
    return np.where(verdicts <= ALTERED, verdicts, FAILED).astype(np.uint8)


class BlocksRead(NamedTuple):
    """Blocks that a store read for another store. `mask`, `checksums` and `positions` have equal lengths."""

    mask: bytes  # uint8: whether each block is there
    checksums: bytes  # uint64, xxh3_64
    positions: bytes  # uint32: positions in the chain
    runs: list[NDArray[np.uint8]]  # bytes of the blocks that are there, one after the other; not verified yet
