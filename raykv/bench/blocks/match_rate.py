"""Keys per second that one directory finds for several clients, alternately over its socket and through Ray."""

import contextlib
import statistics
import time
from collections.abc import Iterator

import numpy as np
import ray

import raykv
from raykv.bench.blocks.store_all import store_all
from raykv.bench.testbed import on_node, rows_cache
from raykv.client.cache import KVCache
from raykv.keys import Keys
from raykv.line.directory_line import DirectoryLine

CLIENTS, PHASES, PHASE_S = 4, 8, 0.4


class Asker:
    """A client in a process of its own."""

    def __init__(self, pool: str, count: int) -> None:
        """count: number of keys of a match."""
        self.pool = raykv.attach(pool)
        self.cache = rows_cache(self.pool, 4096)
        self.keys = stored_keys(self.cache, count)

    def socket_rate(self) -> float:
        assert self.pool.session.directory.line.way == "socket"
        return self._rate()

    def ray_rate(self) -> float:
        with _without_socket(self.pool.session.directory.line):
            return self._rate()

    def _rate(self) -> float:
        """Found keys per second, over PHASE_S. A late answer is a miss, and adds no keys."""
        begin, found = time.perf_counter(), 0
        while (passed := time.perf_counter() - begin) < PHASE_S:
            with self.cache.match(self.keys) as match:
                found += match.num_blocks
            if not match.num_blocks:
                time.sleep(0.01)  # time for the client to find the directory again
        return found / passed


def run(pool: str, node: str, count: int) -> tuple[float, float]:
    """Median keys per second of all clients together: (over the socket, through Ray)."""
    askers = [on_node(Asker, node, pool, count) for _ in range(CLIENTS)]
    rates: dict[str, list[float]] = {"socket_rate": [], "ray_rate": []}
    for _ in range(1 + PHASES):  # the first phase is a warm-up
        for way, found in rates.items():
            found.append(sum(ray.get([getattr(asker, way).remote() for asker in askers])))
    for asker in askers:
        ray.kill(asker)
    by_socket, by_ray = (statistics.median(found[1:]) for found in rates.values())
    return by_socket, by_ray


def stored_keys(cache: KVCache, count: int) -> Keys:
    """Store `count` blocks. Returns their keys."""
    keys = cache.keys(np.arange(count * cache.block_tokens))
    store_all(cache, keys, np.zeros((count, cache.block_bytes), np.uint8))
    return keys


@contextlib.contextmanager
def _without_socket(line: DirectoryLine) -> Iterator[None]:
    """Send the line's calls through Ray, as if its socket could not connect. Restores its connection at the end."""
    pipeline, line._pipeline = line._pipeline, None
    line.find = lambda: True  # type: ignore[method-assign]  # keeps the line from connecting after a late answer
    try:
        yield
        assert line.way == "ray"
    finally:
        del line.__dict__["find"]
        line._pipeline = pipeline
