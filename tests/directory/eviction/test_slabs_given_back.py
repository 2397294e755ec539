"""Nodes that get more memory, or less: which slabs the directory has them give back, and when."""

import numpy as np
import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import LOCATION, unpack
from helpers.directory.pool import KEYS, PAGE, Pool, blocks

from raykv.config import staging_window
from raykv.directory.kernels import columns
from raykv.protocol.stores import FREED, Inventory, SlabReport, SweepResult

SLOTS = 8
PART = SLOTS - 1  # blocks that fill a slab beside a slot of the staging window


def set_slab_target(pool: Pool, limit: int, given_back: list[int], node: str = "a") -> list[int]:
    """Report a node's size. Returns the numbers of the slabs that it is to give back."""
    target = pool.directory.set_slab_target(node, report(limit, given_back), pool.now)
    check_invariants(pool.directory)
    return [int(number) for number in np.frombuffer(target.numbers, np.int32)]


def report(limit: int, given_back: list[int]) -> SlabReport:
    return SlabReport(0, limit, np.array(given_back, np.int32).tobytes())  # only heartbeats use `offered`


def pool_of(slabs: int, nodes: str = "a", slots: int = SLOTS) -> Pool:
    return Pool(slots=slots, slabs=slabs, nodes=nodes)


def sizes(pool: Pool, node: str = "a") -> tuple[int, int, int]:
    """(slabs in use, spare slabs, slabs that there are to be)."""
    stats = pool.directory.stats(pool.now)["nodes"][node]
    return stats["slabs"], stats["spare_slabs"], stats["limit"]


def slab_of(pool: Pool, key: bytes, node: str = "a") -> int:
    lease, got = pool.match(node, [key])
    pool.release(node, lease)
    return int(unpack(got.source)[0][1])


def fill(pool: Pool, slabs: int, first: int = 0) -> list[list[bytes]]:
    """Store blocks that fill so many slabs. Returns the keys of each slab, in the order of filling."""
    parts = [KEYS[first + i * PART :][:PART] for i in range(slabs)]
    for part in parts:
        pool.store("a", part)
    return parts


def test_spare_slabs_are_given_back_first_then_the_oldest() -> None:
    pool = pool_of(5)
    parts = fill(pool, 3)
    numbers = [slab_of(pool, part[0]) for part in parts]
    pool.read("a", parts[0])
    assert sizes(pool) == (3, 2, 5)
    spare = set_slab_target(pool, 3, [])
    assert len(spare) == 2 and not {*spare} & {*numbers}
    assert sizes(pool) == (3, 0, 3) and all(pool.has(KEYS[: 3 * PART]))
    assert set_slab_target(pool, 2, spare) == [numbers[1]], "that of the first part was read since"
    assert pool.has([part[-1] for part in parts]) == [True, False, True]
    assert set_slab_target(pool, 2, [*spare, numbers[1]]) == []
    assert set_slab_target(pool, 1, [*spare, numbers[1]]) == [numbers[2]]
    assert sizes(pool) == (1, 0, 1) and pool.read("a", parts[0]) > 0


def test_nobody_is_sent_to_a_slab_that_was_given_back() -> None:
    pool = pool_of(3)
    fill(pool, 2)
    gone = set_slab_target(pool, 1, [])
    assert len(gone) == 2
    for i in range(10):
        hold, got = pool.reserve("a", KEYS[100 + 4 * i :][:4])
        assert not {location[1] for location in unpack(got.locations)} & {*gone}
        pool.commit("a", hold, got, KEYS[100 + 4 * i :])
        set_slab_target(pool, 1, gone)
    pool.directory.heartbeat("a", 3, pool.now)
    assert sizes(pool) == (1, 0, 1), "a heartbeat does not offer it again"


def test_the_generation_is_newer_than_every_grant_there() -> None:
    pool = pool_of(2)
    hold, got = pool.reserve("a", KEYS[:PART])
    pool.commit("a", hold, got, KEYS)
    granted = max(max(location[4], location[5]) for location in unpack(got.locations))
    target = pool.directory.set_slab_target("a", report(1, []), pool.now)
    assert len(target.numbers) == 4 and target.generation > granted
    assert pool.directory.set_slab_target("a", SlabReport(0, 1, target.numbers), pool.now) == (0, b"")


