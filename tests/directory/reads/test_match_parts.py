"""A question for several parts, or for several readers, by example. A differential test covers the other cases."""

import os
from typing import Any

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import unpack
from helpers.directory.pool import KEYS, PAGE, Pool, blocks, staged

from raykv.protocol.clients import Call, Intent, MatchedParts, MatchRequest

FIRST, SECOND = KEYS[:4], KEYS[100:104]  # keys of two parts


def test_a_hit_is_what_all_parts_have_and_no_more_is_held_or_touched() -> None:
    pool = Pool(slots=8, window=1)
    pool.store("a", FIRST)
    pool.store("a", SECOND[:2])
    leases, got = pool.match_parts("a", [("a", FIRST), ("a", SECOND)])
    assert [blocks(part) for part in got.parts] == [2, 2]
    stats = pool.directory.stats(pool.now)
    assert (stats["leases"], stats["lookups"], stats["hits"]) == (2, 8, 4)
    pool.store("a", KEYS[200:203])
    assert pool.has(FIRST) == [True, True, False, False] and pool.has(SECOND[:2]) == [True, True]
    assert pool.match_parts("a", [("a", FIRST), ("a", KEYS[300:304])])[1].parts == ()
    pool.held["a"] = []
    pool.heartbeat("a")
    assert pool.directory.stats(pool.now)["leases"] == 0 and len(leases) == 2


def test_a_lease_of_a_block_keeps_no_more_than_that_block() -> None:
    """The lease copies the keys: a view would keep all keys of the question in memory."""
    pool, many = Pool(slots=8, window=1), [os.urandom(16) for _ in range(5000)]
    pool.store("a", FIRST)
    pool.store("a", SECOND[:1])
    pool.match("a", FIRST[:1] + many)
    pool.match_parts("a", [("a", FIRST[:1] + many), ("a", FIRST[1:2] + many)])
    pool.match_parts("a", [("a", FIRST), ("a", SECOND)])
    holds = [hold for client in pool.directory.clients.values() for hold in client.holds.values()]
    assert [len(hold.keys) for hold in holds] == [1] * 5
    arrays = [array for hold in holds for array in (hold.keys, *hold.blocks)]
    assert all(array.base is None and len(array) == 1 for array in arrays)


def test_a_lease_that_nobody_reads_by_holds_nothing_after_ten_minutes() -> None:
    """The client is alive and lists the lease, but has forgotten it."""
    pool = Pool(slots=8, window=4, nodes="ab")
    pool.store("a", FIRST)
    pool.store("b", SECOND)
    forgotten, _ = pool.match("a", FIRST)
    read, _ = pool.match("b", FIRST)
    unread, _ = pool.match("a", SECOND)
    for second in range(601):
        pool.now += 1.0
        if second % 300 == 0:
            assert staged(pool.next_window("b", read, 0, 4)) == 4
        for node in "ab":
            pool.directory.heartbeat(node, 1, pool.now)
            pool.heartbeat(node)
    held = {lease for client in pool.directory.clients.values() for lease in client.holds}
    assert held == {read} and {forgotten, unread}.isdisjoint(held)
    assert pool.count("staging", "b") == 4 and pool.count("staging", "a") == 0
    assert pool.count("quarantined", "a") == 4, "its reader may yet write there"
    assert blocks(pool.next_window("a", unread, 0)) == 0
    largest = pool.directory.clients.largest(3, pool.now)
    assert [(one["blocks"], one["leases"], one["oldest_s"]) for one in largest] == [(4, 1, 601.0)]
    check_invariants(pool.directory)


def test_what_was_matched_together_is_evicted_block_after_block() -> None:
    """If one part went first as a whole, the blocks of the other part would be useless."""
    pool = Pool(slots=10, window=1)
    pool.store("a", FIRST)
    pool.store("a", SECOND)
    pool.match_parts("a", [("a", FIRST), ("a", SECOND)])
    pool.held["a"] = []
    pool.heartbeat("a")
    pool.store("a", KEYS[200:203])
    assert pool.has(FIRST) == pool.has(SECOND) == [True] * 3 + [False]
    pool.store("a", KEYS[203:205])
    assert pool.has(FIRST) == pool.has(SECOND) == [True] * 2 + [False] * 2


