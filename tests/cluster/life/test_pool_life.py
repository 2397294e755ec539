"""Pools start, stop, grow and restart; processes attach; wrong requests are refused."""

import asyncio
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from helpers.pools import (
    BLOCK,
    a_cache,
    actor_names,
    both_ways,
    both_ways_at_once,
    eventually,
    holds,
    keep,
    kill,
    node_store,
    other_node,
    pid,
    read,
    served,
    shm_files,
    store,
    tokens,
    worker,
)

import raykv
from raykv import keys as key_chain
from raykv.client.stop import stop_pool
from raykv.cluster import internal_kv, named_actors
from raykv.cluster.internal_kv import Kept
from raykv.config import HEARTBEAT_S
from raykv.ui.pool_actors import look_up


def test_starting_twice_is_starting_once_and_stopping_leaves_nothing(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 5))
    assert store(cache, keys) == 5
    pids = [pid(named_actors.find(name)) for name in actor_names(pool.name)]
    again = raykv.start(raykv.PoolConfig(name=pool.name, cpu_memory=32 << 20), exist_ok=True)
    assert read(a_cache(again), keys)[:3] == (5, 5, 0)
    assert [pid(named_actors.find(name)) for name in actor_names(pool.name)] == pids
    with pytest.raises(ValueError, match="another secret"):
        raykv.start(raykv.PoolConfig(name=pool.name, secret=b"other"))

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    own = f"raykv/{pool.name}/"
    stores = [f"{own}node-{node_id[:16]}" for node_id in nodes]
    assert actor_names(pool.name) == sorted(
        [f"raykv/{pool.name}/directory-1", *stores, f"raykv/{pool.name}/supervisor"]
    )
    shown = {name: ray.get(named_actors.find(name).__ray_call__.remote(repr)) for name in actor_names(pool.name)}
    assert shown[f"{own}directory-1"] == f"Directory(pool={pool.name})"
    assert shown[f"{own}supervisor"] == f"Supervisor(pool={pool.name})"
    assert {shown[name] for name in stores} == {f"NodeStore(pool={pool.name}, node={node_id[:8]})" for node_id in nodes}

    os.kill(pid(named_actors.find(stores[1])), signal.SIGKILL)
    raykv.start(
        raykv.PoolConfig(name=pool.name), exist_ok=True
    ).close()  # must not end a pool whose store is just restarting
    eventually(lambda: served(pool, 2))
    eventually(lambda: holds(cache, keys))  # the killed store may not be noticed yet

    again.close()
    assert len(shm_files(pool.name)) == 2
    pool.stop()
    assert not shm_files(pool.name) and internal_kv.settings(pool.name) is None
    eventually(lambda: not actor_names(pool.name))
    with cache.match(keys) as match:  # a process that is still attached has misses
        assert match.num_blocks == 0
    assert store(cache, keys) == 0
    pool.stop()
    with pytest.raises(raykv.PoolNotFound):
        raykv.attach(pool.name)
    for what, ask in asked_of(pool).items():
        with pytest.raises(raykv.PoolNotFound, match=f"no pool '{pool.name}' runs"):
            pytest.fail(f"{what} said {ask()}")


def asked_of(pool: raykv.KVPool) -> dict[str, Callable[[], object]]:
    """All calls about a whole pool."""
    return {
        "stats": pool.stats,
        "clear": pool.clear,
        "drain": lambda: pool.drain(pool.node_id),
        "resize": lambda: pool.resize(pool.node_id, 8 << 20),
        "set_quota": lambda: pool.set_quota("t", 0.1),
        "remove_quota": lambda: pool.remove_quota("t"),
        "quotas": pool.quotas,
    }


def after_shutdown(pool: str) -> dict[str, str]:
    """The results of all calls in a process that has left its Ray cluster."""
    attached = raykv.attach(pool)
    cache = attached.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4096)
    keys, out = cache.keys(range(160)), np.zeros((10, 4096), np.uint8)
    leased = cache.match(cache.keys(range(160, 320)))
    said = {"leased": str(leased.num_blocks)}
    ray.shutdown()
    said |= {"match": str(cache.match(keys).num_blocks), "store": str(cache.store(keys, out))}
    said |= {"read": str(leased.read(out)), "joined": str(ray.is_initialized())}
    for what, ask in {**asked_of(attached), "stop": attached.stop}.items():
        try:
            said[what] = repr(ask())
        except raykv.RayKVError as error:
            said[what] = type(error).__name__ + str(error)
    return said


