"""`raykv bench scale`: how many nodes one directory can serve, and how fast another directory takes over.

The directory's server runs without Ray, in its own process, with its socket and kernels. A few processes simulate the
nodes (scale_load.py). Each number of nodes gets a new directory and new nodes.
"""

import contextlib
import gc
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from raykv.actors.directory.metrics import DirectoryMetrics
from raykv.actors.directory.server import DirectoryServer
from raykv.bench.directory.scale_load import ENGINES, RATE, Figures, Share, simulate
from raykv.directory.directory import Directory
from raykv.protocol.location import Address

LOADS = 2  # processes that simulate nodes
WARM_S = 3.0
P99_MS = 20.0  # milliseconds; a directory carries its nodes only if the p99 of its match times is below this
CARRIED = 0.95  # a directory carries its nodes only if it answers at least this share of the calls that become due
SPAWN = multiprocessing.get_context("spawn")


def serve(epoch: int, orders: Connection) -> None:
    """The main function of a directory's process. The directory takes charge when it receives an order."""
    Directory()  # loads the kernels, as a standby directory has already done
    orders.send("ready")
    orders.recv()
    server = DirectoryServer("bench-scale", DirectoryMetrics("bench-scale", ""))  # exports no counts
    server.serve(Directory(epoch))
    gc.freeze()
    address = server.listen("127.0.0.1")
    (thread,) = (thread.native_id for thread in threading.enumerate() if thread.name == "raykv-calls")
    orders.send((address, thread))
    orders.recv()


class Process(NamedTuple):
    """A process that receives orders over a pipe."""

    process: BaseProcess
    orders: Connection

    @classmethod
    def start(cls, target: Any, argument: Any) -> "Process":
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=target, args=(argument, theirs), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def order(self, *order: Any) -> None:
        self.orders.send(order)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Server(NamedTuple):
    """A directory in charge."""

    process: Process
    address: Address
    thread: int

    @classmethod
    def take_charge(cls, process: Process) -> "Server":
        process.order("take charge")
        return cls(process, *process.orders.recv())

    def cpu_s(self) -> float:
        """CPU seconds of the thread that answers calls."""
        task = Path(f"/proc/{self.process.process.pid}/task/{self.thread}/schedstat")
        return int(task.read_text(encoding="utf-8").split()[0]) / 1e9

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.process.pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def run(nodes: list[int], entries: int, seconds: float, take_over: int = 0) -> dict[str, Any]:
    """Measure a directory with each of these numbers of nodes, and then a take-over.

    entries: total number of blocks of all nodes. seconds: how long to measure each number of nodes.
    take_over: number of nodes of a pool whose directory is killed; 0 to kill no directory.

    Returns a dict. results: figures for each number of nodes. largest_nodes: the largest measured number of nodes that
    one directory carries; 0 if there is none. take_over: figures of the take-over, if there was one.
    """
    results = [_measured(count, entries, seconds) for count in nodes]
    carried = [row["nodes"] for row in results if row["carried"]]
    killed = {"take_over": _killed(take_over, entries, seconds)} if take_over else {}
    return {"results": results, "largest_nodes": max(carried, default=0), **killed}


def _measured(nodes: int, entries: int, seconds: float) -> dict[str, Any]:
    with _pool(nodes, entries) as (server, loads, empty_bytes):
        entry_bytes = (server.resident_bytes() - empty_bytes) / entries
        figures, busy, wall = _watched(server, loads, seconds)
        return {"nodes": nodes, **_figures(figures, nodes, busy / wall, wall), "bytes_per_entry": round(entry_bytes, 1)}


def _watched(server: Server, loads: list[Process], seconds: float) -> tuple[list[Figures], float, float]:
    """Watch after WARM_S. Returns (figures of each process, CPU seconds of the directory's thread, seconds passed)."""
    _order(loads, "ask", True)
    time.sleep(WARM_S)
    _order(loads, "reset")
    begin, cpu = time.monotonic(), server.cpu_s()
    time.sleep(seconds)
    busy, wall = server.cpu_s() - cpu, time.monotonic() - begin
    return _collect(loads), busy, wall


