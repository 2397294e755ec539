"""Calls of node stores that join and report, and calls about nodes that leave or died."""

import numpy as np

from raykv.config import staging_window
from raykv.directory.calls.found_blocks import FoundBlocks
from raykv.directory.calls.upkeep import check, promote_replicas, set_state
from raykv.directory.kernels import eviction, slabs
from raykv.directory.kernels.columns import CLOCK, EPOCH, NOWHERE
from raykv.directory.kernels.sole_copies import find_sole
from raykv.directory.state.allocator import Node
from raykv.directory.state.arrays import key_array
from raykv.directory.state.hit_curve import Plan
from raykv.directory.state.state import State
from raykv.protocol.location import EPOCHS, LOCATION, SLABS_MAX, host_of
from raykv.protocol.stores import (
    FINISHED,
    STILL_WRITTEN,
    ArenaDescription,
    Heartbeat,
    Inventory,
    Joined,
    SlabReport,
    SlabTarget,
    SoleCopies,
    SweepResult,
)

SOLE_COPIES_PER_CALL = 4096  # maximum number of blocks of each size in an answer
ARENA_BYTES_MAX = 1 << 50
EPOCHS_AHEAD = 1 << 16  # maximum lead of an arena's epoch over the directory's epoch: more than a pool uses in years
GPUS = 64  # maximum number of a node's GPUs


def join(state: State, name: str, arena: ArenaDescription, now: float, window: int | None = None) -> Joined:
    """Register a node store that started. Until `adopt`, the directory neither offers blocks nor grants slots there.

    window: bytes of the staging window; None: see `staging_window`. ValueError for an impossible arena.
    """
    check(state, now)
    _check_arena(arena, state.epoch)
    _check_gpus(state, name)
    if arena.epoch > state.epoch or (arena.epoch == state.epoch and arena.nonce not in state.stamped):
        state.c.state[EPOCH] = arena.epoch + 1
    state.stamped.add(arena.nonce)
    known = state.nodes.get(name)
    half_adopted = known and known.state == "joining" and known.floor >= 0  # not all of its inventory has arrived
    if known and known.nonce == arena.nonce and not half_adopted:
        known.last_heartbeat = now
        return Joined(known.index, state.epoch)
    _remove(state, name)
    window = staging_window(arena.slab_bytes * arena.slab_count) if window is None else window
    node = Node(name, state.new_index(tier=False), arena.nonce, arena.slab_bytes, window, now, limit=arena.slab_count)
    node.leaving = node.host in state.leaving
    state.nodes[name] = node
    state.resize()
    return Joined(node.index, state.epoch)


def _check_gpus(state: State, name: str) -> None:
    """Raise ValueError if a node has too many GPUs, as each GPU costs the directory memory."""
    host = host_of(name)
    others = sum(node.on_gpu and node.host == host and node.name != name for node in state.nodes.values())
    if name != host and others >= GPUS:
        raise ValueError(f"{name!r} joins beside {others} GPUs of its node: no node has more than {GPUS}")


def adopt(state: State, name: str, found: Inventory, now: float, offered: int = 0) -> None:
    """Adopt the blocks that a node store found in its arena. A node adopted before only loses overwritten blocks.

    The inventory may come in pieces, the youngest blocks first, with other calls in between. The directory offers no
    blocks on the node until the last piece. offered: number of slabs that the node has allocated. Without this number,
    writers would evict blocks until the next heartbeat, as spare slabs would be unknown. Ignores impossible locations.
    ValueError for a bad Inventory or a bad number of slabs.
    """
    check(state, now)
    node = state.nodes.get(name)
    if node is None or found.node not in (-1, node.index):
        return
    _check_slabs(offered)
    blocks = FoundBlocks.of(found).in_arena(node.index, max(offered, node.limit))
    node.last_heartbeat = now
    joined = node.state == "joining"
    if joined:
        _take_up(state, node, blocks)
    else:
        _veto(state, blocks)
    if found.left:
        return
    state.allocator.offer(node, offered)
    set_state(state, node, "alive")
    for other in state.nodes.values():
        if other.leaving or (other.on_gpu and other.host == name):
            promote_replicas(state, other)  # before the copies on this node can be evicted
    if joined and not node.leaving:
        state.allocator.empty_windows(node)


