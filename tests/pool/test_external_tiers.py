"""What users see of a pool with an external tier on two nodes: demotion, promotion and failures."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import (
    actor_names,
    eventually,
    holds,
    locations,
    node_store,
    other_node,
    payload,
    read,
    settled,
    shm_files,
    store,
    worker,
)
from helpers.tiers.moody import WAIT_S, Moods, MoodyTier
from helpers.tiers.redis_server import RedisServer, redis_server
from helpers.tiers.tiered_pool import (
    BLOCKS,
    CPU,
    IN_TIME_S,
    MEMORY,
    SIZE,
    Engine,
    Keys,
    Under,
    a_cache,
    in_tier_only,
    keep_all,
    prompts,
    push_out,
    small_disk,
    states,
    store_slowly,
    tiers,
    total,
    written_through,
)

import raykv
from raykv.cluster import internal_kv
from raykv.tiers.base import path_of

Start = Callable[..., raykv.KVPool]


# ---------------------------------------------------------------------- a file tier for each node, on a small disk


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of 128 MiB."""
    with small_disk(tmp_path_factory.mktemp("disk"), "128m") as folder:
        yield folder


@pytest.fixture(scope="module")
def files(start_for_module: Start, disk: Path) -> raykv.KVPool:
    """A pool whose nodes have a file tier each."""
    return written_through(start_for_module, f"file://{disk}/tier?capacity=56MiB")


def test_three_times_the_memory_is_kept_and_read_through_either_node(files: raykv.KVPool) -> None:
    files.clear()
    mine, there = a_cache(files), worker(files, other_node(files), Engine)
    kept = prompts(mine, 3 * MEMORY)

    def all_demoted() -> bool:
        store_slowly(files, mine, kept)
        return total(files, "blocks") == len(kept) * BLOCKS

    eventually(all_demoted)
    stats = files.stats()
    assert len(stats["tiers"]) == 2 and stats["keys"] == len(kept) * BLOCKS
    assert min(tier["blocks"] for tier in tiers(files)) > 0
    nodes, hits = set[str](), stats["external_hits"]
    for keys in kept:
        found = eventually(lambda keys=keys: whole(read(mine, keys)))  # type: ignore[misc]
        nodes |= set(found.nodes)
    assert nodes == {files.node_id, other_node(files)}
    assert files.stats()["external_hits"] - hits > len(kept) * BLOCKS // 3
    for keys in kept[::4]:
        eventually(lambda keys=keys: ray.get(there.holds.remote(keys)))  # type: ignore[misc]
    eventually(lambda: settled(files))


def whole(found: Any) -> Any:
    assert not found.wrong
    return found if found.read == BLOCKS else None


def test_blocks_in_another_nodes_own_tier_are_read_through_that_node(files: raykv.KVPool) -> None:
    mine, there = a_cache(files), worker(files, other_node(files), Engine)
    own = {tier["index"]: name for name, tier in files.stats()["tiers"].items()}

    def each_has_its_own() -> list[Keys]:
        kept = prompts(mine, 2)  # new prompts each time: blocks in a tier would stay there
        push_out(files, mine, kept[0])
        ray.get(there.push_out.remote(kept[1]))
        found = [{own[int(at["node"])] for at in locations(files, mine, keys) if at["node"] & 1} for keys in kept]
        return kept if found == [{files.node_id}, {other_node(files)}] else []

    for keys in eventually(each_has_its_own):
        eventually(lambda keys=keys: holds(mine, keys))  # type: ignore[misc]
        eventually(lambda keys=keys: ray.get(there.holds.remote(keys)))  # type: ignore[misc]


def test_files_that_were_cut_short_or_altered_are_misses(files: raykv.KVPool, disk: Path) -> None:
    mine = a_cache(files)
    kept = prompts(mine, 2)
    push_out(files, mine, *kept)
    before = files.stats()["corrupt"]
    with Under(files) as load:
        for keys, block, damage in zip(kept, (11, 5), (cut, flip), strict=True):
            paths = list(disk.rglob(path_of(keys[block].tobytes())))
            assert paths
            for path in paths:  # both nodes may have the block
                damage(path)
            eventually(lambda keys=keys, block=block: damaged(mine, keys, block))  # type: ignore[misc]
            eventually(lambda keys=keys, block=block: read(mine, keys).matched == block)  # type: ignore[misc]
        load.goes_on(5)
        eventually(lambda: files.stats()["corrupt"] >= before + 2)
        keep_all(mine, kept)
    assert states(files) == {"up"}


