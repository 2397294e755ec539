"""What users see of a pool with an external tier on two Ray nodes: demotion, promotion and failures."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray
from helpers.pools import (
    MIB,
    eventually,
    holds,
    kill,
    node_store,
    other_node,
    read,
    settled,
    store,
)
from helpers.tiers.redis_server import RedisServer, redis_server
from helpers.tiers.tiered_pool import (
    MEMORY,
    Under,
    a_cache,
    keep_all,
    prompts,
    push_out,
    small_disk,
    states,
    tiers,
    total,
    written_through,
)

import raykv

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


def test_a_disk_that_is_full_takes_no_more_and_then_does_again(files: raykv.KVPool, disk: Path) -> None:
    mine, others = a_cache(files), disk / "of somebody else"

    def refused() -> int:
        """Fill the disk with another file, and store blocks. Returns how many blocks tiers have refused so far."""
        with suppress(OSError), open(others, "ab", buffering=0) as file:
            while file.write(bytes(MIB)) == MIB:
                pass
        for keys in prompts(mine, MEMORY // 4):
            store(mine, keys)
        stores = [node_store(files, node_id) for node_id in (files.node_id, other_node(files))]
        return sum(stats.get("tier_refused", 0) for stats in ray.get([one.stats.remote() for one in stores]))

    files.clear()
    eventually(lambda: total(files, "to_delete") == 0)
    kill(files, files.node_id, other_node(files))  # or they would write over deleted blocks' files, which they keep
    eventually(lambda: len(tiers(files)) == 2 and states(files) == {"up"})
    try:
        with Under(files) as load:
            eventually(lambda: refused() > 0)
            load.goes_on(10)
            assert states(files) == {"up"}
            assert files.clear() > 0  # deleted blocks make room for the record of the clear
            load.goes_on(5)
            others.unlink()
            demoted = total(files, "demoted")
            eventually(lambda: total(files, "demoted") > demoted + 50)
    finally:
        others.unlink(missing_ok=True)
    (keys,) = prompts(mine, 1)
    push_out(files, mine, keys)
    eventually(lambda: holds(mine, keys))


def test_demoted_blocks_survive_restarts_and_cleared_ones_do_not(files: raykv.KVPool) -> None:
    mine = a_cache(files)
    kept = prompts(mine, 2)
    push_out(files, mine, *kept)
    with Under(files) as load:
        kill(files, files.node_id)
        kill(files, other_node(files), "directory")
        eventually(lambda: len(tiers(files)) == 2 and states(files) == {"up"})
        for keys in kept:
            eventually(lambda keys=keys: holds(mine, keys))  # type: ignore[misc]
        load.goes_on(5)
    push_out(files, mine, *kept)
    assert files.clear()
    assert [read(mine, keys).matched for keys in kept] == [0, 0]
    kill(files, files.node_id, other_node(files), "directory")
    eventually(lambda: len(tiers(files)) == 2 and states(files) == {"up"})
    for keys in kept:  # the tier may still have some blocks that are to be deleted
        assert read(mine, keys).read == 0
        eventually(lambda keys=keys: read(mine, keys).matched == 0)  # type: ignore[misc]
    keep_all(mine, kept)


# ---------------------------------------------------------------------- a redis server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def remote(start_for_module: Start, server: RedisServer) -> raykv.KVPool:
    return written_through(start_for_module, server.url())


def test_a_killed_redis_is_forgotten_and_a_new_one_is_used(remote: raykv.KVPool, server: RedisServer) -> None:
    mine = a_cache(remote)
    (keys,) = prompts(mine, 1)
    push_out(remote, mine, keys)
    assert len(tiers(remote)) == 1 and holds(mine, keys)
    push_out(remote, mine, keys)
    with Under(remote) as load:
        server.kill()
        eventually(lambda: states(remote) == {"down"})
        kill(remote, remote.node_id)  # the new store serves without its tier
        load.goes_on(10)
        assert read(mine, keys).read == 0
        server.start()
        eventually(lambda: states(remote) == {"up"})
        demoted = total(remote, "demoted")
        assert read(mine, keys).read == 0  # the lost block is a miss, and is forgotten
        eventually(lambda: total(remote, "demoted") > demoted + 50)
        load.goes_on(5)
    eventually(lambda: settled(remote))
    push_out(remote, mine, keys)
    eventually(lambda: holds(mine, keys))
