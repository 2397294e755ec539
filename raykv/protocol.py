"""What a client and the directory say to each other. Arrays travel as bytes: Ray copies those fastest.

These travel as plain tuples: to pickle a class takes Ray longer than all the rest of a call's arguments.
"""

import time
from typing import NamedTuple

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
FAILED, PULLED, ALTERED = range(3)  # verdicts: what became of a block that was to cross nodes


def host_of(name: str) -> str:
    """Ray node id of a node, or of a node's GPU, whose name is that with "/" and its UUID."""
    return name.partition("/")[0]


def slot_bytes(block_bytes: int) -> int:
    """Bytes of the slot that holds a block of `block_bytes`."""
    return -(-block_bytes // ALIGN) * ALIGN


def epoch_of(generation: int) -> int:
    """The directory epoch a generation was granted in."""
    return generation >> COUNTER_BITS


def seconds_left(end: float) -> float:
    """Until the time `end` (time.monotonic()); never 0, which some calls take for no deadline."""
    return max(0.001, end - time.monotonic())


def data_deadline(size: int) -> float:
    """Seconds that `size` bytes may take: a slow link's 100 MB/s, and 2 s for a busy machine."""
    return 2.0 + size / 100e6


class Call(NamedTuple):
    """What every call of a client carries.

    client: its random id. seq: rises with every call. held: ids (uint64) of the holds it still has; older ones that are
    not listed are let go. landed: PLACEs of staging slots that were pulled. bad: PLACEs of blocks it found altered.
    """

    client: int
    seq: int
    held: bytes = b""
    landed: bytes = b""
    bad: bytes = b""


class Matched(NamedTuple):
    """Answer to `match`: two PLACE arrays of one length; a staged place with slab_gen 0 is none.

    staged is empty if every block is on the reader's node.
    """

    epoch: int
    source: bytes
    staged: bytes


class Reserved(NamedTuple):
    """Answer to `reserve`: which keys were granted a slot (int32 indices), where, and through which staging slots.

    covered: leading keys that are stored, being written or granted now; the next one found no room.
    """

    epoch: int
    covered: int
    indices: bytes
    places: bytes
    staged: bytes


class Sunk(NamedTuple):
    """Answer to `sink`: PLACEs of blocks in a node's memory, their keys, PLACEs in its tier, and keys to delete there.

    number: of this answer; the next question says that it was seen, and carried out.
    `bytes` of a source is its slot's: its header says how long the block is. That of a target is 0.
    """

    source: bytes
    keys: bytes
    target: bytes
    doomed: bytes
    number: int


class Cooled(NamedTuple):
    """Answer to `cool`: PLACEs of blocks on a GPU, their keys, and PLACEs in its node's memory.

    `bytes` of a source is its slot's: its header says how long the block is. That of a target is 0.
    """

    source: bytes
    keys: bytes
    target: bytes


ANSWERS = {"match": Matched, "stream": Matched, "reserve": Reserved}  # by method of the directory
