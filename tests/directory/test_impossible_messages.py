"""Numbers that no sound client or store sends are refused or ignored. They hold nothing, and no block is lost by them.

Some of them would fill any memory, so these run in a process of their own.
"""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.apart import apart
from helpers.directory.checks import check_invariants
from helpers.directory.pool import EMPTY, KEYS, PAGE, Pool, blocks

from raykv.directory.calls.nodes import EPOCHS_AHEAD, GPUS
from raykv.directory.kernels import columns
from raykv.protocol.location import EPOCHS, LOCATION
from raykv.protocol.stores import ArenaDescription, Inventory, SlabReport, SweepResult
from raykv.protocol.tiers import ExistingBlocks, TierReport

HUGE = [1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64]


def full(nodes: str = "ab") -> Pool:
    pool = Pool(slots=8, slabs=2, nodes=nodes)
    pool.store("a", KEYS[:5])
    return pool


def unharmed(pool: Pool) -> None:
    """All five blocks are hit, and can be evicted afterwards. The directory's state is consistent."""
    assert pool.read("a", KEYS[:5]) == 5
    check_invariants(pool.directory)
    rows = pool.directory.c.rows
    assert not rows["holds"].any(), "blocks are held by nobody"


def inventory(index: int, **change: int) -> Inventory:
    """An inventory of a block in a slab's first slot, and of a slot that is being written."""
    found = np.zeros(2, LOCATION)
    found["node"], found["bytes"], found["slab_gen"], found["gen"] = index, PAGE, 3, 4
    found["slot"][1] = 1
    for name, value in change.items():
        found[name] = value
    return Inventory(found[:1].tobytes(), KEYS[50], bytes(4), bytes(4), found[1:].tobytes())


def adopt(change: dict[str, int], offered: int) -> None:
    pool = full()
    pool.adopt("c", inventory(pool.join("c", slabs=2).node, **change), offered)
    assert not pool.has(KEYS[50:51])[0] and pool.count("quarantined", "c") == 0
    assert pool.directory.c.grid.size < 1000
    unharmed(pool)
    assert pool.directory.heartbeat("c", 2, 0.0) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"slab": 2},
        {"slab": 0xFFFFFFFE},
        {"slot": 0xFFFFFFFF},
        {"bytes": 0xFFFFFFFF},
        {"bytes": 0},
        {"slab_gen": 0},
        {"slab_gen": 1 << 63},
        {"gen": 1 << 63},
        {"node": 0},
        {"node": 0xFFFFFFFF},
    ],
    ids=str,
)
def test_a_block_where_the_arena_of_its_node_has_no_slot(change: dict[str, int]) -> None:
    apart(adopt, change, 2)


def report(what: str, count: int) -> None:
    pool = full()
    directory = pool.directory
    calls: dict[str, Callable[[], Any]] = {
        "adopt": lambda: directory.adopt("a", EMPTY, 0.0, count),
        "heartbeat": lambda: directory.heartbeat("a", count, 0.0),
        "limit": lambda: directory.set_slab_target("a", SlabReport(2, count, b""), 0.0),
        "join": lambda: directory.join("a", ArenaDescription(b"other", 8 * PAGE, count, 0), 0.0),
        "slab": lambda: directory.join("a", ArenaDescription(b"other", count << 20, 2, 0), 0.0),
        "epoch": lambda: directory.join("a", ArenaDescription(b"other", 8 * PAGE, 2, count), 0.0),
    }
    with pytest.raises(ValueError, match=r"[a-z]"):
        calls[what]()
    unharmed(pool)


@pytest.mark.parametrize("count", [-1, *HUGE])
@pytest.mark.parametrize("what", ["adopt", "heartbeat", "limit", "join", "slab", "epoch"])
def test_counts_that_no_node_has(what: str, count: int) -> None:
    """With these counts the node would lose its blocks, or the directory use up its memory."""
    apart(report, what, count)


def test_a_node_has_so_many_gpus_at_most() -> None:
    pool = full()
    for number in range(GPUS):
        pool.join(f"a/{number}", nonce=b"%d" % number)
    with pytest.raises(ValueError, match=f"no node has more than {GPUS}"):
        pool.join("a/more")
    pool.join("a/0", nonce=b"anew")
    assert f"a/{GPUS - 1}" in pool.directory.nodes and "a/more" not in pool.directory.nodes


def test_a_store_does_not_bring_the_last_epoch() -> None:
    pool = full()
    with pytest.raises(ValueError, match="epoch"):
        pool.join("c", epoch=EPOCHS - 2)
    assert pool.directory.epoch < 10


def test_the_highest_epoch_leaves_room_for_the_next() -> None:
    pool = full()
    for epoch in range(EPOCHS_AHEAD, EPOCHS - 1, EPOCHS_AHEAD):
        pool.join("c", nonce=b"%d" % epoch, epoch=epoch)
    joined = pool.join("c", nonce=b"last", epoch=EPOCHS - 2)
    assert joined.epoch == EPOCHS - 1
    pool.adopt("c", offered=2)
    assert pool.store("c", KEYS[60:62]) == ["c", "c"] and pool.read("c", KEYS[60:62]) == 2
    with pytest.raises(ValueError, match="epoch"):
        pool.join("c", nonce=b"later", epoch=EPOCHS - 1)