def _take_up(state: State, node: Node, found: FoundBlocks) -> None:
    """Create rows for the blocks in a joining node's arena: oldest blocks first, and children before parents."""
    state.allocator.open_slabs_of(node, np.concatenate([found.locations, found.writing]))
    slabs.set_aside(state.c, *state.size_classes.rows_of(found.writing))
    order = np.lexsort((-found.positions.astype(np.int64), found.stamps))
    order = order[found.locations["gen"][order] > state.floor]
    rows, gens = state.size_classes.rows_of(found.locations[order])
    known = rows >= 0
    if node.floor < 0:  # the first piece
        total = int(known.sum()) + found.left
        state.c.state[CLOCK] = max(state.c.state[CLOCK], total)
        node.floor = int(state.c.state[CLOCK]) - total
    slabs.adopt(state.c, rows[known], found.keys[order][known], gens[known], node.floor + found.left)


def _veto(state: State, found: FoundBlocks) -> None:
    """Drop each block if the store found another block of the same or a newer generation in its slot."""
    rows, gens = state.size_classes.rows_of(found.locations)
    keys, known = found.keys, state.c.rows[rows]
    other = (known["gen"] != gens) | (known["k0"] != keys[:, 0]) | (known["k1"] != keys[:, 1])
    vetoed = (rows >= 0) & other & (gens >= known["gen"])
    slabs.drop(state.c, rows[vetoed], known["gen"][vetoed], False)
    state.pins.repair()


def heartbeat(state: State, name: str, offered: int, now: float) -> Heartbeat | None:
    """Note that a node store is alive and has allocated `offered` slabs. ValueError for a bad count of slabs.

    Returns None if the directory does not know the node, or has not adopted its blocks. Then the node must `join`.
    """
    check(state, now)
    _check_slabs(offered)
    node = state.nodes.get(name)
    if node is None or node.state == "joining":
        return None
    node.last_heartbeat = now
    state.allocator.offer(node, offered)
    if node.state == "suspect":
        set_state(state, node, "alive")
    return Heartbeat(state.epoch, state.floor, state.allocator.quarantined(node).tobytes())


def sweep_result(state: State, result: SweepResult, now: float) -> None:
    """Process a node store's report on quarantined slots."""
    check(state, now)
    rows, gens = state.size_classes.rows_of(np.frombuffer(result.locations, LOCATION))
    verdicts, keys = np.frombuffer(result.verdicts, np.uint8), key_array(result.keys)
    found_gens = np.frombuffer(result.generations, np.uint64).astype(np.int64)
    if len(rows) == len(verdicts) == len(keys) == len(found_gens):
        verdicts = np.where(verdicts <= FINISHED, verdicts, STILL_WRITTEN).astype(np.uint8)
        slabs.sweep_result(state.c, rows, gens, verdicts, keys, found_gens, state.floor)


def set_slab_target(state: State, name: str, report: SlabReport, now: float) -> SlabTarget:
    """Set a node's number of slabs to `report.limit`. Called before every `adopt` and `heartbeat`.

    Removes every slab that the report lists as given back, even if no answer named the slab. If the node has too many
    slabs, the answer names slabs to give back, the oldest first. If a slot of such a slab is held, a later answer names
    the slab, after the hold has ended. ValueError for a bad limit.
    """
    check(state, now)
    _check_slabs(report.limit)
    numbers_back = np.frombuffer(report.given_back, np.int32)
    node = state.nodes.get(name)
    if node is None:
        return SlabTarget(0, b"")
    if report.limit != node.limit:
        node.limit, node.window_bytes = report.limit, staging_window(node.slab_bytes * report.limit)
        state.resize()
    state.allocator.resize_windows(node)
    given_back = set(numbers_back[numbers_back >= 0].tolist())
    if given_back != node.withdrawn:
        _set_withdrawn(state, node, given_back)
    numbers = state.allocator.withdraw(node, state.pins.rows()) if node.state != "joining" else []
    return SlabTarget(state.size_classes.next_gen() if numbers else 0, np.array(numbers, np.int32).tobytes())


def follow(state: State, name: str, plan: Plan, now: float) -> None:
    """Follow a plan for the memory from now on, and reserve room on a node for copies of other nodes' blocks.

    While tenants have quotas, no room is reserved, as the tenants' minima may add up to the whole memory. A pool's only
    node reserves no room, as there is no other node to copy from. A leaving node reserves no room either, as its
    primaries still have to be copied.
    """
    check(state, now)
    alone = sum(not node.on_gpu for node in state.nodes.values()) < 2
    state.plan = plan._replace(copies=0.0) if state.quotas or alone else plan
    node = state.nodes.get(name)
    if node is not None and not node.on_gpu:
        node.copies = state.plan.copies
        state.allocator.resize_windows(node)


