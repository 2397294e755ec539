"""What clients and stores ask of stores: to map an arena, and to fetch blocks."""

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.protocol.location import KEY_BYTES, LOCATION, SLAB_BYTES_MAX

FAILED, PULLED, ALTERED = range(3)  # verdicts: what became of a block that was to cross nodes


def seconds_left(end: float) -> float:
    """Seconds until the time `end` (time.monotonic()); never 0, which some calls take for no deadline."""
    return max(0.001, end - time.monotonic())


def data_deadline(size: int) -> float:
    """Seconds that a transfer of `size` bytes may take: 100 MB/s of a slow link, and 2 s for a busy machine."""
    return 2.0 + size / 100e6


class StoreDescription(NamedTuple):
    """What a client maps: the arena of a node, or of one of its GPUs."""

    name: str  # what the directory calls the memory
    path: str
    nonce: bytes
    node: int  # what locations call it
    handle: bytes  # CUDA IPC handle; empty for host memory


class Transfer(NamedTuple):
    """Blocks to fetch into granted slots. All have one length. Answer: uint8 verdicts FAILED, PULLED or ALTERED."""

    source: bytes  # locations
    keys: bytes
    target: bytes  # locations

    def arrays(self) -> tuple[NDArray[np.void], NDArray[np.uint8], NDArray[np.void]]:
        """source (n,) LOCATION, keys (n, 16) and target (n,) LOCATION. ValueError unless all blocks are of one size."""
        source, target = np.frombuffer(self.source, LOCATION), np.frombuffer(self.target, LOCATION)
        keys = np.frombuffer(self.keys, np.uint8).reshape(-1, KEY_BYTES)
        if not len(source) == len(keys) == len(target):
            raise ValueError(f"{len(source)} sources, {len(keys)} keys and {len(target)} targets: give one of each")
        sizes = np.unique([source["bytes"], target["bytes"]]).tolist()
        if len(source) and (len(sizes) > 1 or not 0 < sizes[0] <= SLAB_BYTES_MAX):
            raise ValueError(f"blocks of {', '.join(map(str, sizes))} bytes: give all of one size that a slab holds")
        return source, keys, target


def verdicts_of(answer: bytes, count: int) -> NDArray[np.uint8]:
    """(count,) uint8 verdicts that another process gave. What is none of FAILED, PULLED and ALTERED is FAILED.

    ValueError unless there are as many.
    """
    verdicts = np.frombuffer(answer, np.uint8)
    if len(verdicts) != count:
        raise ValueError(f"{len(verdicts)} verdicts for {count} blocks")
    return np.where(verdicts <= ALTERED, verdicts, FAILED).astype(np.uint8)


class BlocksRead(NamedTuple):
    """Blocks as a store reads them for another. `mask`, `checksums` and `positions` have one length."""

    mask: bytes  # uint8: whether the block is there
    checksums: bytes  # uint64, xxh3_64
    positions: bytes  # uint32, in the chain
    runs: list[NDArray[np.uint8]]  # bytes of the masked, one after the other; unchecked
