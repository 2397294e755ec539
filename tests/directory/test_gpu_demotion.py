"""GPUs as nodes of their own: who stores there, and what goes down to the memory of their node, by example."""

import pytest
from helpers.directory_checks import chain_of, check_invariants
from helpers.directory_pool import KEYS, PAGE, Pool, primary
from helpers.directory_tiers import heartbeat, tell
from helpers.oracle.slots import LOCATION, split, unpack

from raykv.directory import demotion, tier_catalog
from raykv.protocol import GpuDemotions, Inventory

GPU = "a/0"
LAST_FIRST = KEYS[6::-1]  # a batch of 7 is let go last to first: these are the oldest first


def pool_of(*nodes: str) -> Pool:
    """Nodes and GPUs with room for 7 blocks, beside a staging window of one. A quarter of a GPU's slots is 2."""
    return Pool(nodes=nodes or ("a", GPU))


def cooled_down(*nodes: str) -> Pool:
    """A full GPU of which the two oldest blocks went down."""
    pool = pool_of(*nodes)
    pool.store(GPU, KEYS[:7])
    pool.demote_gpu(GPU, pool.demote_gpu(GPU))
    return pool


def total(pool: Pool, counter: str) -> int:
    return int(pool.directory.stats(pool.now)[counter])


# ---------------------------------------------------------------------- who stores there


def test_a_gpu_takes_only_the_blocks_of_its_own_clients() -> None:
    pool = pool_of("a", GPU, "b")
    assert {*pool.store("a", KEYS[:14]), *pool.store("b", KEYS[20:34])} == {"a", "b"}
    assert pool.count("free", GPU) == 0, "not a slab of it was opened"
    assert pool.store(GPU, KEYS[40:44]) == [GPU] * 4


def test_other_gpus_and_nodes_that_read_a_gpu_find_its_blocks() -> None:
    pool = pool_of("a", GPU, "a/1", "b")
    pool.store(GPU, KEYS[:3])
    assert [pool.read(node, KEYS[:4]) for node in ("a", "a/1", "b", GPU)] == [3, 3, 3, 3]


def test_what_a_gpu_has_no_room_for_goes_to_its_own_node_first() -> None:
    pool = pool_of("b", "a", GPU)
    pool.store("b", KEYS[100:101])  # a slab of that size is there
    assert pool.store(GPU, KEYS[:7]) == [GPU] * 7
    assert pool.store(GPU, KEYS[7:8]) == ["a"]


def test_a_gpu_evicts_its_own_where_nobody_else_has_anything_to_evict() -> None:
    pool = pool_of(GPU)
    assert pool.store(GPU, KEYS[:7]) == [GPU] * 7
    assert pool.store(GPU, KEYS[7:9]) == [GPU] * 2
    assert pool.has(KEYS[:9]) == [True] * 5 + [False] * 2 + [True] * 2


# ---------------------------------------------------------------------- what goes down


def test_the_oldest_of_a_gpu_go_down_until_a_quarter_of_it_can_be_had_for_nothing() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:5])
    assert pool.demote_gpu(GPU).keys == b"", "two are free beside the window"
    pool.store(GPU, KEYS[5:7])
    pool.read(GPU, KEYS[:5])
    got = pool.demote_gpu(GPU)
    assert split(got.keys) == [KEYS[6], KEYS[5]]
    assert {location[0] for location in unpack(got.source)} == {pool.directory.nodes[GPU].index}
    assert {location[0] for location in unpack(got.target)} == {pool.directory.nodes["a"].index}


def test_a_block_is_read_from_its_gpu_until_it_is_in_memory_and_then_that_is_the_primary() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    assert pool.count("demoting") == 2 and primary(pool, KEYS[6]) == GPU
    assert pool.demote_gpu(GPU, got).keys == b""
    assert (pool.count("ready"), pool.count("replica", GPU), pool.count("ready", GPU)) == (2, 2, 5)
    assert [primary(pool, key) for key in KEYS[4:7]] == [GPU, "a", "a"]
    assert total(pool, "gpu_demoted") == 2


def test_what_was_cooled_goes_first_on_the_gpu_the_oldest_before_others() -> None:
    pool = pool_of("a", GPU, "b")
    pool.store("b", KEYS[20:21])
    pool.store(GPU, KEYS[:6])
    pool.replicate(GPU, KEYS[20:21])  # a replica before anything is cooled
    pool.store(GPU, KEYS[6:7])
    pool.demote_gpu(GPU, pool.demote_gpu(GPU))
    on_gpu = [KEYS[20], *KEYS[:7]]
    for gone in (KEYS[5], KEYS[4]):
        pool.store(GPU, [KEYS[50 + len(on_gpu)]])
        on_gpu.remove(gone)
        index_there = pool.directory.nodes[GPU].index
        assert [key for key in [KEYS[20], *KEYS[:7]] if index_there in locations(pool, key)] == on_gpu
    assert all(pool.has(KEYS[:7])), "in memory they all are"