def test_each_part_is_read_on_its_own_node_whoever_asks() -> None:
    pool = Pool(slots=8, window=4, nodes="abc")
    pool.store("a", FIRST)
    pool.store("b", SECOND)
    leases, got = pool.match_parts("driver", [("a", FIRST), ("b", SECOND), ("c", FIRST)])
    index = {pool.name(part.node): part for part in got.parts}
    assert [index[name].nonce for name in "abc"] == [b"a", b"b", b"c"]
    assert [blocks(index[name]) for name in "abc"] == [4, 4, 4]
    assert index["a"].staged == index["b"].staged == b""
    assert staged(index["c"]) == 4 and {pool.name(at[0]) for at in unpack(index["c"].staged)} == {"c"}
    moved = pool.next_window("driver", leases[2], 2, by="c")
    assert blocks(moved) == staged(moved) == 2
    pool.held["driver"] = []
    pool.heartbeat("driver")
    assert pool.count("staging", "c") == 0
    check_invariants(pool.directory)


def test_a_reader_without_memory_reads_nothing_and_so_nobody_does() -> None:
    pool = Pool(slots=8, nodes="a")
    pool.store("a", FIRST)
    pool.store("a", SECOND)
    assert pool.match_parts("a", [("a", FIRST), ("elsewhere", SECOND)])[1].parts == ()
    assert pool.directory.stats(pool.now)["leases"] == 0
    assert not pool.directory.c.rows["holds"].any()


def test_leases_of_one_question_are_released_one_by_one_too() -> None:
    pool = Pool(slots=10, window=1)
    pool.store("a", FIRST)
    pool.store("a", SECOND)
    leases, _ = pool.match_parts("a", [("a", FIRST), ("a", SECOND)])
    pool.release("a", leases[0])
    assert pool.directory.stats(pool.now)["leases"] == 1
    pool.store("a", KEYS[200:203])
    assert pool.has(FIRST) == [True] * 2 + [False] * 2 and pool.has(SECOND) == [True] * 4
    pool.release("a", leases[1])
    check_invariants(pool.directory)


def test_parts_of_different_lengths_or_with_one_lease_are_no_message() -> None:
    pool = Pool(slots=8)
    pool.store("a", FIRST)
    one, two = (MatchRequest(lease, "a", b"".join(FIRST), PAGE, 1) for lease in (1, 2))
    for wrong in ((one, two._replace(keys=one.keys[16:])), (one, one)):
        with pytest.raises(ValueError, match="2 parts"):
            pool.directory.match_parts(Call(7, 1), wrong, None, pool.now)
    assert pool.directory.match_parts(Call(7, 2), (), None, pool.now).parts == ()
    assert pool.directory.stats(pool.now)["leases"] == 0


def asked(
    pool: Pool, *parts: tuple[list[bytes], dict[str, int]], client: str = "a", intent: Intent | None = None
) -> Any:
    """The answer to a question for parts with these terms, read on node `a`. terms: fields of MatchRequest."""
    first, pool.id = pool.id + 1, pool.id + len(parts)
    requests = [
        MatchRequest(lease, "a", b"".join(keys), PAGE, 0, **terms)  # type: ignore[arg-type]
        for lease, (keys, terms) in enumerate(parts, first)
    ]
    return pool.directory.match_parts(pool.call(client), tuple(requests), intent, pool.now)


def found(got: MatchedParts) -> list[tuple[int, int]]:
    """(first leased block, number of leased blocks) of each part."""
    return [(part.first, blocks(part)) for part in got.parts]


@pytest.mark.parametrize(
    ("stored", "ahead", "leased"), [(4, 0, 4), (4, 1, 3), (3, 1, 2), (4, 3, 1), (4, 4, 0), (1, 9, 0)]
)
def test_blocks_ahead_are_ready_but_not_leased(stored: int, ahead: int, leased: int) -> None:
    pool = Pool()
    pool.store("a", FIRST[:stored])
    assert found(asked(pool, (FIRST, {"ahead": ahead}))) == [(0, leased)] * bool(leased)
    held = pool.directory.c.rows["holds"]
    assert int((held > 0).sum()) == leased


