"""Compares raykv's and Mooncake Store's times to store, read and find blocks over TCP. A bare socket is the floor.

    pip install -e '.[test]'
    python benchmarks/peers/beside_mooncake.py --mooncake PYTHON [--pairs 24] [--json]

PYTHON belongs to an environment with `pip install mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy`. Mooncake's
wheel needs Debian's libibverbs1, librdmacm1 and libnuma1. Each system has two nodes, which are processes on this
machine. In each turn, one system after the other stores 64 blocks of 2 MiB on one node, and reads them on both nodes.
raykv computes a block's checksum when it stores the block. It verifies blocks from another node. It verifies blocks on
the same node only if the reader asks ("verified here"). Mooncake has no checksums by default. Mooncake keeps its
connections, as vLLM's recipe for Mooncake says. On the same node, raykv's reader and writer are two processes, while
Mooncake's reader and writer are one process.
"""

import json
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import ray

from raykv.bench.blocks import cross
from raykv.bench.testbed import await_port, free_port, local_cluster, local_pool, on_node
from raykv.config import MIB

HOST = "127.0.0.1"
KEYS = 512
ASKED = 1 << 20  # stands for a turn's number in the names of the KEYS keys that Mooncake looks up
START_S = 15.0


class Writer(cross.Writer):
    def store_seconds(self, turn: int) -> float:
        """Store blocks. Returns the seconds until every reader finds the blocks."""
        keys = cross._keys(self.cache, turn)
        begin = time.perf_counter()
        count = self.cache.store(keys, self.blocks, wait=True)
        seconds = time.perf_counter() - begin
        assert count == cross.BLOCKS, f"{count} of {cross.BLOCKS} blocks stored"
        return seconds


class Reader(cross.Reader):
    def __init__(self, writer: Any) -> None:
        super().__init__(writer)
        self.blocks = ray.get(writer.array.remote()).copy()

    def read_seconds(self, turn: int, node: str, verify: bool = False) -> float:
        """Seconds to read the blocks from `node`."""
        keys = cross._keys(self.cache, turn)
        begin = time.perf_counter()
        with self.cache.match(keys) as match:
            count = match.read(self.out, verify=verify)
            seconds = time.perf_counter() - begin
            assert match.nodes == [node]
        assert count == cross.BLOCKS, f"{count} of {cross.BLOCKS} blocks read"
        assert np.array_equal(self.out, self.blocks)
        self.out[:] = 1
        return seconds

    def ask_seconds(self) -> float:
        """Seconds to find KEYS keys and lease their blocks."""
        small = self.pool.cache(model="small", dtype="uint8", layout="rows", block_tokens=1, block_bytes=4096)
        keys = small.keys(np.arange(KEYS))
        assert small.store(keys, np.zeros((KEYS, 4096), np.uint8), wait=True) == KEYS
        for _ in range(2):  # only the second match counts, since earlier reads have filled the CPU caches
            begin = time.perf_counter()
            with small.match(keys) as match:
                seconds = time.perf_counter() - begin
                assert match.num_tokens == KEYS
        return seconds


class Mooncake:
    """A client of Mooncake in its own process; see mooncake_client.py."""

    def __init__(self, python: str, master: int) -> None:
        command = [python, str(Path(__file__).with_name("mooncake_client.py")), str(master)]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        env = {**os.environ, "MC_TCP_ENABLE_CONNECTION_POOL": "1"}
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=quiet, text=True)

    def ask(self, name: str, *arguments: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        print(json.dumps([name, *arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"Mooncake's client ended at {name}"
        return json.loads(answer)


@contextmanager
def mooncake(python: str) -> Iterator[tuple[Mooncake, Mooncake]]:
    """Run two clients of one master. Each client is a node."""
    port, metrics = free_port(), free_port()
    options = [f"--rpc_address={HOST}", f"--rpc_port={port}", f"--metrics_host={HOST}", f"--metrics_port={metrics}"]
    quiet = subprocess.DEVNULL
    processes: list[subprocess.Popen[Any]] = [
        subprocess.Popen([str(Path(python).with_name("mooncake_master")), *options], stdout=quiet, stderr=quiet)
    ]
    try:
        await_port(port, processes[0], START_S)
        far = Mooncake(python, port)
        processes.append(far.process)
        near = Mooncake(python, port)
        processes.append(near.process)
        yield far, near
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def measure(python: str, pairs: int) -> dict[str, list[float]]:
    """Return the seconds of each turn, by kind of work."""
    seconds: dict[str, list[float]] = defaultdict(list)
    os.environ.update(RAY_worker_niceness="0")  # as operations.md advises, and as in Mooncake's processes
    with (
        local_cluster(2, 512 * MIB) as (here, there),
        local_pool(cross.POOL, 1024 * MIB, transport="tcp") as pool,
        mooncake(python) as (far, near),
    ):
        writer = on_node(Writer, there)
        beside, reader = on_node(Reader, there, writer), on_node(Reader, here, writer)
        ray.get(reader.connect.remote(ray.get(writer.listen.remote())))
        far_memory = far.ask("name")
        far.ask("put_small", ASKED, KEYS)

        def ours(turn: int) -> Iterator[tuple[str, float]]:
            pool.clear()
            yield "raykv store", ray.get(writer.store_seconds.remote(turn))
            yield "raykv read here", ray.get(beside.read_seconds.remote(turn, there))
            yield "raykv verified here", ray.get(beside.read_seconds.remote(turn, there, verify=True))
            yield "raykv read there", ray.get(reader.read_seconds.remote(turn, there))
            yield "raykv ask", ray.get(reader.ask_seconds.remote())
            yield "socket", ray.get(reader.socket_read.remote())

        def theirs(turn: int) -> Iterator[tuple[str, float]]:
            yield "mooncake store", far.ask("store", turn, far_memory)
            yield "mooncake read here", far.ask("read", turn)
            yield "mooncake verified here", far.ask("read", turn)  # Mooncake has no verification
            yield "mooncake read there", near.ask("read", turn)
            yield "mooncake ask", near.ask("ask", ASKED, KEYS)
            far.ask("remove", turn)

        for turn in range(cross.WARM + pairs):
            for system in (ours, theirs) if turn % 2 else (theirs, ours):
                for name, took in system(turn):
                    if turn >= cross.WARM:
                        seconds[name].append(took)
    return seconds


def figures(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return, by kind of work, median milliseconds of both systems, and median and quartiles of the paired ratios."""
    found = {}
    for work in ("store", "read here", "verified here", "read there", "ask"):
        ours, theirs = seconds[f"raykv {work}"], seconds[f"mooncake {work}"]
        low, ratio, high = statistics.quantiles([b / a for a, b in zip(ours, theirs, strict=True)], n=4)
        milliseconds = {"raykv_ms": 1e3 * statistics.median(ours), "mooncake_ms": 1e3 * statistics.median(theirs)}
        found[work] = milliseconds | {"times_as_fast": ratio, "low": low, "high": high}
    found["socket"] = {"ms": 1e3 * statistics.median(seconds["socket"])}
    return found


@click.command(help=__doc__)
@click.option("--mooncake", "python", required=True, help="The Python of an environment that has Mooncake.")
@click.option("--pairs", default=24, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(python: str, pairs: int, as_json: bool) -> None:
    found = figures(measure(python, pairs))
    if as_json:
        return print(json.dumps(found))
    for work, numbers in found.items():
        print(f"{work:15}" + "".join(f"{name} {number:.2f}  " for name, number in numbers.items()))


if __name__ == "__main__":
    main()