def _figures(figures: list[Figures], nodes: int, busy: float, seconds: float) -> dict[str, Any]:
    offered = nodes * (3 * ENGINES * RATE + 1)
    calls = sum(each.calls for each in figures) / seconds
    waited = _array(figures, "waited") * 1e3
    p50, p99 = np.percentile(waited, (50, 99)).tolist() if len(waited) else (float("inf"), float("inf"))
    return {
        "offered_per_s": offered,
        "calls_per_s": calls,
        "busy": busy,
        "call_us": busy / calls * 1e6 if calls else 0.0,
        "p50_ms": p50,
        "p99_ms": p99,
        "hits": sum(each.hits for each in figures) / max(1, sum(each.keys for each in figures)),
        "errors": sum(each.errors for each in figures),
        "carried": calls >= CARRIED * offered and p99 < P99_MS,
    }


def _killed(nodes: int, entries: int, seconds: float) -> dict[str, Any]:
    """Kill a directory. Returns seconds to the successor's first match, to its last inventory, and to a low p99."""
    with _pool(nodes, entries) as (server, loads, _), _running(serve, 3) as successor:
        successor.orders.recv()
        _watched(server, loads, seconds)
        server.process.end()
        begin = time.monotonic()
        next_server = Server.take_charge(successor)
        _order(loads, "reset")
        _order(loads, "connect", next_server.address)
        figures = _until_joined(loads, nodes, seconds)
        matched, waited, joined = (_array(figures, name) for name in ("matched", "waited", "joined"))
    return {
        "nodes": nodes,
        "first_match_s": float(matched.min() - begin),
        "all_joined_s": float(joined.max() - begin),
        "p99_low_s": _low_from(matched - begin, waited * 1e3),
        "worst_ms": float(waited.max() * 1e3),
        "errors": sum(each.errors for each in figures),
    }


def _until_joined(loads: list[Process], nodes: int, seconds: float) -> list[Figures]:
    """Wait until all stores have joined, and then `seconds` longer. Return the figures of the whole time."""
    while len(_array(_collect(loads), "joined")) < nodes:
        time.sleep(0.2)
    time.sleep(seconds)
    return _collect(loads)


def _low_from(at: NDArray[np.float64], waited_ms: NDArray[np.float64]) -> float:
    """Return the end of the last quarter second in which the p99 of matches was too high."""
    quarters = (at * 4).astype(np.int64)
    high = [i for i in range(quarters.max() + 1) if _p99(waited_ms[quarters == i]) >= P99_MS]
    return (max(high, default=-1) + 1) / 4


def _p99(values: NDArray[np.float64]) -> float:
    return float(np.percentile(values, 99)) if len(values) else float("inf")


@contextlib.contextmanager
def _pool(nodes: int, entries: int) -> Iterator[tuple[Server, list[Process], int]]:
    """Yield (a directory, the processes that simulate its nodes, its resident bytes before the nodes joined)."""
    count = min(LOADS, nodes)
    firsts = [nodes * i // count for i in range(count + 1)]
    shares = [Share(a, b - a, entries // nodes) for a, b in itertools.pairwise(firsts)]
    with contextlib.ExitStack() as running:
        directory = running.enter_context(_running(serve, 2))
        loads = [running.enter_context(_running(simulate, share)) for share in shares]
        for process in (directory, *loads):
            process.orders.recv()
        server = Server.take_charge(directory)
        empty_bytes = server.resident_bytes()
        _order(loads, "connect", server.address)
        _until_joined(loads, nodes, 0.0)
        yield server, loads, empty_bytes


@contextlib.contextmanager
def _running(target: Any, argument: Any) -> Iterator[Process]:
    process = Process.start(target, argument)
    try:
        yield process
    finally:
        process.end()


def _order(loads: list[Process], *order: Any) -> None:
    for load in loads:
        load.order(*order)


def _collect(loads: list[Process]) -> list[Figures]:
    _order(loads, "figures")
    return [cast(Figures, load.orders.recv()) for load in loads]


def _array(figures: list[Figures], name: str) -> NDArray[np.float64]:
    return np.concatenate([np.frombuffer(getattr(each, name)) for each in figures])
