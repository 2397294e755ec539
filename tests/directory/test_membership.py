"""The directory's rules for nodes, slabs and restarts, by example."""

import struct

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import LOCATION, unpack
from helpers.directory.pool import KEYS, PAGE, Pool, blocks

from raykv.protocol.stores import FINISHED, Inventory, SweepResult


def test_a_suspect_node_keeps_its_rows_but_offers_none_to_others() -> None:
    pool = Pool(nodes="ab")
    pool.store("a", KEYS[:2])
    pool.tick(4.0, alive="b")
    assert pool.directory.stats(pool.now)["nodes"]["a"]["state"] == "suspect"
    assert pool.count("ready") == 2
    assert pool.read("b", KEYS[:2]) == 0
    assert pool.reserve("a", KEYS[5:6])[1].locations == b""
    assert pool.store("b", KEYS[:2]) == [], "they are not lost yet"
    pool.tick(1.0)
    assert pool.read("a", KEYS[:2]) == 2


def test_who_reads_beside_a_suspect_store_finds_what_is_in_its_memory() -> None:
    """Readers need no store to read their node's memory. Other nodes' blocks get no slots, as the store can't pull."""
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[:3])
    pool.store("b", KEYS[3:5])
    pool.replicate("b", KEYS[:2])  # so two blocks have a copy on a node that answers
    pool.tick(4.0, alive="b")
    lease, got = pool.match("a", KEYS[:5])
    assert [pool.name(location[0]) for location in unpack(got.source)] == ["a"] * 3
    assert got.staged == b"" and pool.count("staging", "a") == 0
    pool.release("a", lease)
    assert pool.read("b", KEYS[:5]) == 2
    pool.tick(1.0)
    assert pool.read("a", KEYS[:5]) == 5


def test_what_is_read_beside_a_suspect_store_stays_while_it_is_leased() -> None:
    pool = Pool(nodes="a")
    pool.store("a", KEYS[:7])
    pool.tick(4.0, alive="")
    lease, got = pool.match("a", KEYS[:7])
    assert blocks(got) == 7
    pool.tick(1.0)  # the store answers again, and writers come
    assert pool.store("a", KEYS[100:103]) == [] and all(pool.has(KEYS[:7]))
    pool.release("a", lease)
    assert pool.store("a", KEYS[110:112]) == ["a", "a"]


def test_removing_a_node_promotes_replicas() -> None:
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[:4])
    pool.replicate("b", KEYS[:2])
    assert pool.directory.remove_node("a", pool.now) == 8
    assert pool.has(KEYS[:4]) == [True, True, False, False]
    assert (pool.count("ready", "b"), pool.count("replica", "b")) == (2, 0)
    assert pool.directory.remove_node("a", pool.now) == 0
    check_invariants(pool.directory)


def test_a_replica_is_primary_once_the_writer_of_its_key_gives_up() -> None:
    pool = Pool(nodes="ab")
    hold, got = pool.reserve("a", KEYS[:1])
    index_b = pool.directory.nodes["b"].index
    pool.directory.remove_node("b", pool.now)
    index_b, epoch = pool.join("b", nonce=b"new")
    found = LOCATION.pack(index_b, 0, 0, PAGE, 9, epoch << 40 | 9)
    pool.adopt("b", Inventory(found, KEYS[0], bytes(4), bytes(4), b""))
    assert pool.count("replica", "b") == 1
    pool.commit("a", hold, got, KEYS, failed=(0,))
    assert (pool.count("replica", "b"), pool.count("ready", "b")) == (0, 1)


def inventory(first: int, keys: list[bytes], node: int) -> Inventory:
    """An inventory with block i in slot i, generations from `first` on, all blocks of the same age and depth."""
    locations = b"".join(LOCATION.pack(node, 0, i, PAGE, 1, 1 << 40 | first + i) for i in range(len(keys)))
    return Inventory(locations, b"".join(keys), bytes(4 * len(keys)), bytes(4 * len(keys)), b"")