def damaged(cache: raykv.KVCache, keys: Keys, block: int) -> bool:
    found = read(cache, keys)
    assert not found.wrong and found.read <= block
    return found.read == block


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------------- a redis server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def remote(start_for_module: Start, server: RedisServer) -> raykv.KVPool:
    return written_through(start_for_module, server.url())


def test_a_redis_that_stands_still_is_left_alone_and_found_again(remote: raykv.KVPool, server: RedisServer) -> None:
    mine = a_cache(remote)
    kept = prompts(mine, 2)
    push_out(remote, mine, *kept)
    with Under(remote) as load:
        server.pause()
        try:
            begin = time.monotonic()
            assert read(mine, kept[0]).read == 0
            assert time.monotonic() - begin < IN_TIME_S
            eventually(lambda: states(remote) == {"down"})
            begin = time.monotonic()
            assert read(mine, kept[0]).matched == 0
            assert time.monotonic() - begin < IN_TIME_S
            load.goes_on(10)
        finally:
            server.resume()
        eventually(lambda: states(remote) == {"up"})
    for keys in kept:
        eventually(lambda keys=keys: holds(mine, keys))  # type: ignore[misc]


def test_a_block_that_redis_lost_is_a_miss(remote: raykv.KVPool, server: RedisServer) -> None:
    redis = pytest.importorskip("redis")
    mine = a_cache(remote)
    (keys,) = prompts(mine, 1)
    push_out(remote, mine, keys)
    with redis.Redis(port=server.port) as client:
        client.flushall()
    # `matched == 0` alone may be a late fetch of blocks that the directory still believes to be in the tier
    eventually(lambda: read(mine, keys).matched == 0 == in_tier_only(remote, mine, keys))

    def stored_again() -> bool:  # blocks stored before a store noticed the loss are void, too
        push_out(remote, mine, keys)
        return holds(mine, keys)

    eventually(stored_again)


# ---------------------------------------------------------------------- a tier that waits, written through


@pytest.fixture(scope="module")
def moods(tmp_path_factory: pytest.TempPathFactory) -> Moods:
    return Moods(tmp_path_factory.mktemp("moods"))


@pytest.fixture(scope="module")
def moody(start_for_module: Start, moods: Moods, tmp_path_factory: pytest.TempPathFactory) -> raykv.KVPool:
    raykv.register_tier("moody", MoodyTier)
    folder = tmp_path_factory.mktemp("tier")
    url = f"moody://{folder}?capacity=256MiB&shared=1&moods={moods.folder}"
    return start_for_module(cpu_memory=CPU, external=url, secret=b"s", write="through")


@pytest.fixture
def lifted(moods: Moods) -> Iterator[Moods]:
    yield moods
    moods.lift()


def test_blocks_that_are_written_through_are_soon_in_the_tier(moody: raykv.KVPool) -> None:
    moody.clear()
    eventually(lambda: total(moody, "to_delete") == 0)
    mine = a_cache(moody)
    kept = prompts(mine, 4)  # less than memory has room for
    for keys in kept:
        assert store(mine, keys) == BLOCKS
    eventually(lambda: total(moody, "blocks") == 4 * BLOCKS)
    assert [in_tier_only(moody, mine, keys) for keys in kept] == [0] * 4  # memory has the blocks, too


def test_nobody_waits_for_a_tier_that_does_not_take_blocks(moody: raykv.KVPool, lifted: Moods) -> None:
    with Under(moody) as load:
        lifted.set("put")
        eventually(lambda: lifted.waiting("put"))
        begin = time.monotonic()
        load.goes_on(10)
        assert time.monotonic() - begin < WAIT_S
        eventually(lambda: states(moody) == {"down"})
        lifted.lift()
        eventually(lambda: states(moody) == {"up"})


