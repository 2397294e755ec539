"""What a client and the directory say to each other. Arrays travel as bytes: Ray copies those fastest.

These travel as plain tuples: to pickle a class takes Ray longer than all the rest of a call's arguments.
"""

from typing import NamedTuple


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
