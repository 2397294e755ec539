"""What clients say of themselves and of blocks by their keys; and what every call of theirs tells besides."""

import math

import numpy as np

from raykv.directory.calls.upkeep import check, forget_keys, forget_swapped
from raykv.directory.kernels import (
    leases,
    slabs,
)
from raykv.directory.state.arrays import LocationArray, split_keys
from raykv.directory.state.holds import Client
from raykv.directory.state.state import State
from raykv.protocol.clients import (
    Call,
    Counted,
)
from raykv.protocol.location import (
    LOCATION,
)

PINNED_SHARE = 0.5  # of all memory, at most, in pins that are never given up: the rest is for others
NO_LOCATIONS = np.zeros(0, LOCATION)


def on_call(state: State, call: Call, now: float) -> Client:
    """What each call tells besides its request: blocks that were pulled, holds that are over, corrupt blocks."""
    check(state, now)
    pulled, corrupt = _locations(call.pulled), _locations(call.corrupt)
    client = state.clients.seen(call.client, now)
    if len(pulled):
        promoted = np.zeros(len(state.c.size_classes), np.int64)
        leases.pulled(state.c, *state.size_classes.rows_of(pulled), promoted)
        state.allocator.restore_windows(promoted)
        if promoted.any():  # the primaries before them are replicas now
            state.pins.repair()
    state.clients.end_unlisted(client, call)
    state.intents.end_unlisted(call)
    if state.allocator.lacking:
        state.allocator.restore_lacking()
    if len(corrupt):
        rows, gens = state.size_classes.rows_of(corrupt)
        state.tier_catalog.schedule_delete(rows, gens)
        state.counters["corrupt"] += int(slabs.drop(state.c, rows, gens))
        state.pins.repair()
    return client


def disconnect(state: State, client: int, now: float) -> None:
    """A client leaves in order: it writes nothing any more."""
    check(state, now)
    state.intents.end_all(client)
    if gone := state.clients.disconnect(client):
        forget_swapped(state, gone)


def client_heartbeat(state: State, call: Call, now: float) -> Counted:
    """A client that has nothing to ask is still there."""
    on_call(state, call, now)
    return Counted(state.epoch)


def pin(
    state: State, call: Call, keys: bytes, now: float, ttl: float | None = None, priority: int | None = None
) -> Counted:
    """Have blocks stay until `unpin`, or for `ttl` seconds from now. Counts the keys that are pinned now.

    priority: those with the lowest are given up first where a writer on their node would be refused; None: never.
    Of the latter, in memory, no more are pinned than PINNED_SHARE of it holds.
    """
    on_call(state, call, now)
    if not isinstance(priority, int | None):
        raise ValueError(f"a priority {priority!r}: give an int, or None")
    if ttl is not None and not ttl > 0:
        raise ValueError(f"a pin of {ttl!r} seconds: give more than 0, or None for one without an end")
    limit = int(state.allocator.memory_bytes() * PINNED_SHARE) if priority is None else None
    end = math.inf if ttl is None else now + ttl
    return Counted(state.epoch, state.pins.pin(split_keys(keys), end, priority, limit))


def unpin(state: State, call: Call, keys: bytes, now: float) -> Counted:
    """End pins. Counts the keys that were pinned."""
    on_call(state, call, now)
    return Counted(state.epoch, state.pins.unpin(split_keys(keys)))


def forget(state: State, call: Call, keys: bytes, now: float) -> Counted:
    """Drop blocks that nobody will ask for again. Who holds one keeps its slot until then. Counts copies."""
    client = on_call(state, call, now)
    for key in split_keys(keys):
        client.swapped.pop(key, None)
    return Counted(state.epoch, forget_keys(state, keys))


def preempted(state: State, call: Call, keys: bytes, now: float) -> Counted:
    """An engine swapped a request out: its blocks stay while the client is there, or until they are forgotten.

    Counts the keys: all of them, or none, where some are not stored, so that the others were forgotten.
    """
    client, names = on_call(state, call, now), split_keys(keys)
    state.counters["num_cumulative_preemption"] += 1
    if state.pins.pin(names) < len(names):
        forget_keys(state, keys)
        return Counted(state.epoch)
    client.swapped.update(dict.fromkeys(names))
    return Counted(state.epoch, len(names))


def _locations(data: bytes) -> LocationArray:
    return np.frombuffer(data, LOCATION) if data else NO_LOCATIONS
