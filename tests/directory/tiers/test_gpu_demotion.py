"""GPUs as nodes of their own: whose blocks a GPU stores, and which of them are demoted to memory, by example."""

import pytest
from helpers.directory.checks import check_invariants, rows_of
from helpers.directory.oracle.slots import LOCATION, split, unpack
from helpers.directory.pool import KEYS, PAGE, Pool, primary
from helpers.directory.tiers import heartbeat, list_existing

from raykv.directory.state import gpu_demotion, tier_catalog
from raykv.protocol.stores import Inventory
from raykv.protocol.tiers import GpuDemotions

GPU = "a/0"
LAST_FIRST = KEYS[6::-1]  # oldest first: holds on a batch end with the batch's last key first


def pool_of(*nodes: str) -> Pool:
    """Nodes and GPUs with room for 7 blocks, and a staging window of one slot. A quarter of the slots is 2."""
    return Pool(nodes=nodes or ("a", GPU))


def with_demoted_blocks(*nodes: str) -> Pool:
    """A full GPU, after its two oldest blocks were demoted."""
    pool = pool_of(*nodes)
    pool.store(GPU, KEYS[:7])
    pool.demote_gpu(GPU, pool.demote_gpu(GPU))
    return pool


def total(pool: Pool, counter: str) -> int:
    return int(pool.directory.stats(pool.now)[counter])


# ---------------------------------------------------------------------- whose blocks are stored there


def test_a_gpu_takes_only_the_blocks_of_its_own_clients() -> None:
    pool = pool_of("a", GPU, "b")
    assert {*pool.store("a", KEYS[:14]), *pool.store("b", KEYS[20:34])} == {"a", "b"}
    assert pool.count("free", GPU) == 0, "no slab of it was opened"
    assert pool.store(GPU, KEYS[40:44]) == [GPU] * 4


def test_other_gpus_and_nodes_that_read_a_gpu_find_its_blocks() -> None:
    pool = pool_of("a", GPU, "a/1", "b")
    pool.store(GPU, KEYS[:3])
    assert [pool.read(node, KEYS[:4]) for node in ("a", "a/1", "b", GPU)] == [3, 3, 3, 3]


def test_blocks_that_a_gpu_has_no_room_for_are_stored_on_its_own_node_first() -> None:
    pool = pool_of("b", "a", GPU)
    pool.store("b", KEYS[100:101])  # so b has a slab of that size
    assert pool.store(GPU, KEYS[:7]) == [GPU] * 7
    assert pool.store(GPU, KEYS[7:8]) == ["a"]


def test_a_gpu_evicts_its_own_blocks_where_no_node_has_any() -> None:
    pool = pool_of(GPU)
    assert pool.store(GPU, KEYS[:7]) == [GPU] * 7
    assert pool.store(GPU, KEYS[7:9]) == [GPU] * 2
    assert pool.has(KEYS[:9]) == [True] * 5 + [False] * 2 + [True] * 2


# ---------------------------------------------------------------------- which blocks are demoted


def test_the_oldest_blocks_of_a_gpu_are_demoted_until_a_quarter_of_its_slots_is_free_or_clean() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:5])
    assert pool.demote_gpu(GPU).keys == b"", "two are free beside the window"
    pool.store(GPU, KEYS[5:7])
    pool.read(GPU, KEYS[:5])
    got = pool.demote_gpu(GPU)
    assert split(got.keys) == [KEYS[6], KEYS[5]]
    assert {location[0] for location in unpack(got.source)} == {pool.directory.nodes[GPU].index}
    assert {location[0] for location in unpack(got.target)} == {pool.directory.nodes["a"].index}


def test_the_gpu_has_the_primary_until_the_demoted_copy_is_stored() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    assert pool.count("demoting") == 2 and primary(pool, KEYS[6]) == GPU
    assert pool.demote_gpu(GPU, got).keys == b""
    assert (pool.count("ready"), pool.count("replica", GPU), pool.count("ready", GPU)) == (2, 2, 5)
    assert [primary(pool, key) for key in KEYS[4:7]] == [GPU, "a", "a"]
    assert total(pool, "gpu_demoted") == 2


