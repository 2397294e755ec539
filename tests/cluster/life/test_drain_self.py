"""`raykv drain --self` as a pod's preStop hook runs it: in a process namespace with a single raylet."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.faces.command_line import command, last_json
from helpers.pools import BLOCK, MIB, Worker, eventually, load, read, served, tokens, worker

import raykv

NAMESPACES = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
# Ray's log monitor in a pod would move away the logs of all processes outside of the pod
OWN_FOLDER = ["sh", "-c", 'mount -t tmpfs tmpfs /tmp/ray && exec "$@"', "sh"]
RAY = Path(sys.executable).with_name("ray")


def inside(pod: subprocess.Popen[bytes], address: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a pod, as the pod's hooks run."""
    (first,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    enter = ["nsenter", f"--target={first}", "--pid", "--mount", *words]
    environment = {**os.environ, "RAY_ADDRESS": address}
    return subprocess.run(enter, capture_output=True, text=True, timeout=280, env=environment)


def nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@contextmanager
def a_pod(address: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A raylet in process and mount namespaces of its own. Yields its process and Ray node id, and ends it."""
    before = nodes()
    start: list[str | Path] = [
        RAY,
        "start",
        "--block",
        f"--address={address}",
        "--num-cpus=2",
        f"--object-store-memory={256 * MIB}",
    ]
    with (folder / "pod.log").open("wb") as log:
        pod = subprocess.Popen([*NAMESPACES, *OWN_FOLDER, *start], stdout=log, stderr=log)
    try:
        (node_id,) = eventually(lambda: nodes() - before)
        yield pod, node_id
        inside(pod, address, RAY, "stop")  # Ray takes 15 s to notice that a raylet was killed
    finally:
        pod.kill()
        pod.wait()
        eventually(lambda: nodes() <= before)


def test_a_hook_empties_the_node_it_runs_on_while_others_read_and_write(
    cluster: Any, start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("namespaces can't be made here: it takes root")
    staying = nodes()
    pool = start(cpu_memory=128 * MIB)
    cache = pool.cache(
        model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK, recompute_tokens_per_s=100
    )
    drain = [sys.executable, "-m", "raykv.cli", "drain", "--self", "--name", pool.name, "--deadline"]
    with a_pod(cluster.address, tmp_path) as (pod, leaving):
        eventually(lambda: served(pool, 3))
        there = worker(pool, leaving, Worker)
        prompts = [cache.keys(tokens(500 + i, 50)) for i in range(4)]
        ray.get([there.keep.remote(keys) for keys in prompts])
        late = inside(pod, cluster.address, *drain, "0")
        assert (late.returncode, late.stdout) == (0, "200 blocks are on no other node\n"), late.stderr
        with load([worker(pool, node_id) for node_id in staying], prompts=6, blocks=40):
            drained = inside(pod, cluster.address, *drain, "60", "--json")
        assert last_json(drained) == {"left": 0}, drained.stderr
        states = {name: node["state"] for name, node in pool.stats()["nodes"].items()}
        assert states == {leaving: "leaving"} | dict.fromkeys(staying, "alive")
        ray.kill(there)
    for keys in prompts:
        eventually(lambda keys=keys: read(cache, keys)[:3] == (50, 50, 0))  # type: ignore[misc]


def test_which_node_to_drain_is_never_guessed(cluster: Any, start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    for words in ((), ("--self", pool.node_id)):
        neither = command("drain", "--name", pool.name, *words, address=cluster.address)
        assert neither.returncode == 2 and "give a node as `raykv status` shows it, or --self" in neither.stderr
    several = command("drain", "--self", "--name", pool.name, address=cluster.address)
    assert several.returncode == 1 and "this machine runs 2 nodes" in several.stderr
    assert {node["state"] for node in pool.stats()["nodes"].values()} == {"alive"}
