"""Nodes that are about to leave, by example."""

import struct
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import LOCATION, split, unpack
from helpers.directory.pool import KEYS, PAGE, Pool, primary
from helpers.directory.tiers import heartbeat, tiered
from helpers.pools import eventually

from raykv import cluster
from raykv.actors.supervisor import drain, supervisor
from raykv.cluster import internal_kv, named_actors
from raykv.directory.calls import nodes
from raykv.line.periodic import Periodic
from raykv.protocol.stores import Inventory

pytestmark = pytest.mark.usefixtures("small_slabs")


def leave(pool: Pool, node: str) -> None:
    pool.directory.leave(node, pool.now)


def sole_copies(pool: Pool, node: str) -> list[bytes]:
    """The listed keys that would be lost with a node."""
    answer = pool.directory.sole_copies(node, pool.now)
    there = unpack(answer.locations if answer else b"")
    assert {(location[0], location[3]) for location in there} <= {(pool.directory.nodes[node].index, PAGE)}
    check_invariants(pool.directory)
    return split(answer.keys if answer else b"")


def left(pool: Pool, node: str) -> int | None:
    """How many blocks would be lost with a node; None if that is not known."""
    answer = pool.directory.sole_copies(node, pool.now)
    return None if answer is None else answer.total


def pin(pool: Pool, keys: list[bytes], node: str = "a") -> int:
    return pool.directory.pin(pool.call(node), b"".join(keys), pool.now).done


def join_with(pool: Pool, name: str, keys: list[bytes], nonce: bytes = b"") -> None:
    """A node joins. Its arena of 8 slots has these blocks, the oldest first."""
    joined = pool.join(name, nonce)
    fields = [(joined.node, 0, slot, PAGE, 1, 2) for slot in range(len(keys))]
    locations = b"".join(LOCATION.pack(*at) for at in fields)
    numbers = struct.pack(f"<{len(keys)}I", *range(len(keys)))
    pool.adopt(name, Inventory(locations, b"".join(keys), bytes(4 * len(keys)), numbers, b""), offered=1)
    check_invariants(pool.directory)


def test_sole_copies_of_a_node_that_leaves_are_listed_youngest_first() -> None:
    pool = Pool(nodes="ab")
    pool.store("a", KEYS[:4])
    assert sole_copies(pool, "a") == [], "it stays"
    leave(pool, "a")
    assert sole_copies(pool, "a") == KEYS[:4] and sole_copies(pool, "b") == []
    pool.read("a", KEYS[2:4])
    assert sole_copies(pool, "a") == [*KEYS[2:4], *KEYS[:2]]
    assert pool.directory.stats(pool.now)["nodes"]["a"]["state"] == "leaving"


def test_sole_copies_are_listed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SOLE_COPIES_PER_CALL", 2)
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[:5])
    leave(pool, "a")
    for keys in (KEYS[:5], KEYS[2:5], KEYS[4:5]):
        assert sole_copies(pool, "a") == keys[:2] and left(pool, "a") == len(keys)
        pool.replicate("b", keys[:2])
    assert sole_copies(pool, "a") == [] and left(pool, "a") == 0


def test_blocks_being_written_count_as_sole_copies() -> None:
    pool = Pool(nodes="ab")
    hold, got = pool.reserve("a", KEYS[:2])
    leave(pool, "a")
    assert sole_copies(pool, "a") == [] and left(pool, "a") == 2
    pool.commit("a", hold, got, KEYS[:2])
    assert sole_copies(pool, "a") == KEYS[:2] and left(pool, "a") == 2


def test_held_sole_copies_are_listed_after_those_that_nobody_holds() -> None:
    pool = Pool(nodes="ab")
    pool.store("a", KEYS[:7])
    for keys in (KEYS[6:7], KEYS[:5]):
        pool.read("a", keys)
    lease, _ = pool.match("a", KEYS[5:7])  # the oldest
    leave(pool, "a")
    assert sole_copies(pool, "a") == [*KEYS[:5], *KEYS[5:7]], "in whatever order an eviction would meet them"
    pool.release("a", lease)
    assert sole_copies(pool, "a") == [*KEYS[5:7], *KEYS[:5]]


