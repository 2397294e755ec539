"""Messages of node stores to the directory about their memory."""

from typing import NamedTuple

STILL_WRITTEN, FREED, FINISHED = range(3)  # verdicts of a sweep


class ArenaDescription(NamedTuple):
    """An arena that joins. Answer: Joined."""

    nonce: bytes  # 16 bytes, as in the arena's superblock
    slab_bytes: int
    slab_count: int  # target number of slabs of the arena
    epoch: int  # the newest directory epoch that the arena has recorded


class Joined(NamedTuple):
    """Answer to `join`."""

    node: int  # index of the arena in locations
    epoch: int  # the directory's epoch, which the store writes into its arena


class SlabReport(NamedTuple):
    """The slabs of a node's memory. Sent with every `adopt` and `heartbeat`."""

    offered: int  # number of slabs allocated so far, including slabs given back since
    limit: int  # target number of slabs of the node
    given_back: bytes  # int32: slabs whose memory was given back, or is about to be


class SlabTarget(NamedTuple):
    """The answer to `set_slab_target`: slabs to give back."""

    generation: int  # all slots in these slabs were granted at older generations
    numbers: bytes  # int32: numbers of the slabs


class Inventory(NamedTuple):
    """A piece of the list of an arena's blocks, the youngest blocks first. The first four fields have equal lengths."""

    locations: bytes  # locations of ready blocks
    keys: bytes
    positions: bytes  # uint32: position of each block in its chain
    stamps: bytes  # uint32: time of each block's last read, in seconds
    writing: bytes  # locations of slots that somebody is still writing; only the last piece has such locations
    left: int = 0  # number of older blocks in later pieces; at 0 the directory offers the blocks
    node: int = -1  # index that `join` gave: the directory ignores a piece with an outdated index. -1: fits any index


class Heartbeat(NamedTuple):
    """The answer to `heartbeat` of a node that the directory knows."""

    epoch: int
    floor: int  # all blocks up to this generation were cleared
    sweep: bytes  # locations of quarantined slots. The store tries their write locks: a lost writer may still hold them


class SweepResult(NamedTuple):
    """The state that a store found in quarantined slots (see Heartbeat). All arrays have equal lengths."""

    locations: bytes
    verdicts: bytes  # uint8: STILL_WRITTEN, FREED, or FINISHED with the block in `keys` and `generations`
    keys: bytes
    generations: bytes  # uint64


class SoleCopies(NamedTuple):
    """Blocks that would be lost with a node, youngest first; at most SOLE_COPIES_PER_CALL of each size."""

    locations: bytes  # their field `bytes` is the slot's size
    keys: bytes
    total: int  # number of all sole copies, including blocks that are being written
