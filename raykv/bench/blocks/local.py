"""`raykv bench local`: blocks between two processes of one node, beside memcpy, an empty actor call and a socket."""

import statistics
import time
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raykv
from raykv.arena import block_copy
from raykv.bench.blocks import block_sizes, match_rate
from raykv.bench.blocks.block_sizes import Shape
from raykv.bench.blocks.echo import Echo, RoundTrip
from raykv.bench.blocks.memcpy import Memcpy
from raykv.bench.blocks.store_all import LATE_S
from raykv.bench.testbed import local_cluster, local_pool, on_node, rows_cache
from raykv.bench.timing import gbps, seconds_of, timed
from raykv.config import MIB
from raykv.keys import Keys
from raykv.protocol.location import LOCATION
from raykv.protocol.packing import packed

POOL = "bench-local"
BLOCK_BYTES, BATCH = 2 * MIB, 16
BATCH_BYTES = BATCH * BLOCK_BYTES
BATCHES = 24  # 768 MiB: far more than a processor's caches hold
ROUNDS = 3  # the first round is a warm-up
MATCH_KEYS, MATCH_CALLS, MATCH_TURN = 512, 400, 5

Times = tuple[float, float, float]  # seconds of a batch's copies, of the whole call, and of memcpy


class Worker:
    """A process with enough buffers that a buffer has left the CPU caches when it is used again."""

    def __init__(self, pool: str = POOL) -> None:
        self.pool = raykv.attach(pool)
        self.cache = rows_cache(self.pool, BLOCK_BYTES)
        assert self.pool.session.local is not None
        self.arena = self.pool.session.local.arena
        block = np.random.default_rng(0).integers(0, 255, BLOCK_BYTES, np.uint8)
        self.buffers = [np.tile(block, (BATCH, 1)) for _ in range(8)]  # all equal: memcpy may overwrite them
        self.floor = Memcpy(block_copy.THREADS)  # as many threads as the arena uses

    def keys(self, batch: int) -> Keys:
        return self.cache.keys(np.arange(BATCH * 16) + batch * BATCH * 16)

    def slots(self, batch: int) -> list[NDArray[np.uint8]]:
        """A batch's blocks in the arena, as (block_bytes,) views."""
        with self.cache.match(self.keys(batch)) as match:
            runs = [run for lease in match._leases for run in self.arena.views(lease.blocks.source)]
        return [block for run in runs for block in run.reshape(-1, BLOCK_BYTES)]

    def store(self, batch: int) -> tuple[float, float]:
        """Store a batch. Returns (seconds of the batch's copies, seconds of the whole call)."""
        copies: list[float] = []
        with timed(self.arena, "write", copies):
            begin = time.perf_counter()
            stored = self.cache.store(self.keys(batch), self.buffers[batch % 8])
            total = time.perf_counter() - begin
        assert stored == BATCH, f"{stored} of {BATCH} blocks stored"
        return sum(copies), total

    def read(self, batch: int, verify: bool) -> tuple[float, float]:
        copies: list[float] = []
        keys = self.keys(batch)
        with timed(self.arena, "read", copies):
            begin = time.perf_counter()
            with self.cache.match(keys) as match:
                count = match.read(self.buffers[batch % 8], verify=verify)
            total = time.perf_counter() - begin
        assert count == BATCH, f"{count} of {BATCH} blocks read"
        return sum(copies), total

    def stores(self, first: int) -> list[Times]:
        rows = []
        for batch in range(first, first + BATCHES):
            other = self.slots(first - BATCHES // 2 + batch - first) if first >= BATCHES else None
            source = list(self.buffers[(batch + 4) % 8])
            floor = self.floor.seconds(other, source) if other else 0.0
            rows.append((*self.store(batch), floor))
        return rows

    def reads(self, first: int, verify: bool) -> list[Times]:
        rows = []
        for i in range(BATCHES):
            other = self.slots(first + (i + BATCHES // 2) % BATCHES)
            floor = self.floor.seconds(list(self.buffers[(i + 4) % 8]), other)
            rows.append((*self.read(first + i, verify), floor))
        return rows

    def matches(self, echo: Any) -> tuple[list[float], list[float], list[float]]:
        """Return seconds of matches of MATCH_KEYS keys, and of actor calls and socket round trips of as many bytes."""
        cache = rows_cache(self.pool, 4096)
        keys = match_rate.stored_keys(cache, MATCH_KEYS)
        message = (1, 2, b"", b"", b""), (3, self.pool.node_id, keys.tobytes(), 4096)
        socket = RoundTrip(*ray.get(echo.listen.remote(len(packed(message)))))
        ours, floor, bare = [], [], []

        def ask() -> None:
            ray.get(echo.call.remote(*message), timeout=60)

        for _ in range(MATCH_CALLS // MATCH_TURN):  # the first call of a turn is a warm-up
            floor += [seconds_of(ask) for _ in range(MATCH_TURN)][1:]
            bare += [socket.seconds() for _ in range(MATCH_TURN)][1:]
            matched = [self._match_s(cache, keys) for _ in range(MATCH_TURN)][1:]
            ours += [seconds for seconds in matched if seconds]
        return ours, floor, bare

    def _match_s(self, cache: Any, keys: Keys) -> float:
        """Seconds of a match; 0.0 if the answer was late, which happens on a busy machine."""
        begin = time.perf_counter()
        with cache.match(keys) as match:
            seconds = time.perf_counter() - begin
        if match.num_blocks == MATCH_KEYS:
            return seconds
        time.sleep(LATE_S)
        return 0.0


def run(shapes: list[Shape] | None = None) -> dict[str, Any]:
    """Return median GB/s (1e9 bytes), microseconds and keys/s. shapes: shapes of the table `results`."""
    with local_cluster(1) as (node,):
        with local_pool(POOL, 1024 * MIB):
            writer, reader = on_node(Worker, node), on_node(Worker, node)
            stores: list[Times] = []
            reads: list[Times] = []
            verified: list[Times] = []
            for turn in range(ROUNDS):
                first = turn * BATCHES
                new_stores = ray.get(writer.stores.remote(first))
                new_reads = ray.get(reader.reads.remote(first, False))
                new_verified = ray.get(reader.reads.remote(first, True))
                if turn:
                    stores, reads, verified = stores + new_stores, reads + new_reads, verified + new_verified
            answer_bytes = MATCH_KEYS * LOCATION.itemsize
            ours, floor, bare = ray.get(reader.matches.remote(on_node(Echo, node, answer_bytes)))
            by_socket, by_ray = match_rate.run(POOL, node, MATCH_KEYS)
            for worker in (writer, reader):
                ray.kill(worker)
        results = {"results": block_sizes.table(node, shapes)} if shapes else {}
    return {
        **results,
        "memcpy_gbps": gbps(BATCH_BYTES, [floor for _, _, floor in reads]),
        "read_gbps": gbps(BATCH_BYTES, [copies for copies, _, _ in reads]),
        "read_e2e_gbps": gbps(BATCH_BYTES, [total for _, total, _ in reads]),
        "verified_memcpy_gbps": gbps(BATCH_BYTES, [floor for _, _, floor in verified]),
        "verified_read_gbps": gbps(BATCH_BYTES, [copies for copies, _, _ in verified]),
        "store_memcpy_gbps": gbps(BATCH_BYTES, [floor for _, _, floor in stores]),
        "store_gbps": gbps(BATCH_BYTES, [copies for copies, _, _ in stores]),
        "store_e2e_gbps": gbps(BATCH_BYTES, [total for _, total, _ in stores]),
        "actor_call_us_p50": statistics.median(floor[20:]) * 1e6,
        "socket_us_p50": statistics.median(bare[20:]) * 1e6,
        "match_us_p50": statistics.median(ours[20:]) * 1e6,
        "actor_match_keys_per_s": by_ray,
        "match_keys_per_s": by_socket,
        "pairs": float(len(reads)),
    }