def test_a_replica_on_a_node_that_stays_becomes_the_primary() -> None:
    pool = Pool(nodes="ab", window=3)
    pool.store("a", KEYS[:3])
    pool.replicate("b", KEYS[:2])
    assert pool.count("replica", "b") == 2 and primary(pool, KEYS[0]) == "a"
    leave(pool, "a")
    assert sole_copies(pool, "a") == KEYS[2:3]
    assert [primary(pool, key) for key in KEYS[:3]] == ["b", "b", "a"]
    assert (pool.count("ready", "b"), pool.count("replica", "a")) == (2, 2)
    pool.store("b", KEYS[10:13])  # takes slots that replicas had
    pool.directory.remove_node("a", pool.now)
    assert pool.has(KEYS[:3]) == [True, True, False]


def test_promoted_replicas_evict_at_most_as_many_old_blocks() -> None:
    pool = Pool(nodes="ab", window=3)
    pool.store("a", KEYS[:2])
    pool.store("b", KEYS[10:15])
    pool.replicate("b", KEYS[:2])
    leave(pool, "a")
    sole_copies(pool, "a")
    assert pool.has(KEYS[10:15]) == [True] * 3 + [False] * 2 and pool.count("free", "b") == 3


def test_promoted_replicas_may_open_slabs_while_sole_copies_are_listed() -> None:
    pool = Pool(slots=128, nodes="ab", window=64, slabs=1)
    pool.store("a", KEYS[:60])
    pool.store("b", KEYS[100:164])
    pool.replicate("b", KEYS[:50])
    pool.directory.heartbeat("b", 3, pool.now)  # offers spare slabs, whose rows are new
    lease, _ = pool.match("a", KEYS[55:60])  # the oldest
    leave(pool, "a")
    assert sole_copies(pool, "a") == KEYS[50:60]
    assert len(pool.directory.nodes["b"].slabs) > 1 and all(pool.has(KEYS[100:164]))
    pool.release("a", lease)
    check_invariants(pool.directory)


def test_a_copy_on_another_node_that_leaves_saves_no_block() -> None:
    pool = Pool(nodes="abc", window=2)
    pool.store("a", KEYS[:1])
    pool.replicate("b", KEYS[:1])
    leave(pool, "a")
    leave(pool, "b")
    assert sole_copies(pool, "a") == [] and sole_copies(pool, "b") == KEYS[:1] and primary(pool, KEYS[0]) == "b"
    pool.replicate("c", KEYS[:1])
    assert sole_copies(pool, "b") == [] and primary(pool, KEYS[0]) == "c"


def test_a_block_pulled_to_a_node_that_leaves_is_no_primary_there() -> None:
    """As the primary the block would be lost with that node, whose drain is over."""
    pool = Pool(nodes="abc", window=2)
    pool.store("a", KEYS[:2])
    leave(pool, "b")
    leave(pool, "a")
    pool.replicate("b", KEYS[:1])
    assert sole_copies(pool, "a") == KEYS[:2] and left(pool, "b") == 0
    pool.replicate("c", KEYS[:2])
    assert left(pool, "a") == left(pool, "b") == 0 and primary(pool, KEYS[0]) == "c"


def test_a_directory_that_knows_who_leaves_before_nodes_join_keeps_copies_on_nodes_that_stay() -> None:
    pool = Pool(nodes="", window=2)
    leave(pool, "a")
    for name in "ab":
        join_with(pool, name, KEYS[:2] if name == "a" else [*KEYS[:2], *KEYS[10:14]])
    assert sole_copies(pool, "a") == [] and [primary(pool, key) for key in KEYS[:2]] == ["b", "b"]
    join_with(pool, "a", KEYS[:3], nonce=b"another")
    assert sole_copies(pool, "a") == KEYS[2:3], "a new store of it leaves, too"
    pool.directory.remove_node("a", pool.now)
    pool.add("a")
    assert pool.directory.stats(pool.now)["nodes"]["a"]["state"] == "alive", "a node that comes back is not leaving"