def test_a_slab_that_was_not_given_back_after_all_is_spare_again() -> None:
    """The store did not get the answer, or could not give the slab back because of a writer."""
    pool = pool_of(4)
    fill(pool, 2)
    first = set_slab_target(pool, 2, [])
    assert sizes(pool) == (2, 0, 2)
    assert sorted(set_slab_target(pool, 2, [])) == sorted(first), "the answer is repeated"
    assert set_slab_target(pool, 4, first[:1]) == [] and sizes(pool) == (2, 1, 4), "half of it is taken up again"
    assert set_slab_target(pool, 4, []) == [] and sizes(pool) == (2, 2, 4)
    fill(pool, 2, first=100)
    assert sizes(pool) == (4, 0, 4)


def test_a_slab_in_use_that_was_given_back_is_closed() -> None:
    """The store's report decides: it may have got an answer late."""
    pool = pool_of(2)
    parts = fill(pool, 2)
    lease, got = pool.match("a", parts[0])
    assert blocks(got)
    number = slab_of(pool, parts[0][0])
    assert set_slab_target(pool, 1, [number]) == []
    assert pool.has([parts[0][0], parts[1][0]]) == [False, True] and sizes(pool) == (1, 0, 1)
    pool.release("a", lease)
    check_invariants(pool.directory)


def test_a_lease_holds_its_slab_until_it_is_released() -> None:
    pool = pool_of(2)
    parts = fill(pool, 2)
    for part in parts:
        pool.read("a", part)
    lease, got = pool.match("a", parts[0][:3])
    held = unpack(got.source)[0][1]
    other, _ = pool.match("a", parts[1][:1])
    assert set_slab_target(pool, 1, []) == [] and sizes(pool) == (2, 0, 1)
    assert pool.has(parts[0][:3]) == [True] * 3 and pool.has(parts[1][:1]) == [True]
    assert pool.read("a", parts[0][:3]) == 3, "who comes later finds it, too"
    pool.release("a", lease)
    assert set_slab_target(pool, 1, []) == [held] and pool.has(parts[1][:1]) == [True]
    pool.release("a", other)
    check_invariants(pool.directory)


def test_a_slab_of_which_some_slot_is_always_held_is_emptied_row_by_row() -> None:
    pool = pool_of(2)
    parts = fill(pool, 2)
    holds = [pool.match("a", [part[0]])[0] for part in parts]
    for i in range(1, 5):
        assert set_slab_target(pool, 1, []) == []
        emptied = next(part for part in parts if not all(pool.has(part)))
        assert pool.has(emptied) == [True] + [False] * (PART - 1)
        hold, got = pool.reserve("a", KEYS[200 + i : 201 + i])
        assert {location[1] for location in unpack(got.locations)} != {slab_of(pool, emptied[0])}, (
            "nothing is stored there"
        )
        pool.commit("a", hold, got, KEYS[200 + i :])
    stats = pool.directory.stats(pool.now)["nodes"]["a"]
    assert stats["slots"] == SLOTS + 1 and stats["bytes_used"] <= stats["slots"] * PAGE
    number = slab_of(pool, emptied[0])
    for hold in holds:
        pool.release("a", hold)
    assert set_slab_target(pool, 1, []) == [number]


@pytest.mark.parametrize("instead", ["the size is as before", "another is free by now"])
def test_a_slab_that_is_kept_after_all_is_used_again(instead: str) -> None:
    pool = pool_of(2)
    parts = fill(pool, 2)
    holds = {slab_of(pool, part[0]): pool.match("a", [part[0]])[0] for part in parts}
    assert set_slab_target(pool, 1, []) == []
    (closing,) = pool.directory.nodes["a"].closing
    assert pool.count("ready") < 2 * PART
    if instead == "another is free by now":
        (other,) = holds.keys() - {closing}
        pool.release("a", holds.pop(other))
        assert set_slab_target(pool, 1, []) == [other]
    else:
        assert set_slab_target(pool, 2, []) == []
    assert not pool.directory.nodes["a"].closing
    slots = sizes(pool)[0] * SLOTS
    assert pool.count("slots") == slots
    for i in range(20):
        pool.store("a", KEYS[300 + i : 301 + i])
    assert pool.count("ready") == slots - sizes(pool)[0], "all of it but the staging window"
    check_invariants(pool.directory)