def test_nobody_waits_for_a_tier_that_does_not_give_blocks(moody: raykv.KVPool, lifted: Moods) -> None:
    """Reads from memory and from other nodes do not queue behind many reads from the tier."""
    mine, there = a_cache(moody), worker(moody, other_node(moody), Engine)
    slow = a_cache(moody, tokens_per_s=4.0)  # its reads wait 4 s for the tier: longer than the other reads take
    cold = prompts(mine, 24, blocks=1)
    cold_keys: Any = np.concatenate(cold)
    push_out(moody, mine, cold_keys)
    near, far = prompts(mine, 2, blocks=4)
    push_out(moody, mine, far)
    eventually(lambda: ray.get(there.holds.remote(far)))  # now only the other node has the blocks in memory
    index = moody.stats()["nodes"][other_node(moody)]["index"]
    eventually(lambda: set(locations(moody, mine, far)["node"]) == {index})
    assert store(mine, near) == 4
    with ThreadPoolExecutor(len(cold)) as threads:
        lifted.set("get")
        reading = [threads.submit(read, slow, keys) for keys in cold]
        eventually(lambda: lifted.waiting("get"))
        begin = time.monotonic()
        for new in prompts(mine, 3, blocks=1):
            assert [read(mine, keys)[:3] for keys in (near, far)] == [(4, 4, 0)] * 2 and store(mine, new) == 1
        assert not any(one.done() for one in reading)
        assert {one.result().wrong for one in reading} == {0}
        assert time.monotonic() - begin < WAIT_S
    lifted.lift()
    eventually(lambda: states(moody) == {"up"})
    for keys in cold:
        eventually(lambda keys=keys: holds(mine, keys))  # type: ignore[misc]


@pytest.mark.parametrize("memory", ["here", "there"])
def test_an_engine_that_computes_faster_than_a_tier_reads_does_not_wait_for_it(
    moody: raykv.KVPool, lifted: Moods, memory: str
) -> None:
    mine, there = a_cache(moody), worker(moody, other_node(moody), Engine)
    (keys,) = prompts(mine, 1)
    push_out(moody, mine, keys)
    eventually(lambda: holds(mine, keys[:4]) if memory == "here" else ray.get(there.holds.remote(keys[:4])))
    eventually(lambda: (locations(moody, mine, keys)["node"] & 1).tolist() == [0] * 4 + [1] * 12)
    fast = a_cache(moody, tokens_per_s=1e9)
    lifted.set("get")
    begin = time.monotonic()
    found = read(fast, keys)
    assert time.monotonic() - begin < IN_TIME_S
    assert found[:3] == (BLOCKS, 4, 0) and lifted.waiting("get")
    lifted.lift()
    eventually(lambda: read(mine, keys)[:3] == (BLOCKS, BLOCKS, 0))


def pulled(pool: raykv.KVPool) -> int:
    return int(ray.get(node_store(pool, pool.node_id).stats.remote())["pulled"])


def test_prefetched_blocks_are_read_from_memory(moody: raykv.KVPool, lifted: Moods) -> None:
    mine, there = a_cache(moody), worker(moody, other_node(moody), Engine)
    (keys,) = prompts(mine, 1, blocks=3 * BLOCKS)  # more than fits into the staging window
    push_out(moody, mine, keys)
    eventually(lambda: mine.prefetch(keys).result(60) == len(keys))
    fast = a_cache(moody, tokens_per_s=1e9)
    lifted.set("get")
    assert read(fast, keys) == (len(keys), len(keys), 0, [moody.node_id])
    assert not lifted.waiting("get")
    (other,) = prompts(mine, 1)
    lifted.lift()
    push_out(moody, mine, other)
    eventually(lambda: ray.get(there.holds.remote(other[:4])))
    eventually(lambda: (locations(moody, mine, other)["node"] & 1).tolist() == [0] * 4 + [1] * 12)
    before = pulled(moody)
    with mine.match(other, prefetch=True) as match:
        assert match.num_blocks == BLOCKS
        eventually(lambda: pulled(moody) == before + BLOCKS)  # though nobody has read the blocks
        out = np.zeros((BLOCKS, SIZE), np.uint8)
        lifted.set("get")
        assert match.read(out) == BLOCKS and (out == payload(other, SIZE)).all()
    assert not lifted.waiting("get")
    eventually(lambda: settled(moody))


# ---------------------------------------------------------------------- one folder for all nodes


