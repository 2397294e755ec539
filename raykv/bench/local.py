"""`raykv bench local`: blocks between two processes of one node, beside memcpy and an empty actor call."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.arena import block_copy
from raykv.bench.testbed import local_cluster, local_pool, on_node
from raykv.config import MIB
from raykv.keys import Keys
from raykv.protocol import LOCATION

POOL = "bench-local"
BLOCK_BYTES, BATCH = 2 * MIB, 16
BATCHES = 24  # 768 MiB: far more than a processor's caches hold
ROUNDS = 3  # of which the first warms up
MATCH_KEYS, MATCH_CALLS = 512, 400

Times = tuple[float, float, float]  # of a batch: its copies, all of the call, the floor's copies


class Worker:
    """One process, with so many buffers that a buffer has left the CPU caches when it is used again."""

    def __init__(self, pool: str = POOL) -> None:
        import raykv

        self.pool = raykv.attach(pool)
        self.cache = self.pool.cache(model="bench", block_tokens=16, block_bytes=BLOCK_BYTES)
        assert self.pool.session.local is not None
        self.arena = self.pool.session.local.arena
        block = np.random.default_rng(0).integers(0, 255, BLOCK_BYTES, np.uint8)
        self.buffers = [np.tile(block, (BATCH, 1)) for _ in range(8)]  # all alike: the floor may write over any block
        self.threads = ThreadPoolExecutor(block_copy.THREADS)

    def keys(self, batch: int) -> Keys:
        return self.cache.keys(np.arange(BATCH * 16) + batch * BATCH * 16)

    def memcpy(self, to: list[NDArray[np.uint8]], of: list[NDArray[np.uint8]]) -> float:
        """Seconds to copy rows with as many threads as the arena uses."""
        shares = [list(zip(to, of, strict=True))[i :: block_copy.THREADS] for i in range(block_copy.THREADS)]
        begin = time.perf_counter()
        for done in [self.threads.submit(_copy, share) for share in shares]:
            done.result()
        return time.perf_counter() - begin

    def slots(self, batch: int) -> list[NDArray[np.uint8]]:
        """Addresses of a batch's blocks in the arena."""
        with self.cache.match(self.keys(batch)) as match:
            runs = [run for lease in match._leases for run in self.arena.views(lease.source)]
        return [block for run in runs for block in run.reshape(-1, BLOCK_BYTES)]

    def store(self, batch: int) -> tuple[float, float]:
        """Store a batch. Returns seconds of its copies alone, and of the whole call."""
        copying = _timed(self.arena, "write")
        begin = time.perf_counter()
        stored = self.cache.store(self.keys(batch), self.buffers[batch % 8])
        total = time.perf_counter() - begin
        assert stored == BATCH, f"{stored} of {BATCH} blocks stored"
        return copying(), total

    def read(self, batch: int, verify: bool) -> tuple[float, float]:
        copying = _timed(self.arena, "read")
        keys = self.keys(batch)
        begin = time.perf_counter()
        with self.cache.match(keys) as match:
            count = match.read(self.buffers[batch % 8], verify=verify)
        total = time.perf_counter() - begin
        assert count == BATCH, f"{count} of {BATCH} blocks read"
        return copying(), total

    def stores(self, first: int) -> list[Times]:
        rows = []
        for batch in range(first, first + BATCHES):
            other = self.slots(first - BATCHES // 2 + batch - first) if first >= BATCHES else None
            source = list(self.buffers[(batch + 4) % 8])
            floor = self.memcpy(other, source) if other else 0.0
            rows.append((*self.store(batch), floor))
        return rows

    def reads(self, first: int, verify: bool) -> list[Times]:
        rows = []
        for i in range(BATCHES):
            other = self.slots(first + (i + BATCHES // 2) % BATCHES)
            floor = self.memcpy(list(self.buffers[(i + 4) % 8]), other)
            rows.append((*self.read(first + i, verify), floor))
        return rows

    def matches(self, echo: Any) -> tuple[list[float], list[float]]:
        """Seconds of matching MATCH_KEYS keys, and of an empty actor call with the same bytes, in turn."""
        import ray

        cache = self.pool.cache(model="bench", block_tokens=16, block_bytes=4096)
        keys = cache.keys(np.arange(MATCH_KEYS * 16))
        stored, blocks = 0, np.zeros((MATCH_KEYS, 4096), np.uint8)
        while stored < MATCH_KEYS:  # the first store of this size takes slabs from the other one
            stored += cache.store(keys, blocks, start=0)
        data, ids = keys.tobytes(), self.pool.node_id
        ours, floor = [], []
        for _ in range(MATCH_CALLS):
            begin = time.perf_counter()
            ray.get(echo.call.remote((1, 2, b"", b"", b""), 3, ids, data, 4096), timeout=60)
            between = time.perf_counter()
            with cache.match(keys) as match:
                ours.append(time.perf_counter() - between)
                floor.append(between - begin)
                assert match.num_blocks == MATCH_KEYS
        return ours, floor


class Echo:
    """Answers as many bytes as the directory does to a match."""

    def __init__(self) -> None:
        self.answer = (1, bytes(MATCH_KEYS * LOCATION.itemsize), b"")

    def call(self, *_: Any) -> tuple[int, bytes, bytes]:
        return self.answer


def run() -> dict[str, float]:
    """GB/s (1e9 bytes) and microseconds, medians."""
    import ray

    with local_cluster(1) as (node,), local_pool(POOL, 1024 * MIB):
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
        ours, floor = ray.get(reader.matches.remote(on_node(Echo, node)))
    return {
        "memcpy_gbps": _gbps([floor for _, _, floor in reads]),
        "read_gbps": _gbps([copies for copies, _, _ in reads]),
        "read_e2e_gbps": _gbps([total for _, total, _ in reads]),
        "verified_memcpy_gbps": _gbps([floor for _, _, floor in verified]),
        "verified_read_gbps": _gbps([copies for copies, _, _ in verified]),
        "store_memcpy_gbps": _gbps([floor for _, _, floor in stores]),
        "store_gbps": _gbps([copies for copies, _, _ in stores]),
        "store_e2e_gbps": _gbps([total for _, total, _ in stores]),
        "actor_call_us_p50": statistics.median(floor[20:]) * 1e6,
        "match_us_p50": statistics.median(ours[20:]) * 1e6,
        "pairs": float(len(reads)),
    }


def _gbps(seconds: list[float]) -> float:
    return BATCH * BLOCK_BYTES / statistics.median(seconds) / 1e9


def _copy(pairs: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> None:
    for to, of in pairs:
        np.copyto(to, of)


def _timed(arena: Any, method: str) -> Any:
    """Time a method of the arena from now until the returned function is called, which gives the seconds."""
    spent = 0.0
    plain = getattr(type(arena), method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        begin = time.perf_counter()
        try:
            return plain(arena, *args, **kwargs)
        finally:
            spent += time.perf_counter() - begin

    def stop() -> float:
        del arena.__dict__[method]
        return spent

    setattr(arena, method, timed)
    return stop
