"""`raykv.start` of a pool that can't start, runs already, or has left files: what it says, and what it leaves."""

import asyncio
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from helpers.faces.command_line import command
from helpers.pools import PATIENCE_S, ROUTED_S, Attached, actor_names, eventually, shm_files, worker
from helpers.project.pages import ROOT
from helpers.project.without_raykv import WITHOUT_RAYKV

import raykv
from raykv.cluster import internal_kv, named_actors
from raykv.cluster.internal_kv import Kept
from raykv.integrations.prefix_lookup import PrefixLookup, announce
from raykv.protocol.calls import VERSION

MIB = 1 << 20
LEAVE_AN_ARENA = """
import sys
from raykv.arena.arena import open_own
arena = open_own(sys.argv[1], bytes(16), 4 << 20, 2, lambda size: None)
arena.close()
"""


@pytest.fixture
def name(cluster: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """A pool's name. Nothing of the pool may be left after the test."""
    name = f"t{os.getpid()}-{request.node.name[5:25].strip('_')}"
    yield name
    assert nothing_left(name)


def nothing_left(name: str) -> bool:
    return not actor_names(name) and not shm_files(name) and internal_kv.settings(name) is None


def test_other_settings_on_a_running_pool_are_named(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    same = raykv.PoolConfig(name=pool.name, cpu_memory=64 * MIB, deadline=PATIENCE_S)
    raykv.start(same).close()
    other = raykv.PoolConfig(name=pool.name, cpu_memory=32 * MIB, locality=2.0, deadline=PATIENCE_S)
    with pytest.raises(
        ValueError, match=r"cpu_memory=67108864 \(given: 33554432\), locality=1.5 \(given: 2.0\)\. .*attach"
    ):
        raykv.start(other)
    raykv.start(other, exist_ok=True).close()
    with pytest.raises(ValueError, match="another secret"):
        raykv.start(raykv.PoolConfig(name=pool.name, secret=b"other"), exist_ok=True)


def test_the_deadline_of_a_pool_is_that_of_its_clients_and_routers(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(deadline=ROUTED_S)
    assert pool.session.directory.deadline == ROUTED_S != PATIENCE_S
    assert pickle.loads(pickle.dumps(pool.session)).directory.deadline == ROUTED_S
    announce(pool.name, "m", root="00")

    async def of_a_router() -> float:
        lookup = PrefixLookup(pool.name, "m")
        while lookup.announced is None:
            await lookup.locate_prefix(np.zeros((1, 16), np.uint8))
            await asyncio.sleep(0.05)
        return lookup._deadline

    assert asyncio.run(of_a_router()) == pytest.approx(ROUTED_S / 5)


def test_gpu_memory_where_no_node_has_a_gpu(name: str) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory=0.5, but no node .* has a GPU"):
        raykv.start(raykv.PoolConfig(name=name, cpu_memory=64 * MIB, gpu_memory=0.5))
    assert nothing_left(name)


@pytest.mark.parametrize(
    ("secret", "says"),
    [("", r"secret='' is empty"), ("/no/such/file", "secret= names no file that is there")],
)
def test_a_secret_that_is_none(cluster: Any, secret: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        raykv.start(raykv.PoolConfig(name="secretless", secret=secret))
    assert nothing_left("secretless")


def test_a_node_without_raykv_is_named(
    name: str, third_node: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_RAYKV)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    node = third_node()
    with pytest.raises(ValueError, match=rf"node {node.node_id[:16]} .*No module named 'raykv'.*install this raykv, "):
        raykv.start(raykv.PoolConfig(name=name, cpu_memory=64 * MIB))
    assert nothing_left(name)


def test_a_node_whose_raykv_speaks_another_version_is_named(
    name: str, third_node: Callable[[], Any], cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Path(shutil.copytree(ROOT / "raykv", tmp_path / "raykv")) / "protocol" / "calls.py"
    theirs.write_text(theirs.read_text().replace(f"\nVERSION = {VERSION}\n", "\nVERSION = 1\n"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    node = third_node()
    monkeypatch.undo()
    size = ("--cpu-memory", "64MiB")
    refused = command("start", "--name", name, *size, address=cluster.address, folder=tmp_path.parent)
    said = f"protocol version 1, here it has {VERSION}: install this raykv, "
    assert refused.returncode == 1 and said in refused.stderr and f"(on nodes {node.node_id[:16]})" in refused.stderr
    assert nothing_left(name)


def test_the_nodes_that_lack_memory_are_named(name: str, cluster: Any) -> None:
    ids = ", ".join(node["NodeID"][:16] for node in ray.nodes() if node["Alive"])
    with pytest.raises(raykv.CapacityError, match=r"node \w{16}, \w{16}: asked for .* for 2 Ray nodes") as refused:
        raykv.start(raykv.PoolConfig(name=name, cpu_memory="900TiB"))
    assert set(str(refused.value)[5:].partition(":")[0].split(", ")) == set(ids.split(", "))
    assert nothing_left(name)


def test_a_store_that_fails_ends_the_start(name: str, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of the store had enough memory when the start checked it."""
    node_id, module = ray.get_runtime_context().get_node_id(), sys.modules["raykv.start"]
    check = module._check

    def check_and_lose_memory(*asked: Any) -> None:
        check(*asked)
        internal_kv.put(name, Kept.MEMORY, json.dumps(1 << 45).encode(), node_id)

    monkeypatch.setattr(module, "_check", check_and_lose_memory)
    with pytest.raises(raykv.CapacityError, match=rf"node {node_id[:16]}: asked for .* Lower cpu_memory"):
        raykv.start(raykv.PoolConfig(name=name, cpu_memory=64 * MIB))
    assert nothing_left(name)


def test_a_start_that_takes_too_long_says_how_far_it_came(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for deadline in ("START_DEADLINE_S", "PROGRESS_S"):
        monkeypatch.setattr(sys.modules["raykv.start"], deadline, 0.0)
    with pytest.raises(TimeoutError, match=rf"pool '{name}' does not serve after 0 s; kernels compiled: .*again"):
        raykv.start(raykv.PoolConfig(name=name, cpu_memory=64 * MIB))
    assert nothing_left(name)


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_ctrl_c_stops_what_was_started(name: str, seconds: float) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with pytest.raises(KeyboardInterrupt):
            while True:
                raykv.start(raykv.PoolConfig(name=name, cpu_memory=64 * MIB)).stop()
    finally:
        signal.signal(signal.SIGALRM, before)
    eventually(lambda: nothing_left(name))


def test_a_node_that_joins_and_cannot_afford_its_store_is_seen(
    start: Callable[..., raykv.KVPool], third_node: Callable[[], Any], cluster: Any
) -> None:
    pool = start()
    settings = internal_kv.settings(pool.name) or {}
    internal_kv.put(pool.name, Kept.SETTINGS, json.dumps({**settings, "cpu_memory": 1 << 45}).encode())
    node = third_node()
    why = eventually(lambda: pool.stats()["failed"].get(node.node_id))
    assert why.startswith("asked for") and "Lower cpu_memory" in why
    shown = command("status", "--name", pool.name, address=cluster.address)
    assert "no store" in shown.stdout and "Lower cpu_memory" in " ".join(shown.stdout.split())
    (said,) = ray.get(worker(pool, node.node_id, Attached).warnings.remote())
    assert "no store on this node" in said and why in said
    assert ray.get(worker(pool, pool.node_id, Attached).warnings.remote()) == []


def test_stop_ends_what_it_finds_by_name(start: Callable[..., raykv.KVPool], cluster: Any) -> None:
    pool = start()
    internal_kv.forget(pool.name)
    with pytest.raises(raykv.PoolNotFound, match=rf"raykv stop --name {pool.name}"):
        raykv.attach(pool.name)
    assert command("stop", "--name", pool.name, address=cluster.address).returncode == 0
    assert nothing_left(pool.name)
    again = command("stop", "--name", pool.name, address=cluster.address)
    assert again.returncode == 1 and "no pool" in again.stderr


def test_memory_that_was_left_is_named(
    start: Callable[..., raykv.KVPool], name: str, cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool left it whose Ray cluster was ended without `stop`."""
    subprocess.run([sys.executable, "-c", LEAVE_AN_ARENA, name], check=True)
    assert shm_files(name)
    start()
    (said,) = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert "does not run" in said and f"raykv stop --name {name}" in said
    assert command("stop", "--name", name, address=cluster.address).returncode == 0
    assert not shm_files(name)


def test_a_pool_serves_at_once_and_its_supervisor_follows(start: Callable[..., raykv.KVPool]) -> None:
    begin = time.monotonic()
    pool = start()
    assert len(actor_names(pool.name)) == 4, f"{time.monotonic() - begin:.1f} s"
    assert ray.get(named_actors.find(named_actors.supervisor_name(pool.name)).ping.remote())
