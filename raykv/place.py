"""Where one block lies, as it crosses the wire and as the arena addresses it."""

import numpy as np

PLACE = np.dtype(
    [
        ("node", "<u4"),  # the directory's index of the node, never reused
        ("slab", "<u4"),  # slab of that node's arena
        ("slot", "<u4"),  # slot of that slab
        ("bytes", "<u4"),  # block_bytes; a slot is that, rounded up to ALIGN
        ("slab_gen", "<u8"),  # generation of the slab's format
        ("gen", "<u8"),  # generation of the block, or of a writer's grant
    ]
)
KEY_BYTES = 16
ALIGN = 4096  # payload alignment, and so the smallest slot, in bytes
COUNTER_BITS = 40  # a generation is epoch << COUNTER_BITS | counter


def host_of(name: str) -> str:
    """Ray node id of a node, or of a node's GPU, whose name is that with "/" and its UUID."""
    return name.partition("/")[0]


def slot_bytes(block_bytes: int) -> int:
    """Bytes of the slot that holds a block of `block_bytes`."""
    return -(-block_bytes // ALIGN) * ALIGN


def epoch_of(generation: int) -> int:
    """The directory epoch a generation was granted in."""
    return generation >> COUNTER_BITS
