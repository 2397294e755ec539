"""Calls of node stores about demotion and external tiers."""

import numpy as np

from raykv.directory.calls.upkeep import check
from raykv.directory.kernels import columns, demotion
from raykv.directory.state.allocator import Node
from raykv.directory.state.arrays import key_array, split_keys
from raykv.directory.state.state import State
from raykv.directory.state.tier_catalog import NOTHING
from raykv.protocol.location import LOCATION, host_of
from raykv.protocol.tiers import (
    DemotionReport,
    Demotions,
    ExistingBlocks,
    GpuDemotionReport,
    GpuDemotions,
    TierReply,
    TierReport,
)

NO_GPU_DEMOTIONS = GpuDemotions(b"", b"", b"")


def tier_heartbeat(state: State, name: str, report: TierReport, now: float) -> TierReply | None:
    """Process a node store's report on its external tier. Returns None if the node must `join` first."""
    check(state, now)
    node = state.nodes.get(name)
    if node is None:
        return None
    if report.lost:
        state.tier_catalog.lose_content(name, report.lost)
        state.invalidate()
    reply = state.tier_catalog.heartbeat(name, report, lambda: state.new_index(tier=True))
    state.tier_catalog.set_suspect(name, node.state == "suspect")
    return reply


def report_existing(state: State, name: str, existing: ExistingBlocks, now: float) -> None:
    """Process a node store's list of blocks that were already in its tier."""
    check(state, now)
    keys, sizes = key_array(existing.keys), np.frombuffer(existing.sizes, np.int64)
    if len(keys) == len(sizes):
        state.tier_catalog.report_existing(name, keys, sizes, existing.last)


def demote(state: State, name: str, report: DemotionReport, now: float) -> Demotions:
    """Choose the blocks that a node copies to its external tier next. Accepts reports that arrive late or twice."""
    check(state, now)
    locations, keys = np.frombuffer(report.locations, LOCATION), key_array(report.keys)
    stored = np.frombuffer(report.stored, np.uint8)
    node = state.nodes.get(name)
    if node is None or node.state == "joining" or not len(locations) == len(keys) == len(stored):
        return NOTHING
    if state.tier_catalog.demoted(name, locations, keys, stored, report.seen):
        state.tier_catalog.refresh(node.size_classes.values())
    state.pins.renew([key for key, done in zip(split_keys(report.keys), stored, strict=True) if done])
    share, slots = state.tier_catalog.share, state.allocator.slots(node)
    examined, pinned = demotion.ROWS_EXAMINED, state.pins.rows()
    if report.whole and share > 0.0:
        held = state.allocator.held_primaries(node, state.tier_catalog.min_uses)
        share, examined, pinned = 1.0, sum(slots.values()), np.concatenate([pinned, held])
    elif node.spare and share < 1.0:  # new blocks use the spare slab, so no block is evicted
        share = 0.0
    shares = {stride: _share(state, node, stride, count, share) for stride, count in slots.items()}
    return state.tier_catalog.demote(name, node.size_classes, slots, shares, examined, pinned)


def _share(state: State, node: Node, stride: int, slots: int, share: float) -> float:
    """Return the share of a size's slots to keep free or clean: at least one slab if the node has several sizes."""
    if not 0.0 < share < 1.0 or not slots or len(node.size_classes) == 1:
        return share
    return max(share, min(1.0, (node.slab_bytes // stride) / slots))


def demote_gpu(state: State, name: str, report: GpuDemotionReport, now: float) -> GpuDemotions:
    """Choose the blocks that a GPU's store copies to its node's memory next."""
    check(state, now)
    locations, stored = np.frombuffer(report.locations, LOCATION), np.frombuffer(report.stored, np.uint8)
    node, host = state.nodes.get(name), state.nodes.get(host_of(name))
    if node is None or host is None or node is host or len(locations) != len(stored):
        return NO_GPU_DEMOTIONS
    state.counters["gpu_demoted"] += state.gpu_demotion.demoted(name, locations, stored)
    state.pins.repair()
    if node.offered_to != columns.TO_OWN or host.offered_to != columns.TO_ALL:
        return NO_GPU_DEMOTIONS
    return state.gpu_demotion.next(node, host)