def _set_withdrawn(state: State, node: Node, given_back: set[int]) -> None:
    """Adopt a node's list of slabs that were given back. After a lost answer, the directory's own list may differ."""
    kept = sorted(node.withdrawn - given_back, reverse=True)
    lost = [number for number in given_back if number in node.slabs]
    for number in lost:
        state.size_classes.close(node.index, node.slabs.pop(number))
    node.spare[:] = [*kept, *(number for number in node.spare if number not in given_back)]
    node.withdrawn = given_back
    state.allocator.may_have_spare.add(node.name)
    if lost:
        state.invalidate()


def leave(state: State, name: str, now: float) -> None:
    """Mark a node as about to leave. The directory stores no new blocks there; `sole_copies` names the blocks to save.

    On a new directory, this must be called before any node joins.
    """
    check(state, now)
    state.leaving.add(name)
    for node in state.of_host(name):
        if not node.leaving:  # this call comes every second
            node.leaving = True
            set_state(state, node, node.state)
            promote_replicas(state, node)


def stay(state: State, name: str, now: float) -> None:
    """Undo `leave`: the node stays, and the directory stores blocks there again."""
    check(state, now)
    state.leaving.discard(name)
    for node in state.of_host(name):
        if node.leaving:
            node.leaving = False
            set_state(state, node, node.state)


def sole_copies(state: State, name: str, now: float) -> SoleCopies | None:
    """Return the blocks that would be lost with a node; None if the directory does not know the node's blocks yet."""
    check(state, now)
    nodes, shared = state.of_host(name), state.tier_catalog.tiers.get("")
    if name not in state.nodes or any(node.state == "joining" for node in nodes):
        return None
    for node in nodes:
        if node.leaving:
            promote_replicas(state, node)
    tier = shared.index if shared and not shared.unreached else -1
    locations, keys, total = [], [], 0
    for node in nodes:
        slots = state.allocator.slots(node)
        for stride, size_class in node.size_classes.items():
            eviction.oldest(state.c, size_class)  # takes held rows at the old end out of the list
            rows, n = np.empty(slots[stride], np.int64), 0
            for record in node.slabs.values():
                if state.c.slabs[record]["size_class"] == size_class:
                    n, writing = find_sole(state.c, *state.size_classes.span(record), tier, rows, n)
                    total += writing
            total += n
            rows = rows[:n]
            listed = state.c.rows["prev"][rows] != NOWHERE
            order = np.where(listed, -state.c.rows["last"][rows], np.arange(n))  # youngest first, rows in no list last
            if n > SOLE_COPIES_PER_CALL:  # all callers wait while this sorts
                chosen = np.argpartition(order, SOLE_COPIES_PER_CALL)[:SOLE_COPIES_PER_CALL]
                rows, order = rows[chosen], order[chosen]
            rows = rows[np.argsort(order)]
            locations.append(state.size_classes.describe(rows, stride).tobytes())
            keys.append(state.size_classes.keys_of(rows))
    return SoleCopies(b"".join(locations), b"".join(keys), total)


def remove_node(state: State, name: str, now: float) -> int:
    """Remove the rows of a node that Ray reports as dead. Returns how many slots the node had."""
    check(state, now)
    state.leaving.discard(name)
    return sum(_remove(state, node.name) for node in state.of_host(name))


def _remove(state: State, name: str) -> int:
    node = state.nodes.pop(name, None)
    if node is None:
        return 0
    set_state(state, node, "dead")
    state.resize()
    slots = sum(state.size_classes.span(record)[1] for record in node.slabs.values())
    for record in node.slabs.values():
        state.size_classes.close(node.index, record)
    for stride, size_class in node.size_classes.items():
        state.size_classes.remove(size_class, stride)
        state.allocator.lacking.pop(size_class, None)
    state.tier_catalog.leave(name)
    state.gpu_demotion.cancel(name)
    state.invalidate()  # a node that comes back may get these rows again, with the same generations
    return slots


def _check_arena(arena: ArenaDescription, epoch: int) -> None:
    """Raise ValueError for an impossible arena, as its numbers come from another process.

    epoch: the directory's epoch. An arena's epoch that is too far ahead would use up the epochs that a header can hold.
    """
    _check_slabs(arena.slab_count)
    if not 0 < arena.slab_bytes <= ARENA_BYTES_MAX:
        raise ValueError(f"slabs of {arena.slab_bytes} bytes: there are none")
    if not 0 <= arena.epoch < min(EPOCHS - 1, epoch + EPOCHS_AHEAD):
        raise ValueError(f"an arena of epoch {arena.epoch}: no pool is at that, for the directory's epoch is {epoch}")


def _check_slabs(count: int) -> None:
    """Raise ValueError for a bad count of slabs."""
    if not 0 <= count <= SLABS_MAX:
        raise ValueError(f"{count} slabs: an arena has at most {SLABS_MAX}")