def test_a_new_directory_rebuilds_order_of_use_and_parents_first() -> None:
    pool = Pool(nodes="")
    node, epoch = pool.join("a", epoch=1)
    assert epoch == 2
    depth = struct.pack("<7I", 0, 1, 2, 0, 1, 2, 0)
    stamps = struct.pack("<7I", 5, 5, 5, 3, 3, 3, 4)
    pool.adopt("a", inventory(1, KEYS[:7], node)._replace(positions=depth, stamps=stamps))
    gone = []
    for i in range(7):
        pool.store("a", [KEYS[100 + i]])
        gone += [j for j, there in enumerate(pool.has(KEYS[:7])) if not there and j not in gone]
    assert gone == [5, 4, 3, 6, 2, 1, 0]


def test_of_a_key_in_two_arenas_the_first_seen_is_primary() -> None:
    pool = Pool(nodes="")
    for name in "ab":
        node, _ = pool.join(name, epoch=1)
        pool.adopt(name, inventory(1, KEYS[:3], node))
    assert (pool.count("ready", "a"), pool.count("replica", "a")) == (3, 0)
    assert (pool.count("ready", "b"), pool.count("replica", "b")) == (0, 3)


def test_slots_that_are_still_written_are_quarantined_after_a_restart() -> None:
    pool = Pool(nodes="")
    node, _ = pool.join("a", epoch=1)
    found = inventory(1, KEYS[:3], node)
    writing = found.locations[32:64] + LOCATION.pack(node, 0, 99, PAGE, 1, 5) + LOCATION.pack(node, 0, 0, PAGE, 77, 5)
    pool.adopt("a", found._replace(writing=writing))
    assert [pool.count(state) for state in ("ready", "quarantined", "free")] == [2, 1, 5]
    check_invariants(pool.directory)


def test_headers_only_veto_where_rows_are_known() -> None:
    pool = Pool()
    pool.store("a", KEYS[:3])
    _, got = pool.match("a", KEYS[:3])
    rows = unpack(got.source)
    newer = LOCATION.pack(*rows[0][:5], rows[0][5] + 1)
    older = LOCATION.pack(*rows[1][:5], rows[1][5] - 1)
    unknown = LOCATION.pack(*rows[0][:2], 7, *rows[0][3:])
    pool.adopt("a", Inventory(newer + older + unknown, b"".join(KEYS[10:13]), bytes(12), bytes(12), b""))
    assert pool.has([*KEYS[:3], *KEYS[10:13]]) == [False, True, True, False, False, False]


def test_a_lease_from_before_a_store_came_back_holds_nothing() -> None:
    pool = Pool()
    pool.store("a", KEYS[:3])
    lease, got = pool.match("a", KEYS[:3])
    pool.directory.remove_node("a", pool.now)
    node, _ = pool.join("a", epoch=1)
    found = b"".join(LOCATION.pack(node, *location[1:]) for location in unpack(got.source))
    pool.adopt("a", Inventory(found, b"".join(KEYS[:3]), bytes(12), bytes(12), b""))
    pool.release("a", lease)
    check_invariants(pool.directory)
    assert not pool.directory.c.rows["holds"].any()


def test_a_directory_takes_an_epoch_above_every_other_that_an_arena_has_heard_of() -> None:
    pool = Pool(nodes="")
    assert pool.join("new", b"0", 0).epoch == 1
    assert pool.join("same", b"1", 1).epoch == 2, "another directory may be at 1 as well"
    assert pool.join("known", b"1", 2).epoch == 2, "this one stamped that arena"
    assert pool.join("higher", b"3", 7).epoch == 8
    assert pool.join("new", b"0", 9).epoch == 10, "also in an arena that it knows"
    assert pool.join("lower", b"4", 3).epoch == 10