def test_a_slab_that_is_being_emptied_is_given_back_before_others() -> None:
    pool = pool_of(3)
    parts = fill(pool, 3)
    holds = [pool.match("a", [part[0]])[0] for part in parts]
    assert set_slab_target(pool, 2, []) == []
    (closing,) = pool.directory.nodes["a"].closing
    for hold in holds:
        pool.release("a", hold)
    (emptied,) = [part for part in parts if not all(pool.has(part))]
    pool.read("a", emptied[:1])
    assert set_slab_target(pool, 2, []) == [closing], "though what is left of it was used last"
    assert all(all(pool.has(part)) for part in parts if part is not emptied)


def test_writers_finish_in_a_slab_that_is_to_be_given_back() -> None:
    pool = pool_of(1 + 1)
    fill(pool, 1)
    hold, got = pool.reserve("a", KEYS[100 : 100 + PART])
    pool.match("a", KEYS[:1])
    set_slab_target(pool, 1, [])
    assert pool.commit("a", hold, got, KEYS[100:]) == len(unpack(got.locations))
    check_invariants(pool.directory)


def test_the_slab_of_a_writer_that_vanished_is_kept_until_it_was_swept() -> None:
    pool = pool_of(2)
    fill(pool, 1)
    _, got = pool.reserve("a", KEYS[100 : 100 + PART])
    writing = {location[1] for location in unpack(got.locations)}
    pool.now += 20.0  # the client has expired
    answer = pool.directory.heartbeat("a", 2, pool.now)
    assert answer and len(unpack(answer.sweep)) == PART
    _, leased = pool.match("a", KEYS[:1])
    assert blocks(leased) == 1 and set_slab_target(pool, 1, []) == [], "the other is leased"
    assert pool.directory.nodes["a"].closing == writing and pool.count("quarantined") == PART
    n = len(unpack(answer.sweep))
    freed = SweepResult(answer.sweep, bytes([FREED] * n), bytes(16 * n), bytes(8 * n))
    pool.directory.sweep_result(freed, pool.now)
    assert set_slab_target(pool, 1, []) == [*writing]


def test_pinned_blocks_keep_their_slab() -> None:
    """The slab stays with all its blocks, since its memory can't be given back."""
    pool = pool_of(4)
    parts = fill(pool, 4)
    numbers = [slab_of(pool, part[0]) for part in parts]
    assert pool.directory.pin(pool.call("a"), parts[0][0] + parts[2][0], pool.now).done == 2
    gone = set_slab_target(pool, 1, [])
    assert sorted(gone) == sorted([numbers[1], numbers[3]])
    assert set_slab_target(pool, 1, gone) == [] and all(pool.has(parts[0] + parts[2]))
    pool.directory.unpin(pool.call("a"), parts[0][0], pool.now)
    assert set_slab_target(pool, 1, gone) == [numbers[0]]


def test_a_replica_elsewhere_survives_the_slab_of_its_primary() -> None:
    pool = pool_of(2, nodes="ab")
    parts = fill(pool, 1)
    pool.replicate("b", parts[0][:1])
    pool.store("a", KEYS[100:104])
    number = slab_of(pool, parts[0][5])
    pool.read("a", KEYS[100:104])
    assert set_slab_target(pool, 1, []) == [number]
    assert pool.has(parts[0][:2]) == [True, False]
    assert (pool.count("ready", "b"), pool.count("replica", "b")) == (1, 0)


def test_many_slabs_are_given_back_a_few_at_a_time() -> None:
    pool = pool_of(40)
    gone: list[int] = []
    steps = 0
    while more := set_slab_target(pool, 3, gone):
        assert len(more) <= 8
        gone, steps = gone + more, steps + 1
    assert len(set(gone)) == 37 and sizes(pool) == (0, 3, 3) and steps > 3


def test_the_staging_window_follows_the_number_of_slabs() -> None:
    pool = pool_of(64)
    pool.store("a", KEYS[:1])
    size_class = pool.directory.nodes["a"].size_classes[PAGE]

    def window() -> int:
        return int(pool.directory.c.size_classes[size_class]["window"])

    set_slab_target(pool, 32, [])
    assert window() == staging_window(32 * SLOTS * PAGE) // PAGE == 32
    set_slab_target(pool, 64, [])
    assert window() == 64
    pool.store("a", KEYS[:1], size=2 * PAGE)
    other = pool.directory.nodes["a"].size_classes[2 * PAGE]
    assert int(pool.directory.c.size_classes[other]["window"]) == 32, "also of a size that was used later"