def test_demoted_blocks_are_evicted_from_the_gpu_first_oldest_first() -> None:
    pool = pool_of("a", GPU, "b")
    pool.store("b", KEYS[20:21])
    pool.store(GPU, KEYS[:6])
    pool.replicate(GPU, KEYS[20:21])  # makes a replica before anything is demoted
    pool.store(GPU, KEYS[6:7])
    pool.demote_gpu(GPU, pool.demote_gpu(GPU))
    on_gpu = [KEYS[20], *KEYS[:7]]
    for gone in (KEYS[5], KEYS[4]):
        pool.store(GPU, [KEYS[50 + len(on_gpu)]])
        on_gpu.remove(gone)
        index_there = pool.directory.nodes[GPU].index
        assert [key for key in [KEYS[20], *KEYS[:7]] if index_there in nodes_with(pool, key)] == on_gpu
    assert all(pool.has(KEYS[:7])), "in memory they all are"


def nodes_with(pool: Pool, key: bytes) -> set[int]:
    c = pool.directory.c
    return {
        int(c.size_classes[c.slabs[c.pages[row >> 6]]["size_class"]]["node"]) for row in rows_of(pool.directory, key)
    }


def test_the_oldest_block_in_memory_is_evicted_for_a_demoted_one() -> None:
    pool = pool_of()
    pool.store("a", KEYS[20:27])
    pool.store(GPU, KEYS[:7])
    pool.demote_gpu(GPU, pool.demote_gpu(GPU))
    assert pool.has(KEYS[20:27]) == [True] * 5 + [False] * 2
    assert all(pool.has(KEYS[:7])) and pool.count("ready") == 7


def test_a_gpu_is_demoted_to_the_memory_of_its_own_node_only() -> None:
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


def test_large_blocks_are_demoted_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_demotion, "BYTES_PER_CALL", 1)
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    assert split(got.keys) == [KEYS[6]]
    assert split(pool.demote_gpu(GPU, got).keys) == [KEYS[5]]


def test_a_demoted_block_keeps_its_count_of_matches() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    for _ in range(2):
        pool.read(GPU, KEYS[:7])
    pool.demote_gpu(GPU, pool.demote_gpu(GPU))
    rows = pool.directory.c.rows
    assert [int(rows[row]["uses"]) for row in rows_of(pool.directory, KEYS[6])] == [2, 2]


def test_a_block_being_demoted_to_memory_does_not_count_as_being_in_the_external_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_catalog, "slab_bytes", lambda _: 8 * PAGE)
    pool = Pool(nodes=("a", GPU), share=1.0)
    heartbeat(pool)
    list_existing(pool, [])
    demoted_but_gone(pool, GPU)
    pool.store("a", KEYS[5:7])  # store the blocks again while they are copied
    assert {*split(pool.demote("a").keys)} == {*KEYS[5:7]}


def test_a_block_is_demoted_once_though_it_is_stored_again_on_another_gpu() -> None:
    pool = pool_of("a", GPU, "a/1")
    got = demoted_but_gone(pool, GPU)
    pool.store("a/1", [*KEYS[20:25], *KEYS[5:7]])
    assert split(pool.demote_gpu("a/1").keys) == KEYS[24:22:-1]
    pool.demote_gpu(GPU, got)
    assert [primary(pool, key) for key in KEYS[5:7]] == ["a", "a"] and pool.count("replica", "a/1") == 2


def demoted_but_gone(pool: Pool, gpu: str) -> GpuDemotions:
    """Two blocks of a GPU, which drops them while they are demoted."""
    pool.store(gpu, KEYS[:7])
    got = pool.demote_gpu(gpu)
    pool.heartbeat(gpu, corrupt=got.source)
    assert not any(pool.has(KEYS[5:7])) and pool.count("demoting") == 2
    return got


# ---------------------------------------------------------------------- reports


def test_a_failed_demotion_quarantines_its_slot_and_is_tried_again() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    again = pool.demote_gpu(GPU, got, stored=bytes([1, 0]))
    assert split(again.keys) == [KEYS[5]]
    assert (pool.count("ready"), pool.count("quarantined"), pool.count("demoting")) == (1, 1, 1)


def test_a_demotion_that_is_not_reported_has_failed() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    pool.demote_gpu(GPU)
    assert split(pool.demote_gpu(GPU).keys) == LAST_FIRST[:2]
    assert (pool.count("quarantined"), pool.count("demoting")) == (2, 2)