def test_what_is_adopted_is_not_evicted_while_the_store_has_slabs_to_spare() -> None:
    pool = Pool(nodes="", slabs=2)
    node, epoch = pool.join("a", epoch=1)
    gen = (epoch - 1 << 40) + 1
    locations = b"".join(LOCATION.pack(node, 0, slot, PAGE, gen, gen) for slot in range(8))
    pool.adopt("a", Inventory(locations, b"".join(KEYS[:8]), bytes(32), bytes(32), b""), offered=2)
    _, granted = pool.reserve("a", KEYS[8:12])
    assert len(granted.indices) // 4 == 4
    stats = pool.directory.stats(0.0)
    assert stats["evicted"] == 0 and stats["keys"] == 12


def test_a_store_that_joined_offers_nothing_until_it_is_adopted() -> None:
    pool = Pool(nodes="")
    pool.join("a")
    assert pool.directory.heartbeat("a", 1, 0.0) is None
    assert pool.reserve("a", KEYS[:1])[1].locations == b""
    pool.adopt("a")
    pool.directory.heartbeat("a", 1, 0.0)
    assert pool.store("a", KEYS[:1]) == ["a"]


# ---------------------------------------------------------------------- slabs, clear


def test_a_starving_size_takes_the_slab_whose_newest_block_is_oldest() -> None:
    pool = Pool(slots=4, slabs=2, window=0)
    old, young = KEYS[:4], KEYS[4:7]
    pool.store("a", old)
    pool.store("a", young)
    assert pool.store("a", KEYS[50:51], size=2 * PAGE) == ["a"]
    assert pool.has([*old, *young]) == [False] * 4 + [True] * 3
    check_invariants(pool.directory)


def test_a_slab_with_a_held_slot_is_never_taken() -> None:
    pool = Pool(slots=4, slabs=2, window=0)
    pool.store("a", KEYS[:4])
    lease, _ = pool.match("a", KEYS[3:4])
    pool.reserve("a", KEYS[8:9])  # takes a slot of the other slab
    assert pool.reserve("a", KEYS[50:51], size=2 * PAGE)[1].locations == b""
    assert all(pool.has(KEYS[:4]))
    pool.release("a", lease)
    assert pool.store("a", KEYS[50:51], size=2 * PAGE) == ["a"]
    assert pool.has(KEYS[:4]) == [False] * 4
    assert pool.count("writing") == 1


def test_a_block_that_no_slab_can_hold_is_refused() -> None:
    pool = Pool(slots=4)
    for size in (0, 5 * PAGE):
        assert pool.reserve("a", KEYS[:1], size=size)[1].locations == b""
        assert pool.match("a", KEYS[:1], size=size)[1].source == b""


def test_clear_forgets_all_blocks_and_a_late_commit_restores_none() -> None:
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[:3])
    lease, staging = pool.match("b", KEYS[:2])
    hold, got = pool.reserve("a", KEYS[10:12])
    assert pool.directory.clear(pool.now) == 5
    assert (pool.count("dropped", "a"), pool.count("dropped", "b")) == (4, 2)
    assert pool.commit("a", hold, got, KEYS[10:12]) == 0
    pool.heartbeat("b", pulled=staging.staged)
    pool.release("b", lease)
    assert not any(pool.has(KEYS[:20]))
    assert (pool.count("free", "a"), pool.count("free", "b")) == (8, 8)
    assert pool.store("a", KEYS[:3]) == ["a"] * 3


def test_a_sweep_does_not_restore_a_cleared_block() -> None:
    pool = Pool()
    _, got = pool.reserve("a", KEYS[:1])
    pool.tick(11.0)
    pool.directory.clear(pool.now)
    gen = struct.pack("<Q", unpack(got.locations)[0][5])
    pool.directory.sweep_result(SweepResult(got.locations, bytes([FINISHED]), KEYS[0], gen), pool.now)
    assert pool.count("free") == 8 and not any(pool.has(KEYS[:1]))


def test_a_size_without_a_slot_gets_one_on_the_writers_node() -> None:
    """Even if another node has room: blocks for that node are staged on the writer's node first."""
    pool = Pool(slots=8, slabs=2, window=1, nodes="ac")
    pool.store("a", KEYS[:7], size=2 * PAGE)
    assert pool.store("a", KEYS[100:106]) != [] and pool.read("a", KEYS[100:106]) == 6
    assert pool.store("c", KEYS[200:206]) == ["c"] * 6 and pool.read("a", KEYS[200:206]) == 6


