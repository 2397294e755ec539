"""Where a block is, how large the numbers in it get, and where a process listens."""

from numbers import Integral
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

LOCATION = np.dtype(
    [
        ("node", "<u4"),  # the directory's index of the node, never reused; odd: of an external tier (see is_tier)
        ("slab", "<u4"),  # slab of that node's arena
        ("slot", "<u4"),  # slot of that slab
        ("bytes", "<u4"),  # block_bytes; a slot is that, rounded up to ALIGN
        ("slab_gen", "<u8"),  # generation of the slab's format; 0: there is no such block
        ("gen", "<u8"),  # generation of the block, or of a writer's grant
    ]
)
KEY_BYTES = 16
ALIGN = 4096  # payload alignment, and so the smallest slot, in bytes
CONTENT_BYTES = 8  # name of a tier's content since it was last cleared; nothing from before is read again
COUNTER_BITS = 40  # a generation is epoch << COUNTER_BITS | counter
EPOCHS = 1 << 21  # no epoch is as high: a header keeps a generation and two bits more in 8 bytes
GENERATIONS = EPOCHS << COUNTER_BITS  # no generation is as high
SLABS_MAX = 1 << 20  # of one arena or tier: what is counted by somebody else is not to fill a memory
SLAB_BYTES_MAX = 1 << 30  # of an arena


@overload
def is_tier(index: int) -> bool: ...


@overload
def is_tier(index: NDArray[Any]) -> NDArray[np.bool_]: ...


def is_tier(index: int | NDArray[Any]) -> bool | NDArray[np.bool_]:
    """Whether a node's index in a location is an external tier's: those are odd, nodes' are even.

    index: an int, or a numpy array of them (then the answer is a bool array).
    """
    return index & 1 == 1


def host_of(name: str) -> str:
    """Ray node id of a node, or of a node's GPU, whose name is that with "/" and its UUID."""
    return name.partition("/")[0]


def is_block_size(block_bytes: int) -> bool:
    """Whether a block can have so many bytes."""
    return isinstance(block_bytes, Integral) and 0 < block_bytes <= SLAB_BYTES_MAX


def is_count(number: object) -> bool:
    """Whether this can be a number of blocks or tokens."""
    return isinstance(number, int) and 0 <= number < 1 << 31


def slot_bytes(block_bytes: int) -> int:
    """Bytes of the slot that holds a block of `block_bytes`."""
    return -(-block_bytes // ALIGN) * ALIGN


def epoch_of(generation: int) -> int:
    """The directory epoch a generation was granted in."""
    return generation >> COUNTER_BITS


class Address(NamedTuple):
    """Where a listener is, and the token that it wants to see."""

    host: str
    port: int
    token: bytes

    def __repr__(self) -> str:  # messages have it, and the token is nobody's to read
        return f"{self.host}:{self.port}"
