"""Calls of clients about themselves and about keys. `on_call` processes the fields that every client call carries."""

import math

import numpy as np

from raykv.config import KEEP_MOST_S
from raykv.directory.calls.upkeep import check, forget_keys, forget_swapped
from raykv.directory.kernels import eviction, leases, slabs
from raykv.directory.state.arrays import split_keys
from raykv.directory.state.holds import Client
from raykv.directory.state.state import State
from raykv.protocol.clients import Call, Counted
from raykv.protocol.location import LOCATION

PINNED_SHARE = 0.5  # maximum share of all memory that may be pinned
NO_LOCATIONS = np.zeros(0, LOCATION)


def on_call(state: State, call: Call, now: float) -> Client:
    """Process the fields that every call carries: pulled blocks, corrupt blocks, and the client's present holds."""
    check(state, now)
    pulled = np.frombuffer(call.pulled, LOCATION) if call.pulled else NO_LOCATIONS
    corrupt = np.frombuffer(call.corrupt, LOCATION) if call.corrupt else NO_LOCATIONS
    client = state.clients.seen(call.client, now)
    if len(pulled):
        promoted = np.zeros(len(state.c.size_classes), np.int64)
        leases.pulled(state.c, *state.size_classes.rows_of(pulled), promoted)
        state.allocator.restore_windows(promoted)
        if promoted.any():  # the former primaries have become replicas
            state.pins.repair()
    state.clients.end_unlisted(client, call)
    state.intents.end_unlisted(call)
    if state.allocator.lacking:
        state.allocator.restore_lacking()
    if len(corrupt):
        rows, gens = state.size_classes.rows_of(corrupt)
        state.tier_catalog.schedule_delete(rows, gens)
        state.counters["corrupt"] += int(slabs.drop(state.c, rows, gens, False))
        state.pins.repair()
    return client


def disconnect(state: State, client: int, now: float) -> None:
    """Remove a client that disconnects. The client no longer writes to any slot."""
    check(state, now)
    state.intents.end_all(client)
    if gone := state.clients.disconnect(client):
        forget_swapped(state, gone)


def client_heartbeat(state: State, call: Call, now: float) -> Counted:
    """Note that a client without requests is alive."""
    on_call(state, call, now)
    return Counted(state.epoch)


def pin(state: State, call: Call, keys: bytes, now: float) -> Counted:
    """Pin stored blocks until `unpin`. Returns how many of the keys are pinned now.

    Pins hold at most PINNED_SHARE of the nodes' memory.
    """
    on_call(state, call, now)
    memory = sum(node.limit * node.slab_bytes for node in state.nodes.values() if not node.on_gpu)
    limit = int(memory * PINNED_SHARE)
    return Counted(state.epoch, state.pins.pin(split_keys(keys), limit))


def unpin(state: State, call: Call, keys: bytes, now: float) -> Counted:
    """End pins. Returns how many of the keys were pinned."""
    on_call(state, call, now)
    return Counted(state.epoch, state.pins.unpin(split_keys(keys)))


def touch(state: State, call: Call, keys: bytes, seconds: float, tenant: str, now: float) -> Counted:
    """Mark blocks as used, and keep them for `seconds`: evictions pass over kept blocks. Ignores other tenants' keys.

    With 0 seconds, the blocks are evicted by age again. Returns how many are stored. ValueError for a bad argument.
    """
    on_call(state, call, now)
    if not seconds >= 0 or not isinstance(tenant, str):
        raise ValueError(f"seconds={seconds!r:.80}, tenant={tenant!r:.80}: give a number from 0 on, and a name")
    until = math.ceil(now + min(seconds, KEEP_MOST_S)) if seconds else 0
    count = int(eviction.keep(state.c, state.find(keys), state.quotas.number(tenant), until))
    state.counters["kept"] += count if seconds else 0
    return Counted(state.epoch, count)


def done(state: State, call: Call, keys: bytes, now: float, again: bool = False, tenant: str = "") -> Counted:
    """Make blocks older than all blocks in use. Returns how many copies became older.

    again: whether the user will ask for the blocks again later. Copies do not change if somebody holds them, if they
    belong to another tenant, or if they are on a GPU or on a joining or suspect node. ValueError for a bad `again` or
    tenant.
    """
    on_call(state, call, now)
    if not isinstance(again, bool) or not isinstance(tenant, str):
        raise ValueError(f"again={again!r}, tenant={tenant!r}: give True or False, and a name")
    count = int(eviction.done(state.c, state.find(keys), state.quotas.number(tenant), again))
    if count:
        state.size_classes.reset_heaps()
    state.counters["done"] += count
    return Counted(state.epoch, count)


def forget(state: State, call: Call, keys: bytes, now: float) -> Counted:
    """Drop blocks that nobody will ask for again. Returns the number of dropped copies.

    A held block keeps its slot until the hold ends.
    """
    client = on_call(state, call, now)
    for key in split_keys(keys):
        client.swapped.pop(key, None)
    return Counted(state.epoch, forget_keys(state, keys))


def preempted(state: State, call: Call, keys: bytes, now: float) -> Counted:
    """Pin the blocks of a swapped-out request, until somebody forgets the blocks or the client is gone.

    Returns the number of keys. If any key is not stored, forgets all these keys and returns 0.
    """
    client, names = on_call(state, call, now), split_keys(keys)
    state.counters["num_cumulative_preemption"] += 1
    if state.pins.pin(names) < len(names):
        forget_keys(state, keys)
        return Counted(state.epoch)
    client.swapped.update(dict.fromkeys(names))
    return Counted(state.epoch, len(names))