def test_after_ray_shutdown_all_is_a_miss_or_says_how_to_join_again(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    there, keys = worker(pool, other_node(pool)), a_cache(pool, block_bytes=4096).keys(range(160, 320))
    assert ray.get(there.store.remote(keys, block_bytes=4096)) == 10
    code = f"import json, test_pool_life as t; print(json.dumps(t.after_shutdown({pool.name!r})))"
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | address, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said.pop("leased") == "10", "they are on the other node"
    assert (said.pop("match"), said.pop("store"), said.pop("read"), said.pop("joined")) == ("0", "0", "0", "False")
    assert all(text.startswith("NotConnectedthis process has left the Ray cluster") for text in said.values()), said
    assert pool.stats()["nodes"], "nothing was stopped"


def test_a_pool_that_was_started_anew_is_another_one(
    start: Callable[..., raykv.KVPool], caplog: pytest.LogCaptureFixture
) -> None:
    """Without an own secret its keys differ. A process that stays attached has misses, and its log says what to do."""
    pool = start()
    cache = a_cache(pool)
    keys, pickled = cache.keys(tokens(1, 5)), pickle.dumps(cache)
    assert store(cache, keys) == 5
    stop_pool(pool.name)  # by somebody else: this process stays attached
    again = start(name=pool.name)
    anew = a_cache(again)
    keep(anew, anew.keys(tokens(1, 5)))
    eventually(lambda: pool.session.directory.faults["strange"] > 2)  # this process looks more than once
    assert read(cache, keys).matched == 0 and store(cache, keys) == 0
    arrived = pickle.loads(pickled)
    assert read(arrived, keys).matched == 0 and arrived.session.directory.faults["strange"]
    said = [record.getMessage() for record in caplog.records if "another secret" in record.getMessage()]
    assert len(said) == 2 and all(f"attach again with raykv.attach('{pool.name}')" in text for text in said)


def test_a_pool_that_keeps_its_secret_is_the_same_one(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(secret=b"of this test")
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 5))
    stop_pool(pool.name)  # by somebody else: this process stays attached
    again = start(name=pool.name, secret=b"of this test")
    keep(a_cache(again), keys)
    eventually(lambda: holds(cache, keys))
    assert not pool.session.directory.faults["strange"]


def test_attach_says_that_no_such_pool_runs(cluster: Any) -> None:
    with pytest.raises(raykv.PoolNotFound, match=r"'nowhere'.*raykv start --name nowhere"):
        raykv.attach("nowhere")


def test_without_a_ray_cluster_an_error_says_how_to_start_one(tmp_path: Path) -> None:
    code = (
        "import functools, ray._private.services as services\n"
        "services._cached_find_gcs_addresses = functools.cache(set)\n"  # hides the cluster of other tests
        "import raykv\n"
        "for face in (lambda: raykv.attach('p'), lambda: raykv.start(raykv.PoolConfig(name='p'))):\n"
        "    try:\n"
        "        face()\n"
        "    except raykv.PoolNotFound as error:\n"
        "        print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["RAY_TMPDIR"] = str(tmp_path)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    lines = ran.stdout.splitlines()
    assert len(lines) == 2, ran.stderr
    assert all("ray start --head" in line and "raykv start --name p" in line for line in lines)


@pytest.mark.parametrize("cpu_memory", [1 << 45, 1.0])
def test_start_refuses_more_memory_than_there_is(cluster: Any, cpu_memory: float) -> None:
    name = f"t{os.getpid()}-greedy"
    with pytest.raises(raykv.CapacityError, match=r"asked for .* GiB.*2 Ray nodes.*free.*Lower cpu_memory"):
        raykv.start(raykv.PoolConfig(name=name, cpu_memory=cpu_memory))
    assert not actor_names(name) and not shm_files(name) and internal_kv.settings(name) is None
    with pytest.raises(raykv.PoolNotFound):
        raykv.attach(name)


def test_a_secret_that_others_can_read_is_refused(cluster: Any, tmp_path: Path) -> None:
    name = f"t{os.getpid()}-secret"
    path = tmp_path / "secret"
    path.write_bytes(b"s")
    path.chmod(0o644)
    with pytest.raises(ValueError, match=rf"{path}.*644.*chmod 600"):
        raykv.start(raykv.PoolConfig(name=name, secret=path))
    path.write_bytes(b"\n")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="empty"):
        raykv.start(raykv.PoolConfig(name=name, secret=path))
    assert not actor_names(name) and internal_kv.settings(name) is None


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYKV_SECRET", "of the environment")


@both_ways_at_once
def test_a_secret_enters_the_keys_and_cleared_blocks_stay_cleared_after_restarts(
    start: Callable[..., raykv.KVPool], secret: None, transport: str
) -> None:
    pool = start(transport=transport)
    fields = {"model": "m", "revision": "", "dtype": "uint8", "layout": "rows", "parallel": "", "part": 0, "salt": ""}
    root = key_chain.root(b"of the environment", **fields, block_tokens=16, block_bytes=BLOCK)  # type: ignore[arg-type]
    cache = a_cache(pool)
    assert (cache.keys(tokens(1, 3)) == key_chain.chain(root, tokens(1, 3), 16)).all()

    forgotten, kept = cache.keys(tokens(1, 10)), cache.keys(tokens(2, 10))
    assert store(cache, forgotten) == 10
    assert pool.clear() == 10
    assert read(cache, forgotten).matched == 0
    assert store(cache, kept) == 10
    epoch = pool.stats()["epoch"]
    kill(pool, "directory", pool.node_id, other_node(pool))
    eventually(lambda: holds(cache, kept))
    assert pool.stats()["epoch"] > epoch
    assert read(cache, forgotten).matched == 0
    assert pool.stats()["keys"] == 10