def test_an_arena_that_is_found_full_has_a_staging_window_again() -> None:
    pool = Pool(nodes="", window=2)
    join_with(pool, "a", KEYS[:8])
    pool.add("b")
    pool.store("b", KEYS[10:12])
    assert pool.has(KEYS[:8]) == [False] * 2 + [True] * 6, "the oldest made room"
    assert pool.read("a", KEYS[10:12]) == 2


def test_a_block_pulled_from_a_node_that_leaves_becomes_the_primary() -> None:
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[:2])
    leave(pool, "a")
    lease, got = pool.match("b", KEYS[:1])
    assert sole_copies(pool, "a") == KEYS[:2], "it is not there yet"
    pool.heartbeat("b", pulled=got.staged)
    assert (primary(pool, KEYS[0]), primary(pool, KEYS[1])) == ("b", "a")
    assert sole_copies(pool, "a") == KEYS[1:2]
    pool.release("b", lease)
    pool.directory.remove_node("a", pool.now)
    assert pool.has(KEYS[:2]) == [True, False]
    check_invariants(pool.directory)


@pytest.mark.parametrize("shared", [True, False])
def test_only_a_tier_that_other_nodes_reach_saves_blocks(shared: bool) -> None:
    pool = tiered(nodes="ab", shared=shared, share=1.0)
    pool.store("a", KEYS[:2])
    demoting = pool.demote("a")
    leave(pool, "a")
    assert sole_copies(pool, "a") == KEYS[:2], "it is not there yet"
    pool.demote("a", demoting)
    assert sole_copies(pool, "a") == ([] if shared else KEYS[:2])
    heartbeat(pool, "b", shared=shared, reached=False)
    assert sole_copies(pool, "a") == KEYS[:2]


def test_a_drain_counts_what_a_directory_that_restarts_does_not_know_as_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(nodes="ab")
    pool.store("a", KEYS[:4])
    answers = [None, pool.directory.sole_copies]
    alive = [{"a", "b"}, {"b"}]  # at the second look a is gone

    def call(function: Any) -> Any:
        return SimpleNamespace(remote=function)

    def left_now(node: str) -> Any:
        answer = answers.pop(0)
        return answer and answer(node, pool.now)

    there = SimpleNamespace(
        leave=call(partial(leave, pool)), sole_copies=call(left_now), flush_to_shared=call(lambda _: False)
    )
    for name in ("find", "find_directory"):
        monkeypatch.setattr(named_actors, name, lambda _: there)
    monkeypatch.setattr(internal_kv, "put", lambda *_: True)
    monkeypatch.setattr(internal_kv, "names", lambda *_: ["a"])
    monkeypatch.setattr(drain, "_take_over", SimpleNamespace(options=lambda **_: call(lambda *_: None)))
    monkeypatch.setattr(drain, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(cluster, "living", lambda: alive.pop(0))
    asked = SimpleNamespace(get=lambda answer, timeout: answer, wait=lambda *_, **__: None)
    monkeypatch.setattr(drain, "ray", asked)
    assert drain.drain("p", "a", 30.0) == 4 and not alive


def test_a_notice_is_answered_until_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [7, ValueError("no directory"), 0]
    answered = []

    def drain(pool: str, node_id: str, seconds: float) -> int:
        answered.append(answer := answers.pop(0))
        if isinstance(answer, ValueError):
            raise answer
        return int(answer)

    watch = supervisor.Supervisor.__new__(supervisor.Supervisor)
    loop = Periodic("", lambda: None, lambda _: None)
    idle = SimpleNamespace(without_store=set())
    watch_has = {"_pool": "p", "_stores": {"n": None}, "_draining": set(), "_idle": idle}
    vars(watch).update(watch_has, _telling=threading.Lock(), _loop=loop)
    monkeypatch.setattr(supervisor, "DRAIN_AGAIN_S", 0.0)
    monkeypatch.setattr(supervisor, "drain", drain)
    monkeypatch.setattr(supervisor, "_noticed", lambda: {"n": 30.0})
    monkeypatch.setattr(internal_kv, "names", lambda *_: [])
    monkeypatch.setattr(internal_kv, "drop", lambda *_: None)
    for tries in (1, 2, 3, 3):
        watch._look_for_leaving(None, {"n"})
        eventually(lambda tries=tries: len(answered) == tries and ("n" in watch._draining) == (tries == 3))  # type: ignore[misc]
    answers.append(1)
    assert watch.drain("n", 30.0, force=True) == 1 and not watch._draining, "somebody's own, which ends short"


def test_nothing_is_placed_on_a_node_that_leaves() -> None:
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[50:51])
    leave(pool, "a")
    assert pool.store("a", KEYS[:1]) == [], "not even by clients on it"
    assert set(pool.store("b", KEYS[:9])) == {"b"} and pool.count("free", "a") == 7
    pool.add("c")
    assert pool.store("b", KEYS[10:12]) == ["c", "c"]


