"""A pool's files in shared memory: which of them its end leaves, and what others on the machine do to them."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from helpers.pools import (
    a_cache,
    actor_names,
    eventually,
    kill,
    node_store,
    pid,
    served,
    shm_files,
    stopped,
    store,
    tokens,
    worker,
)

import raykv
from raykv.arena import files
from raykv.system import raylets

# Another Ray cluster. When a line comes in, it starts a pool of the given name, and stops the pool.
ANOTHER_CLUSTER = """
import sys, ray, raykv
ray.init("local", num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, logging_level="ERROR")
print("ready", flush=True)
sys.stdin.readline()
raykv.start(raykv.PoolConfig(name=sys.argv[1], cpu_memory="64MiB")).stop()
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("graceful", [False, True], ids=["killed", "removed"])
def test_a_store_that_dies_after_the_others_have_stopped_leaves_nothing(
    start: Callable[..., raykv.KVPool], third_node: Callable[[], Any], cluster: Any, graceful: bool
) -> None:
    pool = start()
    node = third_node()
    eventually(lambda: served(pool, 3))
    process = pid(node_store(pool, node.node_id))
    dying = files.create(f"{files.SHM}/raykv-{pool.name}-{os.getuid()}-99", bytes(16), 4 << 20, 1)
    cluster.remove_node(node, allow_graceful=graceful)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)  # a living store would remove its own files at `stop`
    stopping = threading.Thread(target=pool.stop)
    stopping.start()
    eventually(lambda: not actor_names(pool.name))
    assert dying.path in files.arenas_of(pool.name)
    os.close(dying.fd)  # as the death of its owner does
    stopping.join(60)
    assert not stopping.is_alive() and not shm_files(pool.name)


@pytest.fixture
def another_cluster() -> Any:
    """Yields a function that starts ANOTHER_CLUSTER for a pool's name."""
    begun: list[subprocess.Popen[str]] = []

    def begin(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ANOTHER_CLUSTER, name]
        env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        begun.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))
        return begun[-1]

    yield begin
    for process in begun:
        process.communicate()
        assert process.returncode == 0


def test_another_ray_cluster_on_the_machine_leaves_a_store_that_restarts_its_blocks(
    start: Callable[..., raykv.KVPool], third_node: Callable[[], Any], another_cluster: Any
) -> None:
    pool, node_id = start(), third_node().node_id
    eventually(lambda: served(pool, 3))
    other = another_cluster(pool.name)
    engine = worker(pool, node_id)
    keys = a_cache(pool).keys(tokens(1, 20))
    eventually(lambda: ray.get(engine.store.remote(keys)) == len(keys))
    before = sorted(shm_files(pool.name))
    assert other.stdout.readline() == "ready\n"
    process = pid(node_store(pool, node_id))
    with stopped(raylet_of(node_id)):  # so that it starts no new store meanwhile
        os.kill(process, signal.SIGKILL)
        assert len(files.left_behind(pool.name)) == 0, "it is of a cluster that runs"
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "done\n"
        assert sorted(shm_files(pool.name)) == before
    eventually(lambda: ray.get(engine.holds.remote(keys)))


def raylet_of(node_id: str) -> int:
    return next(int(process.name) for process in raylets.processes() if raylets.options(process)["node_id"] == node_id)


def test_a_pool_goes_on_whose_files_were_removed(start: Callable[..., raykv.KVPool]) -> None:
    """logind removes them when a user's last session ends. Later clients find the memory, until its store dies."""
    pool = start()
    cache = a_cache(pool)
    keys = cache.keys(tokens(2, 20))
    assert store(cache, keys) == len(keys)
    for name in shm_files(pool.name):
        os.unlink(f"{files.SHM}/{name}")
    late = worker(pool, pool.node_id)
    assert ray.get(late.holds.remote(keys))
    more = cache.keys(tokens(3, 20))
    assert ray.get(late.store.remote(more)) == len(more)
    kill(pool, pool.node_id)
    eventually(lambda: served(pool, 2))
    assert len(shm_files(pool.name)) == 1
    eventually(lambda: ray.get(late.store.remote(keys)) == len(keys))
    assert ray.get(worker(pool, pool.node_id).holds.remote(keys))