def test_a_node_that_joins_gets_its_store(
    start: Callable[..., raykv.KVPool], third_node: Callable[[], Any], cluster: Any
) -> None:
    pool = start()
    cache = a_cache(pool)
    node = third_node()
    begin = time.monotonic()
    eventually(lambda: pool.stats()["nodes"].get(node.node_id, {}).get("state") == "alive")
    took = time.monotonic() - begin
    eventually(lambda: served(pool, 3))
    assert len(actor_names(pool.name)) == 5, f"it had its store after {took:.1f} s"
    print(f"a node that joined had its store after {took:.1f} s")
    keys = cache.keys(tokens(1, 4))
    assert store(cache, keys) == 4
    assert ray.get(worker(pool, node.node_id).read.remote(keys))[:3] == (4, 4, 0)


def test_notes_of_a_pool_whose_end_was_killed_bind_nobody(cluster: Any, start: Callable[..., raykv.KVPool]) -> None:
    name, node_id = f"ended{os.getpid()}", next(node["NodeID"] for node in ray.nodes() if node["Alive"])
    internal_kv.put(name, Kept.IDLE, internal_kv.LEFT, node_id)
    internal_kv.put(name, Kept.LEAVING, b"", node_id)
    pool = start(name=name)  # returns when all of its nodes serve
    assert {node["state"] for node in pool.stats()["nodes"].values()} == {"alive"}
    kill(pool, "supervisor")
    eventually(lambda: served(pool, 2))
    assert not internal_kv.idle_nodes(name) and not internal_kv.names(name, Kept.LEAVING)


def test_what_keeps_a_pool_going_stays_where_it_was_put(
    start: Callable[..., raykv.KVPool], third_node: Callable[[], Any]
) -> None:
    """Ray would put actors that need no CPU on any node, at every start."""
    third_node()
    pool = start()
    names = [named_actors.directory_name(pool.name, number) for number in (1, 2)]
    names.append(named_actors.supervisor_name(pool.name))

    def places() -> list[str]:
        return [actor.node_id if (actor := look_up(name)) and actor.is_alive else "" for name in names]

    eventually(lambda: all(places()))
    directory, successor, supervisor = before = places()
    assert directory == supervisor == pool.node_id != successor
    for what in ("supervisor", "directory", "supervisor"):
        kill(pool, what)
        eventually(lambda: all(places()))
        assert places() == before


def open_things() -> tuple[int, int, int]:
    """(open files of arenas, mappings of arenas, threads of raykv) in this process."""
    gc.collect()
    files = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            files += "raykv-" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    maps = Path("/proc/self/maps").read_text().count("/dev/shm/raykv-")
    return files, maps, sum(thread.name.startswith("raykv") for thread in threading.enumerate())


def connections(pool: raykv.KVPool) -> int:
    """How many connections this process has to the directory's socket."""
    peers = [connection.raddr for connection in psutil.Process().net_connections("tcp") if connection.raddr]
    return [f"{peer.ip}:{peer.port}" for peer in peers].count(str(pool.stats()["socket"]))


def nothing_ends() -> bool:
    """Whether nothing that was closed is still about to end: threads end when they next wake."""
    before = open_things()
    time.sleep(2 * HEARTBEAT_S)
    return open_things() == before


@both_ways_at_once
def test_after_close_all_is_a_miss(start: Callable[..., raykv.KVPool], transport: str) -> None:
    attached = raykv.attach(start(transport=transport).name)
    cache = a_cache(attached)
    keys = cache.keys(tokens(1, 3))
    assert store(cache, keys) == 3
    attached.close()
    assert read(cache, keys)[0] == 0 and store(cache, cache.keys(tokens(2, 3))) == 0

    async def ask() -> int:
        async with cache.amatch(keys) as match:
            return match.num_blocks

    assert asyncio.run(ask()) == 0


@both_ways
def test_attaching_and_closing_leaves_nothing_open(start: Callable[..., raykv.KVPool], transport: str) -> None:
    pool = start(transport=transport)
    keys = a_cache(pool).keys(tokens(1, 3))
    assert store(a_cache(pool), keys) == 3
    eventually(nothing_ends)
    before, connected = open_things(), connections(pool)
    assert connected == int(transport == "auto")
    for closes in (True, False):  # False: the pool is forgotten without `close`
        for _ in range(3):
            attached = raykv.attach(pool.name)
            assert read(a_cache(attached), keys)[:3] == (3, 3, 0)
            if closes:
                attached.close()
        del attached
        eventually(lambda: open_things() == before)
    eventually(lambda: pool.stats()["clients"] == 1 and connections(pool) == connected)


def test_stopping_a_pool_whose_store_does_not_answer(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    os.kill(pid(node_store(pool, other_node(pool))), signal.SIGSTOP)
    pool.stop()
    assert not shm_files(pool.name)
