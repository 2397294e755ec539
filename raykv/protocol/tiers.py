"""Messages about tiers: a node store reports, and the directory names blocks to demote."""

from typing import NamedTuple


class TierReport(NamedTuple):
    """The state of a node's external tier. Answer: TierReply, or None if the node must `join` first."""

    capacity: int  # bytes
    shared: bool  # whether all nodes see the same blocks there
    reached: bool  # whether the node reaches the tier now
    lost: bytes  # after a loss of the content, the name of the new content; stores of a shared tier send the same name


class TierReply(NamedTuple):
    """Answer to `tier_heartbeat`."""

    tier: int  # index of the tier in locations
    list_it: bool  # whether the store must list the tier's blocks by `report_existing`


class ExistingBlocks(NamedTuple):
    """Blocks that were in a tier before the directory knew the tier, oldest first."""

    keys: bytes
    sizes: bytes  # int64: block_bytes of each block
    last: bool  # whether there are no more blocks


class DemotionReport(NamedTuple):
    """The outcome of earlier Demotions, and a request for more. Answer: Demotions."""

    locations: bytes  # targets; locations, keys and stored have equal lengths
    keys: bytes
    stored: bytes  # uint8: 1 if the block is in the tier now
    seen: int  # `number` of the last answer whose deletions the store carried out
    whole: bool  # whether to demote everything


class Demotions(NamedTuple):
    """Blocks of a node's memory to copy to its external tier. `source`, `keys` and `target` have equal lengths."""

    source: bytes  # locations in memory; their field `bytes` is the slot's size. The slot's header has block_bytes
    keys: bytes
    target: bytes  # locations in the tier; their field `bytes` is 0
    to_delete: bytes  # keys to delete in the tier
    number: int  # number of this answer; 0: the directory does not serve the tier yet


class GpuDemotionReport(NamedTuple):
    """The outcome of earlier GpuDemotions. `locations` and `stored` have equal lengths. Answer: GpuDemotions."""

    locations: bytes  # targets
    stored: bytes  # uint8: 1 if the block is in the node's memory now


class GpuDemotions(NamedTuple):
    """Blocks of a GPU to copy to its node's memory. All arrays have equal lengths."""

    source: bytes  # locations on the GPU; their field `bytes` is the slot's size. The slot's header has block_bytes
    keys: bytes
    target: bytes  # locations in the node's memory; their field `bytes` is 0
