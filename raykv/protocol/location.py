"""The location of a block, limits of the numbers in a location, and the address where a process listens."""

from numbers import Integral
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

LOCATION = np.dtype(
    [
        ("node", "<u4"),  # the directory's index of the node, never reused; odd: an external tier's (see is_tier)
        ("slab", "<u4"),  # slab of that node's arena
        ("slot", "<u4"),  # slot of that slab
        ("bytes", "<u4"),  # block_bytes; the slot has these bytes rounded up to ALIGN
        ("slab_gen", "<u8"),  # generation of the slab's format; 0: there is no such block
        ("gen", "<u8"),  # generation of the block, or of a writer's grant
    ]
)
Locations = NDArray[np.void]  # array of LOCATION
KEY_BYTES = 16
ALIGN = 4096  # alignment of a slot's payload in bytes, and so the size of the smallest slot
CONTENT_BYTES = 8  # bytes of the name of a tier's content. A cleared tier gets a new name, so nobody reads old blocks
COUNTER_BITS = 40  # a generation is epoch << COUNTER_BITS | counter
EPOCHS = 1 << 21  # every epoch is below this: a header keeps a generation and two more bits in 8 bytes
GENERATIONS = EPOCHS << COUNTER_BITS  # every generation is below this
SLABS_MAX = 1 << 20  # maximum slabs of an arena or tier. Without a limit, a wrong count could fill the memory
SLAB_BYTES_MAX = 1 << 30  # maximum size of a slab


@overload
def is_tier(index: int) -> bool: ...


@overload
def is_tier(index: NDArray[Any]) -> NDArray[np.bool_]: ...


def is_tier(index: int | NDArray[Any]) -> bool | NDArray[np.bool_]:
    """Whether an index in a location is an external tier's: a tier's index is odd, a node's index is even.

    index: an int, or an array of integers. For an array, the result is a bool array of the same shape.
    """
    return index & 1 == 1


def host_of(name: str) -> str:
    """Return the Ray node id in the name of a node or GPU. A GPU's name is the node id, "/" and the GPU's UUID."""
    return name.partition("/")[0]


def is_block_size(block_bytes: int) -> bool:
    """Whether a block can have this number of bytes."""
    return isinstance(block_bytes, Integral) and 0 < block_bytes <= SLAB_BYTES_MAX


def is_count(number: object) -> bool:
    """Whether this can be a number of blocks or tokens."""
    return isinstance(number, int) and 0 <= number < 1 << 31


def slot_bytes(block_bytes: int) -> int:
    """Return the bytes of the slot that holds a block of `block_bytes`."""
    return -(-block_bytes // ALIGN) * ALIGN


def epoch_of(generation: int) -> int:
    """Return the directory epoch in which a generation was granted."""
    return generation >> COUNTER_BITS


class Address(NamedTuple):
    """The address of a listener, and the token that it expects."""

    host: str
    port: int
    token: bytes

    def __repr__(self) -> str:  # for log lines and errors, which must not show the token
        return f"{self.host}:{self.port}"