def test_a_match_that_stages_nothing_takes_no_slab() -> None:
    pool = Pool(slots=8, slabs=2, window=1, nodes="acd")
    pool.store("a", KEYS[:7])
    pool.store("a", KEYS[100:103], size=2 * PAGE)
    for _ in range(3):
        pool.match("a", KEYS[:7])
        assert pool.read("a", KEYS[100:103], 2 * PAGE) == 3
    spare = pool.directory.stats(pool.now)["nodes"]["c"]["spare_slabs"]
    pool.store("d", KEYS[200:206])
    pool.read("a", KEYS[200:206])
    assert pool.directory.stats(pool.now)["nodes"]["c"]["spare_slabs"] == spare, "it reads on another node"


def pieces(whole: Inventory, size: int) -> list[Inventory]:
    """Split an inventory into pieces of `size` blocks, as a store sends it."""

    def piece(left: int) -> Inventory:
        stop = left + size
        locations, keys = (
            whole.locations[left * LOCATION.size : stop * LOCATION.size],
            whole.keys[left * 16 : stop * 16],
        )
        return Inventory(locations, keys, bytes(4 * size), bytes(4 * size), b"", left)

    return [piece(left) for left in reversed(range(0, len(whole.keys) // 16, size))]


def test_an_inventory_in_pieces_is_offered_after_the_last_and_keeps_the_order_of_use() -> None:
    pool = Pool(nodes="b")
    node, _ = pool.join("a")
    for piece in pieces(inventory(1, KEYS[:6], node), 2):
        assert pool.directory.heartbeat("a", 0, pool.now) is None
        assert pool.read("a", KEYS[:6]) == 0
        pool.adopt("a", piece)
        assert not pool.store("b", [KEYS[5]]), "it is stored; and touched, before older blocks are known"
    assert all(pool.has(KEYS[:6]))
    check_invariants(pool.directory)
    gone: list[int] = []
    for i in range(16):
        pool.store("a", [KEYS[100 + i]])
        gone += [j for j, there in enumerate(pool.has(KEYS[:6])) if not there and j not in gone]
    assert gone == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("again", [False, True])
def test_what_is_done_with_between_two_pieces_stays_as_old_as_it_is(again: bool) -> None:
    """If the block became older, blocks of later pieces would become still older."""
    pool = Pool(nodes="")
    node = pool.join("a").node
    first, *others = pieces(inventory(1, KEYS[:6], node), 2)
    pool.adopt("a", first, offered=1)
    assert pool.directory.done(pool.call("a"), b"".join(KEYS[:6]), pool.now, again).done == 0
    for piece in others:
        pool.adopt("a", piece, offered=1)
    check_invariants(pool.directory)


def test_a_store_that_joins_again_between_two_pieces_begins_anew() -> None:
    pool = Pool(nodes="")
    first, _ = pool.join("a")
    pool.adopt("a", pieces(inventory(1, KEYS[:6], first), 3)[0])
    node, _ = pool.join("a")
    assert node != first
    for piece in pieces(inventory(1, KEYS[:6], node), 3):
        pool.adopt("a", piece)
    assert pool.count("ready", "a") == 6 and pool.read("a", KEYS[:6]) == 6
    check_invariants(pool.directory)


def test_the_last_piece_of_a_store_that_was_killed_offers_nothing_of_the_one_after_it() -> None:
    pool = Pool(nodes="")
    first, _ = pool.join("a")
    late = pieces(inventory(1, KEYS[:6], first), 3)[-1]._replace(node=first)
    node, _ = pool.join("a", nonce=b"another")
    pool.adopt("a", late)
    assert pool.directory.nodes["a"].state == "joining"
    for piece in pieces(inventory(1, KEYS[:6], node), 3):
        pool.adopt("a", piece._replace(node=node))
    assert pool.count("ready", "a") == 6 and pool.read("a", KEYS[:6]) == 6
    check_invariants(pool.directory)