def test_a_repeated_report_or_one_of_an_earlier_answer_is_ignored() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    first = pool.demote_gpu(GPU)
    second = pool.demote_gpu(GPU)
    assert pool.demote_gpu(GPU, first).keys and pool.count("ready") == 0
    assert (pool.count("quarantined"), pool.count("demoting")) == (4, 2), "the second was not reported"
    pool.demote_gpu(GPU, second)
    assert (pool.count("ready"), total(pool, "gpu_demoted")) == (0, 0)


def test_a_report_from_before_the_store_restarted_is_ignored() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    location = unpack(got.target)[0]
    index, _ = pool.join("a", nonce=b"again")
    found = LOCATION.pack(
        index, location[1], location[2], PAGE, *location[4:]
    )  # the block was written, with the generation of its grant
    pool.adopt("a", Inventory(found, KEYS[6], bytes(4), bytes(4), b""), offered=1)
    lease, _ = pool.match("a", KEYS[6:7])
    pool.directory.clear(pool.now)
    assert pool.count("dropped") == 1
    pool.demote_gpu(GPU, got)
    assert (pool.count("dropped"), total(pool, "gpu_demoted")) == (1, 0)
    pool.release("a", lease)
    check_invariants(pool.directory)


def test_demotions_of_a_gpu_that_is_gone_quarantine_their_slots() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    pool.demote_gpu(GPU)
    assert pool.directory.remove_node(GPU, pool.now) == 8
    assert (pool.count("demoting"), pool.count("quarantined")) == (0, 2)
    assert list(pool.directory.nodes) == ["a"]


def test_a_block_that_is_cleared_while_it_is_demoted_is_not_stored() -> None:
    pool = pool_of()
    pool.store(GPU, KEYS[:7])
    got = pool.demote_gpu(GPU)
    pool.directory.clear(pool.now)
    assert pool.count("dropped") == 2
    pool.demote_gpu(GPU, got)
    assert pool.count("quarantined") == 2 and not pool.keys()


# ---------------------------------------------------------------------- copies elsewhere


def test_a_pin_moves_from_a_gpu_to_the_copy_in_memory() -> None:
    pool = pool_of("a", GPU, "b")
    pool.store(GPU, KEYS[:1])
    pool.directory.pin(pool.call(GPU), KEYS[0], pool.now)
    pool.replicate("b", KEYS[:1])
    assert primary(pool, KEYS[0]) == "b" and pool.count("replica", GPU) == 1
    rows = pool.directory.c.rows
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
    pool = with_demoted_blocks("a", GPU, "b")
    pool.directory.leave("a", pool.now)
    assert pool.reserve(GPU, KEYS[50:51])[1].locations == b"" and pool.demote_gpu(GPU).keys == b""
    answer = pool.directory.sole_copies("a", pool.now)
    assert answer and answer.total == 7 and sorted(split(answer.keys)) == KEYS[:7], "each of them once"
    pool.replicate("b", KEYS[:1])
    answer = pool.directory.sole_copies("a", pool.now)
    assert answer and sorted(split(answer.keys)) == KEYS[1:7]
    assert pool.directory.remove_node("a", pool.now) == 16
    assert list(pool.directory.nodes) == ["b"] and pool.has(KEYS[:2]) == [True, False]


def test_a_gpu_of_a_node_that_leaves_leaves_too_when_it_joins_later() -> None:
    pool = pool_of("a", "b")
    pool.directory.leave("a", pool.now)
    pool.add(GPU)
    assert pool.directory.stats(pool.now)["nodes"][GPU]["state"] == "leaving"


def test_a_block_counts_once_where_it_is_on_a_gpu_and_in_its_nodes_memory() -> None:
    pool = with_demoted_blocks("a", GPU, "b")
    pool.store("b", KEYS[7:8])
    pool.read(GPU, KEYS[:7])
    assert pool.directory.locate_prefix(b"".join(KEYS[:8])) == (8, {"a": 7, "b": 1})


def test_hits_are_counted_by_where_the_blocks_are() -> None:
    pool = with_demoted_blocks("a", GPU, "b")
    pool.store("b", KEYS[7:8])
    pool.store(GPU, KEYS[8:10])  # takes the free slot, and the slot of the block that was demoted first
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
