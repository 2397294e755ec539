"""Upkeep on every call: nodes and clients that time out, and blocks to drop."""

import numpy as np

from raykv.config import SUSPECT_AFTER_S
from raykv.directory.kernels import leases, slabs
from raykv.directory.kernels.columns import SECOND
from raykv.directory.state.allocator import Node
from raykv.directory.state.arrays import split_keys
from raykv.directory.state.holds import Client
from raykv.directory.state.state import State

CHECK_EVERY_S = 0.5  # seconds between two checks for nodes and clients that are gone
MARKS = 12  # number of ticks to record in `State.late` seconds


def check(state: State, now: float) -> None:
    """Set silent nodes to "suspect", end silent clients, old leases and old intents, and age the hit curve.

    Does this at most twice a second, but ages the hit curve sooner after a burst of look-ups.
    """
    if now < state.next_check:
        if state.hit_curve.overdue:
            state.hit_curve.check(now)
        return
    state.next_check = now + CHECK_EVERY_S
    for node in state.nodes.values():
        if node.state == "alive" and now - node.last_heartbeat > SUSPECT_AFTER_S:
            set_state(state, node, "suspect")
    for client in state.clients.expired(now):
        forget_swapped(state, state.clients.expire(client))
        state.intents.end_all(client)
    state.clients.end_unused(now)
    state.c.state[SECOND] = int(now)
    state.intents.expire(now)
    state.hit_curve.check(now)
    mark(state, now)


def mark(state: State, now: float) -> None:
    """Record the tick at regular intervals. Users who began to wait more than `state.late` seconds ago become late."""
    marks = state.marks
    if now - marks[-1][0] >= state.late / MARKS:
        marks.append((now, state.tick))
    while len(marks) > 1 and marks[1][0] <= now - state.late:
        _, after = marks.popleft()
        state.size_classes.end_late(after, marks[0][1])


def set_state(state: State, node: Node, new: str) -> None:
    node.state = new
    for stride, size_class in node.size_classes.items():
        state.size_classes.offer(size_class, stride, node.offered_to)
    state.tier_catalog.set_suspect(node.name, new == "suspect")


def promote_replicas(state: State, node: Node) -> None:
    state.allocator.promote_replicas(node)
    state.pins.repair()


def forget_swapped(state: State, gone: Client) -> None:
    if gone.swapped:
        forget_keys(state, b"".join(gone.swapped))


def forget_keys(state: State, keys: bytes) -> int:
    """Drop blocks and their pins. Returns the number of dropped copies."""
    state.pins.unpin(split_keys(keys))
    firsts = state.find(keys)
    rows = np.empty(leases.copies(state.c, firsts, np.empty(0, np.int64)), np.int64)
    leases.copies(state.c, firsts, rows)
    gens = state.c.rows["gen"][rows]
    state.tier_catalog.schedule_delete(rows, gens)
    return int(slabs.drop(state.c, rows, gens, True))