def test_a_window_and_the_blocks_ahead_of_it_have_no_gap() -> None:
    pool, keys = Pool(slots=20), KEYS[:8]
    pool.store("a", [keys[i] for i in (0, 2, 3, 4, 6, 7)])
    window = {"window": 2}
    assert found(asked(pool, (keys, window))) == [(6, 2)]
    assert found(asked(pool, (keys, window | {"ahead": 1}))) == [(2, 2)], "5 is missing, and nothing follows 7"
    assert asked(pool, (keys, window | {"ahead": 2})).parts == ()
    assert asked(pool, (keys[:4], window | {"ahead": 1})).parts == (), "4 was not asked for"
    assert found(asked(pool, (keys[:2], {"window": 2, "ahead": 0}))) == [(0, 1)], (
        "a prefix may be shorter than a window"
    )
    assert asked(pool, (keys[:2], {"window": 2, "ahead": 1})).parts == ()


def test_a_state_beside_a_drafter_ends_a_block_before_what_both_have() -> None:
    pool = Pool(slots=20)
    for keys in (FIRST, SECOND):
        pool.store("a", keys)
    assert found(asked(pool, (FIRST, {"window": 1}), (SECOND, {"ahead": 1}))) == [(2, 1), (0, 3)]
    assert found(asked(pool, (SECOND, {"ahead": 1}), (FIRST, {"window": 1}))) == [(0, 3), (2, 1)]


@pytest.mark.parametrize(("further", "states"), [(0, 2), (1, 3)])
def test_a_part_of_shorter_blocks_may_reach_one_block_further(further: int, states: int) -> None:
    """So the longest prefix is found whole."""
    pool, short = Pool(slots=40), KEYS[100 : 109 + further]
    pool.store("a", KEYS[:3])
    pool.store("a", short)
    got = asked(pool, (KEYS[:3], {"window": 1, "tokens": 288}), (short, {"tokens": 96, "ahead": 1}))
    assert found(got) == [(states - 1, 1), (0, 3 * states)]


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize(
    "terms",
    [({"ahead": 1}, {"ahead": 1}), ({}, {"ahead": 1}), ({"ahead": 1}, {}), ({"window": 1}, {"ahead": 1})],
)
def test_who_waits_for_blocks_ahead_waits_for_as_many_as_the_prefix_grows(
    terms: tuple[dict[str, int], ...], drafts: bool
) -> None:
    """drafts: the computing client asked for blocks ahead too, and so computes the last ready block again."""
    pool, keys = Pool(slots=40), (KEYS[:9], KEYS[100:109])
    parts = list(zip(keys, terms, strict=True))
    for part in keys:
        pool.store("a", part[:4])
    pool.held["one"] = [1000]
    computed = asked(
        pool, *(parts if drafts else [(part, {}) for part in keys]), client="one", intent=Intent(1000, True)
    )
    assert found(computed)[1] == (0, 3 if drafts else 4)
    assert asked(pool, *parts, client="two", intent=Intent(0, True)).pending == 5
    shorter = [(part[:4], each) for part, each in parts]
    assert asked(pool, *shorter, client="two", intent=Intent(0, True)).pending == 0, "as far as it asks"
    pool.held["one"] = []
    writes = [pool.reserve("a", part[4:6]) for part in keys]
    pool.heartbeat("one")
    assert asked(pool, *parts, client="two", intent=Intent(0, True)).pending == 2, "they are being written"
    for (hold, granted), part in zip(writes, keys, strict=True):
        pool.commit("a", hold, granted, part[4:6])
    got = asked(pool, *parts, client="two", intent=Intent(0, True))
    assert got.pending == 0 and found(got)[1] == (0, 5)


def test_nobody_waits_for_a_block_that_the_blocks_ahead_take() -> None:
    pool, keys = Pool(), KEYS[:6]
    pool.store("a", keys[:1])
    asked(pool, (keys[:2], {}), client="one", intent=Intent(1000, True))
    assert asked(pool, (keys, {}), client="two", intent=Intent(0, True)).pending == 1
    assert asked(pool, (keys, {"ahead": 1}), client="two", intent=Intent(0, True)).pending == 1
    assert asked(pool, (keys, {"ahead": 2}), client="two", intent=Intent(0, True)).pending == 0


@pytest.mark.parametrize("ahead", [-1, 1 << 31, 1 << 64, None, "1", 1.0])
def test_blocks_ahead_that_are_no_count_are_no_message(ahead: Any) -> None:
    pool = Pool()
    pool.store("a", FIRST)
    with pytest.raises(ValueError, match="ahead: give counts"):
        asked(pool, (FIRST, {"ahead": ahead}))
    assert asked(pool, (FIRST, {"ahead": (1 << 31) - 1, "window": (1 << 31) - 1})).parts == ()
    assert pool.directory.stats(pool.now)["leases"] == 0
