"""Calls of writers: they reserve slots, and commit the blocks that they wrote."""

import numpy as np

from raykv.directory.calls.clients import on_call
from raykv.directory.kernels import columns, placement, table
from raykv.directory.state.allocator import Node
from raykv.directory.state.arrays import RowArray, key_array
from raykv.directory.state.holds import Hold
from raykv.directory.state.state import State
from raykv.protocol.clients import NOT_WRITTEN, UNTOUCHED, Call, CommitRequest, Counted, Reserved, ReserveRequest
from raykv.protocol.location import LOCATION, is_block_size, slot_bytes


def reserve(state: State, call: Call, request: ReserveRequest, now: float) -> Reserved:
    """Grant slots for the missing keys of keys[start:]. Marks their parents, keys[:start], as used."""
    client, start = on_call(state, call, now), request.start
    state.clients.end(client, request.reservation)
    writer, keys = state.nodes.get(request.node), key_array(request.keys)
    stride = slot_bytes(request.block_bytes) if is_block_size(request.block_bytes) else 0
    size_class = state.allocator.size_class(writer, stride) if writer and writer.offered_to >= columns.TO_OWN else -1
    if not 0 <= start <= len(keys):
        return Reserved(state.epoch, start, b"", b"", b"")
    if writer is None or size_class < 0:
        return _refused(state, request)
    firsts, *rows = np.empty((5, len(keys)), np.int64)
    blocks, places = columns.Blocks(*rows), columns.Places(*np.empty((2, len(keys)), LOCATION))
    granted = np.empty(len(keys), np.int32)
    tenant, outs = state.quotas.number(request.tenant), (tuple(blocks), granted, tuple(places))

    def ask(found: bool) -> tuple[int, int]:
        others, heaps = _classes_in_turn(state, writer, stride), state.size_classes.heaps[stride]
        block_bytes, locality = int(request.block_bytes), state.plan.locality(state.locality)
        asks = int(start), size_class, others, heaps, locality, stride, block_bytes, tenant  # a Writer
        answer: tuple[int, int] = placement.reserve(state.c, keys, firsts, asks, *outs, found)
        return answer

    covered, grants = ask(found=False)
    if covered < 0:
        if state.allocator.provision(writer, size_class, stride, -covered, tenant):
            table.find(state.c, keys, firsts)  # again: a slab that was taken may have held some of the blocks
        covered, grants = ask(found=True)
    client.holds[request.reservation] = Hold(
        call.seq,
        writer.index,
        size_class,
        keys,
        blocks,
        writes=True,
        group=request.reservation,
        since=now,
        used=now,
    )
    if not grants and covered < len(keys):  # after some grants the client asks for the rest in another call
        state.counters["refused"] += len(keys) - covered
    state.hit_curve.stored(keys[start:], request.block_bytes)
    return Reserved(
        state.epoch,
        covered,
        granted[:grants].tobytes(),
        places.locations[:grants].tobytes(),
        places.staged_locations[:grants].tobytes(),
    )


def _classes_in_turn(state: State, writer: Node, stride: int) -> RowArray:
    """Return all nodes' size classes in the order to try them. For a writer on a GPU, its node's memory comes first."""
    classes = state.size_classes.classes[stride]
    if not writer.on_gpu:
        return classes
    host = state.nodes.get(writer.host, writer).size_classes.get(stride, -1)
    return classes[np.argsort(classes != host, kind="stable")]


def _refused(state: State, request: ReserveRequest) -> Reserved:
    """Return the answer to a writer on a node that takes no blocks, for example because the node is leaving."""
    firsts = state.find(request.keys)
    missing = request.start + np.flatnonzero(firsts[request.start :] < 0)
    covered = int(missing[0]) if len(missing) else len(firsts)
    state.counters["refused"] += len(firsts) - covered
    return Reserved(state.epoch, covered, b"", b"", b"")


def commit(state: State, call: Call, request: CommitRequest, now: float) -> Counted:
    """Offer the blocks that were written, and end the reservation.

    Idempotent: location, key and generation identify each block, even after the reservation is gone.
    """
    client = on_call(state, call, now)
    locations, keys = np.frombuffer(request.locations, LOCATION), key_array(request.keys)
    written = np.frombuffer(request.written, np.uint8)
    if not len(locations) == len(keys) == len(written):
        return Counted(state.epoch)
    hold = client.holds.get(request.reservation)
    if NOT_WRITTEN in request.written:  # only a slot's own reservation may give the slot back
        rows, _ = state.size_classes.rows_of(locations)
        theirs = (written == NOT_WRITTEN) & ~np.isin(rows, hold.blocks.source if hold else [])
        written = np.where(theirs, np.uint8(UNTOUCHED), written)
    accepted = placement.commit(state.c, locations, keys, written)
    if hold:
        state.clients.end(client, request.reservation)
        state.counters["stored"] += accepted
    return Counted(state.epoch, accepted)
