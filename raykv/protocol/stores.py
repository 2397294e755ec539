"""What node stores tell the directory of their memory."""

from typing import NamedTuple

STILL_WRITTEN, FREED, FINISHED = range(3)  # verdicts of a sweep


class ArenaDescription(NamedTuple):
    """An arena as it joins. Answer: Joined."""

    nonce: bytes  # 16 bytes, in its superblock
    slab_bytes: int
    slab_count: int  # slabs that it is to have
    epoch: int  # the newest directory epoch that it has heard of


class Joined(NamedTuple):
    """Answer to `join`."""

    node: int  # what locations call it
    epoch: int  # to stamp on the arena


class SlabReport(NamedTuple):
    """The slabs of a node's memory; with every `adopt` and `heartbeat`."""

    offered: int  # slabs that were allocated so far, with those that were given back since
    limit: int  # slabs that there are to be
    given_back: bytes  # int32: slabs whose memory was, or is about to be, given back


class SlabTarget(NamedTuple):
    """Answer to `set_slab_target`: slabs to give back."""

    generation: int  # grants in them are of older generations
    numbers: bytes  # int32


class Inventory(NamedTuple):
    """A piece of what a node store found in its arena, the youngest blocks first. The first four have one length."""

    locations: bytes  # of ready blocks
    keys: bytes
    positions: bytes  # uint32: of each block in its chain
    stamps: bytes  # uint32: of its last read, seconds
    writing: bytes  # locations of slots that somebody still writes; in the last piece
    left: int = 0  # older blocks, in the pieces that follow; the directory offers all once there are none
    node: int = -1  # index that `join` gave; a piece of another is too late, and left out. -1: of whatever it is now


class Heartbeat(NamedTuple):
    """Answer to `heartbeat` of a node that the directory knows."""

    epoch: int
    floor: int  # generation up to which all blocks were cleared
    sweep: bytes  # locations of quarantined slots: is their write lock free?


class SweepResult(NamedTuple):
    """What a store found in quarantined slots. All have one length."""

    locations: bytes
    verdicts: bytes  # uint8: STILL_WRITTEN, FREED, or FINISHED as `keys` and `generations` say
    keys: bytes
    generations: bytes  # uint64


class SoleCopies(NamedTuple):
    """Blocks that would be lost with a node, youngest first; at most SOLE_COPIES_PER_CALL of each size."""

    locations: bytes  # `bytes` is the slot's size
    keys: bytes
    total: int  # of all of them, with those that are being written
