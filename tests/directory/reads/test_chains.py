"""Readers that want the same blocks at once form a chain: each waits while a copy arrives, and reads the newest one."""

from helpers.directory.checks import check_invariants
from helpers.directory.oracle.slots import LOCATION, unpack
from helpers.directory.pool import KEYS, PAGE, Pool, blocks, staged

from raykv.directory.calls.readers import WAIT_S
from raykv.directory.kernels.columns import REPLICA

READERS = "bcd"


def crowded() -> tuple[Pool, dict[str, int]]:
    """Eight blocks of node a, and leases of three readers. Each would stage four blocks. Only the first reader does."""
    pool = Pool(slots=16, window=8, nodes="abcd", long_bytes=0)
    pool.store("a", KEYS[:8])
    found = {node: pool.match(node, KEYS[:8], stage=4) for node in READERS}
    assert [blocks(got) for _, got in found.values()] == [8, 8, 8]
    assert [staged(got) for _, got in found.values()] == [4, 0, 0]
    return pool, {node: lease for node, (lease, _) in found.items()}


def ask(pool: Pool, node: str, lease: int, start: int = 0) -> tuple[list[str], bytes]:
    """(the nodes to read, for each of the next four blocks that gets a staging slot; these slots)."""
    window = pool.next_window(node, lease, start, start + 4, may_wait=True)
    names = {each.index: name for name, each in pool.directory.nodes.items()}
    pairs = zip(unpack(window.source), unpack(window.staged), strict=True)
    sources = [names[source[0]] for source, slot in pairs if slot[4]]
    return sources, window.staged[: LOCATION.size * len(sources)]


def pulled(pool: Pool, node: str, slots: bytes) -> None:
    pool.directory.client_heartbeat(pool.call(node, pulled=slots), pool.now)


def holds_of_replicas(pool: Pool) -> int:
    rows = pool.directory.c.rows
    return int(rows["holds"][rows["state"] == REPLICA].sum())


def first_slots(pool: Pool, node: str, lease: int) -> bytes:
    return pool.next_window(node, lease, 0, 4).staged


def test_a_reader_waits_for_the_copy_that_another_reader_pulls_and_reads_that_copy() -> None:
    pool, leases = crowded()
    assert ask(pool, "c", leases["c"]) == ([], b"") == ask(pool, "d", leases["d"])
    pulled(pool, "b", first_slots(pool, "b", leases["b"]))
    sources, slots = ask(pool, "c", leases["c"])
    assert sources == ["b"], "one of four blocks, so that the next reader can begin soon"
    assert ask(pool, "d", leases["d"])[0] == []
    pulled(pool, "c", slots)
    assert ask(pool, "d", leases["d"])[0] == ["c"]
    check_invariants(pool.directory)


def test_readers_wait_once_for_copies_that_take_too_long() -> None:
    pool, leases = crowded()
    assert ask(pool, "c", leases["c"])[0] == []
    pool.now += WAIT_S - 0.05
    assert ask(pool, "c", leases["c"])[0] == []
    pool.now += 0.06
    assert ask(pool, "c", leases["c"])[0] == ["a"], "the first copy"
    assert ask(pool, "c", leases["c"], 1)[0] == ["a"], "it has given up the other copies of that reader too"
    assert ask(pool, "d", leases["d"], 2)[0] == ["a"], "and nobody else waits for them"
    assert ask(pool, "c", leases["c"], 2)[0] == [], "but for a new copy"


def test_of_readers_that_wait_in_vain_one_begins_and_the_others_wait_for_it() -> None:
    pool, leases = crowded()
    for node in "cd":
        assert ask(pool, node, leases[node])[0] == []
    pool.now += WAIT_S + 0.01
    assert ask(pool, "c", leases["c"])[0] == 4 * ["a"]
    assert ask(pool, "d", leases["d"])[0] == []
    pool.now += WAIT_S
    assert ask(pool, "d", leases["d"])[0] == 4 * ["a"], "it waits no longer for any copy"


def test_a_reader_reads_another_copy_where_the_node_of_its_copies_is_gone() -> None:
    pool, leases = crowded()
    pulled(pool, "b", first_slots(pool, "b", leases["b"]))
    assert ask(pool, "c", leases["c"])[0] == 4 * ["b"]
    pool.directory.remove_node("b", pool.now)
    assert ask(pool, "c", leases["c"])[0] == 4 * ["a"]
    check_invariants(pool.directory)


def test_a_reader_does_not_wait_for_a_reader_that_is_gone() -> None:
    pool, leases = crowded()
    assert ask(pool, "c", leases["c"])[0] == []
    pool.release("b", leases["b"])
    assert ask(pool, "c", leases["c"])[0] == ["a"]


def test_a_short_read_does_not_wait_nor_a_reader_that_does_not_ask_again() -> None:
    pool = Pool(slots=16, window=8, nodes="abc", long_bytes=9 * PAGE)
    pool.store("a", KEYS[:9])
    pool.match("b", KEYS[:9], stage=4)
    short, got = pool.match("c", KEYS[:8], stage=2)
    assert staged(got) == 2
    assert ask(pool, "c", short)[0] == 4 * ["a"]
    pool.release("c", short)
    long, got = pool.match("c", KEYS[:9], stage=2)
    assert staged(got) == 0 and ask(pool, "c", long)[0] == []
    assert staged(pool.next_window("c", long, 0)) == 8


def test_a_node_can_evict_its_copies_once_readers_elsewhere_have_passed_them() -> None:
    pool, leases = crowded()
    pulled(pool, "b", first_slots(pool, "b", leases["b"]))
    sources, slots = ask(pool, "c", leases["c"])
    assert sources == 4 * ["b"], "nobody waits for the copies of this reader"
    pulled(pool, "c", slots)
    pool.release("b", leases["b"])
    assert holds_of_replicas(pool) > 0
    assert pool.next_window("c", leases["c"], 4, 8).passed, "the reader learns where it may read these blocks again"
    assert holds_of_replicas(pool) == 0
    check_invariants(pool.directory)


def test_a_gpu_never_waits_since_its_host_is_nearer_than_any_copy() -> None:
    pool = Pool(slots=16, window=8, nodes=["a", "a/gpu", "b", "c"], long_bytes=0)
    pool.store("a", KEYS[:8])
    pool.match("b", KEYS[:8], stage=4)
    pool.match("c", KEYS[:8], stage=4)
    lease, got = pool.match("a/gpu", KEYS[:8], stage=2)
    assert staged(got) == 2
    assert len(ask(pool, "a/gpu", lease, 2)[0]) == 4