@pytest.fixture(scope="module")
def asked(start_for_module: Start, tmp_path_factory: pytest.TempPathFactory) -> raykv.KVPool:
    """A pool that demotes only blocks that were matched (min_hits=1)."""
    url = f"file://{tmp_path_factory.mktemp('shared')}?capacity=256MiB&shared=1"
    return start_for_module(cpu_memory=CPU, external=url, secret=b"s", write="through", min_hits=1)


def test_blocks_that_nobody_asked_for_are_not_demoted(asked: raykv.KVPool) -> None:
    mine = a_cache(asked)
    wanted, unwanted = prompts(mine, 2)
    assert store(mine, wanted) == store(mine, unwanted) == BLOCKS
    assert read(mine, wanted)[:3] == (BLOCKS, BLOCKS, 0)
    eventually(lambda: total(asked, "blocks") == BLOCKS)
    for _ in range(2):
        for keys in prompts(mine, 2 * MEMORY):
            store(mine, keys)
    assert in_tier_only(asked, mine, wanted) == BLOCKS
    assert read(mine, unwanted).matched == 0
    assert total(asked, "blocks") == BLOCKS


def test_a_shared_folder_is_read_by_each_node_itself(asked: raykv.KVPool) -> None:
    mine, there = a_cache(asked), worker(asked, other_node(asked), Engine)
    assert [tier for tier in asked.stats()["tiers"]] == [""]
    kept = prompts(mine, 2)
    push_out(asked, mine, *kept)
    one, other = kept
    eventually(lambda: holds(mine, one))
    eventually(lambda: ray.get(there.holds.remote(other)))
    nodes = asked.stats()["nodes"]
    for keys, node_id in ((one, asked.node_id), (other, other_node(asked))):
        at = nodes[node_id]["index"]
        eventually(lambda keys=keys, at=at: set(locations(asked, mine, keys)["node"]) == {at})  # type: ignore[misc]


# ---------------------------------------------------------------------- what is refused at the start


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        tmp_path.chmod(0o500)
        yield tmp_path
        tmp_path.chmod(0o700)
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def refused(external: str, *words: str, **settings: Any) -> None:
    """`start` raises an error with these words, and leaves nothing."""
    name = f"t{os.getpid()}-refused"
    with pytest.raises((ValueError, OSError, ImportError)) as raised:
        raykv.start(raykv.PoolConfig(name=name, cpu_memory=CPU, external=external, **{"secret": b"s", **settings}))
    for word in ("external=", *words):
        assert word in str(raised.value)
    assert not actor_names(name) and not shm_files(name) and internal_kv.settings(name) is None
    with pytest.raises(raykv.PoolNotFound):
        raykv.attach(name)


def test_a_tier_that_no_node_can_use_is_refused(cluster: Any, tmp_path: Path) -> None:
    refused("tape:///x?capacity=1GiB", "unknown scheme 'tape'", "file", "redis", "register_tier")
    refused(f"file://{tmp_path}/x", "?capacity=200GiB")
    refused(f"file://{tmp_path}/x?capacity=much", "'much'", "200GiB")
    refused(f"file://{tmp_path}/x?capacity=9000TiB", "that disk has", "lower capacity")
    refused(f"file://{tmp_path}/x?capacity=1GiB", "secret=", "RAYKV_SECRET", secret=None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_folder_that_can_not_be_written_is_refused(cluster: Any, read_only: Path) -> None:
    refused(f"file://{read_only}/tier?capacity=1MiB", "name a folder to write in", "on nodes")


def test_a_redis_that_does_not_run_or_let_us_in_is_refused(cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    with redis_server(tmp_path, requirepass="right") as server:
        refused(server.url(":wr0ng@"), "RAYKV_REDIS_PASSWORD", "on nodes")
        refused(server.url(), "RAYKV_REDIS_PASSWORD")
        server.kill()
        refused(server.url(":right@"), "does a server run there")


def test_content_of_another_secret_is_refused_and_left_as_it_is(asked: raykv.KVPool, moody: raykv.KVPool) -> None:
    for pool in (asked, moody):
        settings = internal_kv.settings(pool.name)
        assert settings
        before = {tier["blocks"] for tier in tiers(pool)}
        refused(settings["external"], "another secret", "give that secret and pool name")
        assert {tier["blocks"] for tier in tiers(pool)} == before and states(pool) == {"up"}
