"""Measures the cost of metrics in the directory: for each call, and for each export to Ray's metrics agent.

    python benchmarks/metrics_cost.py [--entries 1000000]

The calls are matches of 64 keys, since the share of metrics is highest in the shortest matches. Prints one JSON object.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from raykv.actors.directory.metrics import DirectoryMetrics
from raykv.actors.directory.server import DirectoryServer, Message
from raykv.bench.directory.directory import (
    BLOCK_BYTES,
    LENGTHS,
    MIN_ENTRIES,
    MIN_NODES,
    NODE_BLOCKS,
    SHORT,
    _Load,
    _Pool,
)
from raykv.bench.testbed import local_cluster
from raykv.cluster import internal_kv
from raykv.config import KEYS_PER_CALL
from raykv.directory.directory import Directory
from raykv.line.listener import Connection
from raykv.line.pipeline import Pipeline, Request
from raykv.metrics.exporter import EXPORT_S
from raykv.protocol.packing import packed, unpacked
from raykv.system.hints import takers

POOL = "bench-directory"
TURNS, CALLS = 300, 100  # turns of each of the two alternating sides; calls per turn
EXPORTS = 6
PATIENCE_S = 10.0

MATCH: Any = DirectoryServer.match.__wrapped__  # type: ignore[attr-defined]
TAKES = takers(MATCH)


class _Timed(DirectoryServer):
    """A server and a connection to it. The server records its thread's processor time at the first and last call.

    The same thread answers counted and uncounted calls, since two threads might run on unequal processors.
    """

    def __init__(self, directory: Directory) -> None:
        super().__init__(POOL, DirectoryMetrics(POOL, ""))
        self.serve(directory)
        self._began = self._ended = 0.0
        self._pipeline = Pipeline(self.listen("127.0.0.1"))

    def _answer(self, connection: Connection, request: bytes) -> bytes:
        self._ended = time.thread_time()
        self._began = self._began or self._ended
        return super()._answer(connection, request)

    def seconds(self, requests: list[bytes]) -> float:
        """Send these calls. Returns the server thread's mean processor seconds per call, the socket's work included."""
        self._began = 0.0
        for body in requests:
            request = Request()
            self._pipeline.send(body, request.deliver)
            done, why = unpacked(self._pipeline.wait(request, PATIENCE_S))
            assert done, why
        return (self._ended - self._began) / (len(requests) - 1)

    def close(self) -> None:
        self._pipeline.close()
        super().close()

    def count(self, counts: bool) -> None:
        """Set whether matches are counted from now on."""
        vars(self).pop("match", None)
        if not counts:
            vars(self)["match"] = self._match

    def _match(self, *args: Any) -> Message:
        given = [take(arg) for take, arg in zip(TAKES, args, strict=True)]
        with self._lock:
            answer: Message = MATCH(self, *given)
            return answer


def cost(directory: Directory, request: Callable[[int], Message]) -> dict[str, Any]:
    """Measure the cost of metrics in a directory that only answers matches. Starts a Ray node.

    request: returns the arguments of the match with a given number. plain_us: the thread's processor time for a call
    over the socket. with_metrics_us: the same for counted calls. Both are first quartiles of turns. calls_percent: the
    difference in percent. export_ms: mean processor time of an export. Exports run every 5 s, and every second export
    looks at every slot. percent: percent of a fully loaded directory's time that counting and exports take.
    """
    server = _Timed(directory)
    sides: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * TURNS):
        side = (turn + turn // 2) % 2  # plain, counted, counted, plain, ...
        server.count(side == 1)
        sides[side].append(server.seconds([packed(("match", *request(turn * CALLS + i))) for i in range(CALLS)]))
    server.close()
    plain, counted = (statistics.quantiles(times)[0] for times in sides)  # other work only adds time
    calls = 100 * (counted / plain - 1)
    export = _export_s(directory, server._metrics)
    return {
        "plain_us": plain * 1e6,
        "with_metrics_us": counted * 1e6,
        "calls_percent": calls,
        "export_ms": export * 1e3,
        "percent": calls + 100 * export / EXPORT_S,
    }


def _export_s(directory: Directory, metrics: DirectoryMetrics) -> float:
    """Mean processor seconds of EXPORTS exports. Two untimed exports before them create Ray's metrics."""
    with local_cluster(1):
        internal_kv.put_in_charge(POOL, "", None)
        metrics.saved()
        metrics.attach(directory, threading.Lock())
        for _ in range(2):
            metrics.export()
        begin = time.process_time()
        for _ in range(EXPORTS):
            metrics.export()
        return (time.process_time() - begin) / EXPORTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    entries: int = parser.parse_args().entries
    if entries < MIN_ENTRIES:
        parser.error(f"--entries {entries}: give at least {MIN_ENTRIES}, so that every node holds long chains")
    nodes = max(MIN_NODES, entries // NODE_BLOCKS)
    pool = _Pool(entries, nodes)
    load = _Load(pool, entries, nodes)
    load.fill()
    prompts = [(node, load._prepared(chain, min(LENGTHS))) for node, chain in load.chains[SHORT]]

    def request(number: int) -> tuple[Any, ...]:  # each call releases the lease of the previous call
        node, keys = prompts[number % len(prompts)]
        return tuple(pool._call()), (1, str(node), keys, BLOCK_BYTES, KEYS_PER_CALL)

    print(json.dumps(cost(pool.directory, request)))


if __name__ == "__main__":
    main()