def locations(pool: Pool, key: bytes) -> set[int]:
    """Indices of the nodes that have a copy."""
    c = pool.directory._size_classes.c
    return {
        int(c.size_classes[c.slabs[c.pages[row >> 6]]["size_class"]]["node"]) for row in chain_of(pool.directory, key)
    }


def test_the_oldest_in_memory_makes_room_for_what_goes_down() -> None:
    pool = pool_of()
    pool.store("a", KEYS[20:27])
    pool.store(GPU, KEYS[:7])
    pool.demote_gpu(GPU, pool.demote_gpu(GPU))
    assert pool.has(KEYS[20:27]) == [True] * 5 + [False] * 2
    assert all(pool.has(KEYS[:7])) and pool.count("ready") == 7


def test_only_the_memory_of_its_own_node_is_given_to_a_gpu() -> None:
    pool = pool_of("a", GPU, "b")
    pool.store("a", KEYS[20:27])
    pool.store(GPU, KEYS[:7])
    pool.demote_gpu(GPU, pool.demote_gpu(GPU))
    assert pool.directory.stats(pool.now)["nodes"]["b"]["slabs"] == 0


def test_blocks_that_fit_in_no_slab_of_the_node_stay_on_its_gpu() -> None:
    pool = Pool(nodes="a", slots=2)
    pool.slots = 9
    pool.add(GPU)
    pool.store(GPU, KEYS[:3], size=3 * PAGE)
    assert pool.demote_gpu(GPU).keys == b"" and pool.count("ready", GPU) == 2


def test_large_blocks_go_down_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "BYTES_PER_CALL", 1)
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    assert split(got.keys) == [KEYS[6]]
    assert split(pool.demote_gpu(GPU, got).keys) == [KEYS[5]]


def test_a_block_that_went_down_knows_how_often_it_was_asked_for() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    for _ in range(2):
        pool.read(GPU, KEYS[:7])
    pool.demote_gpu(GPU, pool.demote_gpu(GPU))
    rows = pool.directory._size_classes.c.rows
    assert [int(rows[row]["uses"]) for row in chain_of(pool.directory, KEYS[6])] == [2, 2]


def test_a_block_that_sinks_into_memory_is_not_taken_to_lie_in_the_tier_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_catalog, "slab_bytes", lambda _: 8 * PAGE)
    pool = Pool(nodes=("a", GPU), share=1.0)
    heartbeat(pool)
    tell(pool, [])
    sinking_alone(pool, GPU)
    pool.store("a", KEYS[5:7])  # again, while it is copied
    assert {*split(pool.demote("a").keys)} == {*KEYS[5:7]}


def test_a_block_goes_down_once_though_it_is_stored_again_on_another_gpu() -> None:
    pool = pool_of("a", GPU, "a/1")
    got = sinking_alone(pool, GPU)
    pool.store("a/1", [*KEYS[20:25], *KEYS[5:7]])
    assert split(pool.demote_gpu("a/1").keys) == KEYS[24:22:-1]
    pool.demote_gpu(GPU, got)
    assert [primary(pool, key) for key in KEYS[5:7]] == ["a", "a"] and pool.count("replica", "a/1") == 2


def sinking_alone(pool: Pool, gpu: str) -> GpuDemotions:
    """Two blocks go down from a GPU, where they are gone before they came down."""
    pool.store(gpu, KEYS[:7])
    got = pool.demote_gpu(gpu)
    pool.heartbeat(gpu, corrupt=got.source)
    assert not any(pool.has(KEYS[5:7])) and pool.count("demoting") == 2
    return got


# ---------------------------------------------------------------------- what became of it


def test_what_did_not_go_down_is_to_be_swept_and_goes_down_again() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    again = pool.demote_gpu(GPU, got, stored=bytes([1, 0]))
    assert split(again.keys) == [KEYS[5]]
    assert (pool.count("ready"), pool.count("quarantined"), pool.count("demoting")) == (1, 1, 1)


def test_what_nothing_is_said_of_did_not_go_down() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    pool.demote_gpu(GPU)
    assert split(pool.demote_gpu(GPU).keys) == LAST_FIRST[:2]
    assert (pool.count("quarantined"), pool.count("demoting")) == (2, 2)


def test_what_is_said_again_or_of_an_earlier_answer_counts_for_nothing() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    first = pool.demote_gpu(GPU)
    second = pool.demote_gpu(GPU)
    assert pool.demote_gpu(GPU, first).keys and pool.count("ready") == 0
    assert (pool.count("quarantined"), pool.count("demoting")) == (4, 2), "nothing was said of the second"
    pool.demote_gpu(GPU, second)
    assert (pool.count("ready"), total(pool, "gpu_demoted")) == (0, 0)


def test_a_late_answer_is_refused_by_another_life_of_the_store() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    location = unpack(got.target)[0]
    index, _ = pool.join("a", nonce=b"again")
    found = LOCATION.pack(
        index, location[1], location[2], PAGE, *location[4:]
    )  # it was written, and is there under its generation
    pool.adopt("a", Inventory(found, KEYS[6], bytes(4), bytes(4), b""), offered=1)
    lease, _ = pool.match("a", KEYS[6:7])
    pool.directory.clear(pool.now)
    assert pool.count("dropped") == 1
    pool.demote_gpu(GPU, got)
    assert (pool.count("dropped"), total(pool, "gpu_demoted")) == (1, 0)
    pool.release("a", lease)
    check_invariants(pool.directory)