@pytest.mark.parametrize("size", [-1, 0, *HUGE, PAGE + 0.5, "4096"])
def test_a_block_size_that_is_none_holds_nothing(size: Any) -> None:
    pool = full()
    for node in "ab":
        assert blocks(pool.match(node, KEYS[:5], size)[1]) == 0
        assert pool.reserve(node, KEYS[:8], size=size)[1].locations == b""
    lease, got = pool.match("b", KEYS[:5])
    assert blocks(got) == 5 and pool.next_window("b", lease, 0, size=size).source == b""
    pool.release("b", lease)
    for node in "ab":
        pool.held[node] = []
        pool.heartbeat(node)
    unharmed(pool)


def replaced(found: Inventory, field: str, value: Any) -> Inventory:
    return Inventory(**{**found._asdict(), field: value})


@pytest.mark.parametrize("field", ["locations", "keys", "positions", "stamps"])
def test_an_inventory_whose_parts_have_different_lengths_can_be_sent_again(field: str) -> None:
    pool = full()
    good = inventory(pool.join("c", slabs=2).node)
    size = {"locations": LOCATION.itemsize, "keys": 16}.get(field, 4)
    for bad in (getattr(good, field) + bytes(size), b"", getattr(good, field)[:-1]):
        with pytest.raises(ValueError, match=r"[a-z]"):
            pool.adopt("c", replaced(good, field, bad), 2)
    for left in (-1, 1 << 40, 1 << 63):
        with pytest.raises(ValueError, match="follow"):
            pool.adopt("c", good._replace(left=left), 2)
    pool.adopt("c", good, 2)
    assert pool.has(KEYS[50:51])[0] and pool.count("quarantined", "c") == 1
    unharmed(pool)


def test_an_inventory_vetoes_nothing_of_other_nodes() -> None:
    pool = full()
    rows = pool.directory.c.rows
    pool.adopt("b", inventory(pool.directory.nodes["a"].index, gen=int(rows["gen"].max()) + 1))
    unharmed(pool)


@pytest.mark.parametrize("verdict", [3, 77, 255])
def test_an_unknown_verdict_frees_nothing(verdict: int) -> None:
    pool = full()
    _, got = pool.reserve("a", KEYS[10:11])
    pool.commit("a", pool.id, got, KEYS[10:11], failed=(0,))
    assert pool.count("quarantined") == 1
    pool.directory.sweep_result(SweepResult(got.locations, bytes([verdict]), KEYS[10], bytes(8)), 0.0)
    assert pool.count("quarantined") == 1


def test_a_part_of_a_key_changes_nothing() -> None:
    pool = full()
    directory, keys = pool.directory, b"".join(KEYS[:5]) + b"part"
    assert directory.pin(pool.call("a"), b"".join(KEYS[:5]), 0.0).done == 5
    for method in (directory.pin, directory.unpin, directory.forget, directory.preempted):
        with pytest.raises(ValueError, match=r"[a-z]"):
            method(pool.call("a"), keys, 0.0)
        assert len(directory.pins) == 5
    for field in ("pulled", "corrupt"):
        with pytest.raises(ValueError, match=r"[a-z]"):
            pool.heartbeat("a", **{field: bytes(LOCATION.itemsize + 1)})
    directory.unpin(pool.call("a"), b"".join(KEYS[:5]), 0.0)
    unharmed(pool)


def list_a_tier(capacity: int) -> None:
    pool = full()
    report = TierReport(capacity, shared=False, reached=True, lost=b"")
    reply = pool.directory.tier_heartbeat("a", report, 0.0)
    assert reply is not None
    sizes = struct.pack("<6q", -1, 0, 1, PAGE, (1 << 63) - 1, -(1 << 63))
    pool.directory.report_existing("a", ExistingBlocks(b"".join(KEYS[20:26]), sizes, True), 0.0)
    pool.directory.stats(0.0)
    unharmed(pool)


@pytest.mark.parametrize("capacity", [-(1 << 62), -1, 0, 1 << 40, 1 << 62, 1 << 80])
def test_a_tier_of_any_size(capacity: int) -> None:
    apart(list_a_tier, capacity)


def test_a_location_without_a_slab_names_no_row() -> None:
    """slab_gen 0 means that there is no block. No slab may ever have that generation."""
    pool = full()
    nothing = np.zeros(1, LOCATION)
    nothing["node"] = pool.directory.nodes["a"].index
    pool.heartbeat("a", corrupt=nothing.tobytes(), pulled=nothing.tobytes())
    assert pool.directory.counters["corrupt"] == 0
    assert (pool.directory.c.rows["state"] == columns.READY).sum() == 5
    unharmed(pool)
