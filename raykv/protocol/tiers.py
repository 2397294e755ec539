"""What node stores tell the directory of tiers, and what it has them demote."""

from typing import NamedTuple


class TierReport(NamedTuple):
    """The state of a node's external tier. Answer: TierReply, or None where the node must `join` first."""

    capacity: int  # bytes
    shared: bool  # all nodes see one content
    reached: bool
    lost: bytes  # where its content is gone: the name of what is there now, equal from every store of a shared tier


class TierReply(NamedTuple):
    """Answer to `tier_heartbeat`."""

    tier: int  # what locations call it
    list_it: bool  # the store must list what lies there, by `report_existing`


class ExistingBlocks(NamedTuple):
    """What lies in a tier from before, oldest first."""

    keys: bytes
    sizes: bytes  # int64: block_bytes
    last: bool  # there is no more


class DemotionReport(NamedTuple):
    """What became of earlier Demotions, and what is asked for next. Answer: Demotions."""

    locations: bytes  # targets; of one length with keys and stored
    keys: bytes
    stored: bytes  # uint8: 1 where the block lies in the tier now
    seen: int  # `number` of the last answer whose deletions were carried out
    whole: bool  # demote everything


class Demotions(NamedTuple):
    """Blocks of a node's memory to copy to its external tier. The first three have one length."""

    source: bytes  # locations in memory; `bytes` is the slot's size, the header has the block's
    keys: bytes
    target: bytes  # locations in the tier; `bytes` is 0
    to_delete: bytes  # keys to delete in the tier
    number: int  # of this answer; 0: the directory does not serve the tier yet


class GpuDemotionReport(NamedTuple):
    """What became of earlier GpuDemotions. Both have one length. Answer: GpuDemotions."""

    locations: bytes  # targets
    stored: bytes  # uint8


class GpuDemotions(NamedTuple):
    """Blocks of a GPU to copy to its node's memory. All have one length."""

    source: bytes  # locations on the GPU; `bytes` is the slot's size, the header has the block's
    keys: bytes
    target: bytes  # locations in the node's memory; `bytes` is 0