def test_what_goes_down_from_a_gpu_that_is_gone_is_to_be_swept() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    pool.demote_gpu(GPU)
    assert pool.directory.remove_node(GPU, pool.now) == 8
    assert (pool.count("demoting"), pool.count("quarantined")) == (0, 2)
    assert list(pool.directory.nodes) == ["a"]


def test_what_is_cleared_on_its_way_down_is_not_stored_there() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    pool.directory.clear(pool.now)
    assert pool.count("dropped") == 2
    pool.demote_gpu(GPU, got)
    assert pool.count("quarantined") == 2 and not pool.keys()


# ---------------------------------------------------------------------- copies elsewhere


def test_a_copy_in_memory_is_the_primary_and_the_pin_is_there() -> None:
    pool = pool_of("a", GPU, "b")
    pool.store(GPU, KEYS[:1])
    pool.directory.pin(pool.call(GPU), KEYS[0], pool.now)
    pool.replicate("b", KEYS[:1])
    assert primary(pool, KEYS[0]) == "b" and pool.count("replica", GPU) == 1
    rows = pool.directory._size_classes.c.rows
    assert {int(rows[row]["holds"]) for row in pool.directory.pins.rows()} == {1}
    check_invariants(pool.directory)


def test_a_copy_on_another_gpu_is_a_replica() -> None:
    pool = pool_of("a", GPU, "a/1")
    pool.store(GPU, KEYS[:1])
    pool.replicate("a/1", KEYS[:1])
    assert primary(pool, KEYS[0]) == GPU and pool.count("replica", "a/1") == 1


@pytest.mark.parametrize("order", [("a", GPU), (GPU, "a")])
def test_after_a_restart_of_the_directory_the_copy_in_memory_is_the_primary(order: tuple[str, str]) -> None:
    pool = pool_of(*order)
    pool.directory = type(pool.directory)()
    for name in order:
        index, _ = pool.join(name)
        location = LOCATION.pack(index, 0, 0, PAGE, 1, 7)
        pool.adopt(name, Inventory(location, KEYS[0], bytes(4), bytes(4), b""), offered=1)
    assert primary(pool, KEYS[0]) == "a" and pool.count("replica", GPU) == 1


# ---------------------------------------------------------------------- a node and its GPUs


def test_a_node_that_leaves_takes_its_gpus_along() -> None:
    pool = cooled_down("a", GPU, "b")
    pool.directory.leave("a", pool.now)
    assert pool.reserve(GPU, KEYS[50:51])[1].locations == b"" and pool.demote_gpu(GPU).keys == b""
    going = pool.directory.sole_copies("a", pool.now)
    assert going and going.total == 7 and sorted(split(going.keys)) == KEYS[:7], "each of them once"
    pool.replicate("b", KEYS[:1])
    going = pool.directory.sole_copies("a", pool.now)
    assert going and sorted(split(going.keys)) == KEYS[1:7]
    assert pool.directory.remove_node("a", pool.now) == 16
    assert list(pool.directory.nodes) == ["b"] and pool.has(KEYS[:2]) == [True, False]


def test_a_gpu_of_a_node_that_leaves_leaves_too_when_it_joins_later() -> None:
    pool = pool_of("a", "b")
    pool.directory.leave("a", pool.now)
    pool.add(GPU)
    assert pool.directory.stats(pool.now)["nodes"][GPU]["state"] == "leaving"


def test_a_block_counts_once_where_it_is_on_a_gpu_and_in_its_nodes_memory() -> None:
    pool = cooled_down("a", GPU, "b")
    pool.store("b", KEYS[7:8])
    pool.read(GPU, KEYS[:7])
    assert pool.directory.locate_prefix(b"".join(KEYS[:8])) == {"a": 7, "b": 1}


def test_hits_are_told_apart_by_where_they_are() -> None:
    pool = cooled_down("a", GPU, "b")
    pool.store("b", KEYS[7:8])
    pool.store(GPU, KEYS[8:10])  # one is free, the other takes the place of what went down first
    got = [total(pool, name) for name in ("hits", "gpu_hits", "promoted", "remote_hits")]
    pool.read(GPU, KEYS[:6])
    pool.read(GPU, KEYS[6:7])
    pool.read(GPU, KEYS[7:8])
    pool.read("a", KEYS[5:7])
    pool.read("a", KEYS[:1])
    now = [total(pool, name) for name in ("hits", "gpu_hits", "promoted", "remote_hits")]
    assert [after - before for after, before in zip(now, got, strict=True)] == [11, 6, 1, 2]
    tiers = {name: node["tier"] for name, node in pool.directory.stats(pool.now)["nodes"].items()}
    assert tiers == {"a": "cpu", GPU: "gpu", "b": "cpu"}