def test_a_node_that_leaves_evicts_nothing_for_others_and_gives_them_no_slab() -> None:
    pool = Pool(nodes="ab", window=2, locality=1.0, slabs=1)
    pool.store("a", KEYS[:6])
    pool.store("b", KEYS[10:16])
    leave(pool, "a")
    assert pool.store("b", KEYS[20:22]) == ["b", "b"], "though blocks on a are older"
    assert all(pool.has(KEYS[:6]))
    pool.add("c")
    leave(pool, "c")
    assert pool.store("b", KEYS[22:24]) == ["b", "b"]
    assert pool.directory.stats(pool.now)["nodes"]["c"]["spare_slabs"] == 1


def test_a_node_that_leaves_is_read_until_it_is_gone() -> None:
    pool = Pool(nodes="ab", window=2)
    pool.store("a", KEYS[:2])
    leave(pool, "a")
    assert pool.read("a", KEYS[:2]) == pool.read("b", KEYS[:2]) == 2
    pool.tick(4.0, alive="b")
    pool.tick(1.0)  # the node answers again after a silence
    assert pool.store("a", KEYS[5:6]) == [] and pool.read("b", KEYS[:2]) == 2
    pool.directory.remove_node("a", pool.now)
    pool.add("a")
    assert pool.store("a", KEYS[5:6]) == ["a"], "a node that comes back is not leaving"


def test_sole_copies_of_a_node_that_is_not_adopted_yet_are_unknown() -> None:
    """If the count were 0, a drain during a restart of the directory would end at once, and lose all blocks."""
    pool = Pool()
    leave(pool, "x")
    assert left(pool, "x") is None
    pool.join("x")
    assert left(pool, "x") is None
    pool.adopt("x", offered=1)
    assert left(pool, "x") == 0


def test_a_pin_moves_to_the_promoted_replica() -> None:
    pool = Pool(nodes="ab", window=3)
    pool.store("a", KEYS[:2])
    pool.replicate("b", KEYS[:1])
    pin(pool, KEYS[:2])
    leave(pool, "a")
    assert sole_copies(pool, "a") == KEYS[1:2]
    pool.replicate("b", KEYS[1:2])
    pool.store("b", KEYS[10:18])
    assert sole_copies(pool, "a") == [] and pool.directory.remove_node("a", pool.now)
    assert pool.has(KEYS[:2]) == [True] * 2 and len(pool.directory.pins) == 2


def test_a_leaving_node_hands_its_primaries_to_replicas_at_once() -> None:
    pool = Pool(nodes="ab", window=3)
    pool.store("a", KEYS[:2])
    pool.replicate("b", KEYS[:2])
    leave(pool, "a")
    assert [primary(pool, key) for key in KEYS[:2]] == ["b", "b"] and sole_copies(pool, "a") == []