def test_staging_under_way_outlives_a_smaller_window() -> None:
    pool = Pool(slots=SLOTS, slabs=4, nodes="ab", window=8)
    parts = fill(pool, 2)
    lease, got = pool.match("b", parts[0])
    assert blocks(got) == PART
    set_slab_target(pool, 1, [], node="b")  # also checks that no more slots are staging than the window has
    pool.heartbeat("b", pulled=got.staged)
    pool.release("b", lease)
    gone = set_slab_target(pool, 1, [], node="b")
    size_class = pool.directory.nodes["b"].size_classes[PAGE]
    assert int(pool.directory.c.size_classes[size_class]["window"]) == 1
    assert set_slab_target(pool, 1, gone, node="b") == [] or sizes(pool, "b")[0] == 1


def test_blocks_of_others_can_still_be_staged_where_only_full_slabs_are_left() -> None:
    pool = Pool(slots=SLOTS, slabs=2, nodes="ab", window=1)
    fill(pool, 1)
    pool.store("b", KEYS[100:120])
    while gone := set_slab_target(pool, 1, sorted(pool.directory.nodes["b"].withdrawn), node="b"):
        assert gone
    lease, got = pool.match("b", KEYS[:1])
    assert blocks(got) == 1 and unpack(got.staged)[0][4] > 0
    pool.release("b", lease)


def test_a_new_directory_knows_what_was_given_back_before_it_offers_anything() -> None:
    pool = Pool(nodes="", slabs=2)
    directory = pool.directory
    node, epoch = pool.join("a", epoch=1)
    found = LOCATION.pack(node, 1, 0, PAGE, epoch << 40 | 1, epoch << 40 | 2)
    late = LOCATION.pack(node, 2, 0, PAGE, epoch << 40 | 1, epoch << 40 | 3)
    assert set_slab_target(pool, 2, [0, 2]) == []
    pool.adopt("a", Inventory(found + late, KEYS[0] + KEYS[1], bytes(8), bytes(8), b""), offered=4)
    check_invariants(directory)
    assert sizes(pool) == (1, 1, 2) and pool.has(KEYS[:2]) == [True, False]
    pool.store("a", KEYS[10:40])
    assert sizes(pool) == (2, 0, 2) and {*directory.nodes["a"].slabs} == {1, 3}


def test_slabs_given_back_may_be_reported_before_the_slabs_are_offered() -> None:
    """The store took slabs up again before a restarted directory had heard how many slabs there are."""
    pool = Pool(nodes="")
    pool.join("a", slabs=4)
    set_slab_target(pool, 4, [1, 2])
    set_slab_target(pool, 4, [2])
    pool.adopt("a", offered=4)
    assert sizes(pool) == (0, 3, 4) and sorted(pool.directory.nodes["a"].spare) == [0, 1, 3]
    check_invariants(pool.directory)


def test_a_node_that_is_not_known_gives_nothing_back() -> None:
    assert Pool().directory.set_slab_target("x", report(1, []), 0.0) == (0, b"")


def test_a_leaving_node_may_shrink() -> None:
    pool = pool_of(3, nodes="ab")
    fill(pool, 3)
    pool.directory.leave("a", pool.now)
    gone = set_slab_target(pool, 1, [])
    assert len(gone) == 2 and pool.directory.stats(pool.now)["nodes"]["a"]["state"] == "leaving"
    assert set_slab_target(pool, 3, []) == [] and sizes(pool) == (1, 2, 3)
    assert {pool.name(location[0]) for location in unpack(pool.reserve("b", KEYS[500:504])[1].locations)} == {"b"}


def test_another_size_takes_over_a_slab_that_is_closing() -> None:
    pool = pool_of(3)
    parts = fill(pool, 3)
    holds = [pool.match("a", [part[0]])[0] for part in parts]
    set_slab_target(pool, 2, [])
    (closing,) = pool.directory.nodes["a"].closing
    for hold in holds:
        pool.release("a", hold)
    pool.store("a", KEYS[400:401], size=4 * PAGE)
    c = pool.directory.c
    check_invariants(pool.directory)
    set_slab_target(pool, 2, [])
    set_slab_target(pool, 3, [])
    assert all(
        (c.rows["state"][slice(first, first + n)] != columns.CLOSED).all()
        for first, n in map(pool.directory.size_classes.span, pool.directory.nodes["a"].slabs.values())
    ), closing
