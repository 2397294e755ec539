"""`raykv bench demotion`: reads, stores and matches while blocks are demoted to a disk, and without demotion.

Only matched blocks are demoted. The bench stores and matches a backlog of blocks, which are then demoted while windows
are timed. The blocks that a window stores are not matched.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray

from raykv.bench.blocks import local
from raykv.bench.blocks.local import BATCH, BATCH_BYTES, BLOCK_BYTES, MATCH_KEYS
from raykv.bench.testbed import local_cluster, local_pool, on_node, rows_cache
from raykv.bench.timing import gbps
from raykv.config import MIB

T = TypeVar("T")
POOL = "bench-demotion"
CPU_MEMORY = 4096 * MIB
CAPACITY = "3GiB"  # capacity of the tier; two backlogs fill it, and later backlogs evict blocks from it
BACKLOG = 48  # number of batches, of 32 MiB each
READ = 12  # number of batches that windows read in turn
STORES, READS, MATCHES = 6, 6, 24  # calls per window
WINDOWS = 4  # maximum number of windows while a backlog is demoted
WARM, PAIRS = 2, 8
DEADLINE_S = 60.0  # seconds for a call to succeed, and for a backlog to be demoted


class Window(NamedTuple):
    """Lists of seconds. stores, reads: time of each batch's copies. matches: time of each match."""

    stores: list[float]
    reads: list[float]
    matches: list[float]


class Engine(local.Worker):
    def __init__(self) -> None:
        super().__init__(POOL)
        self.fresh = self.turn = 0  # number of the last stored batch; number of reads
        self.read_batches: list[int] = []
        self.small = rows_cache(self.pool, 4096)
        self.prompt = self.small.keys(np.arange(MATCH_KEYS * 16))

    def prepare(self) -> None:
        """Store the blocks that every window reads and matches."""
        stored = 0
        while stored < MATCH_KEYS:  # slabs of large blocks must first become slabs of this size
            stored += self.small.store(self.prompt, np.zeros((MATCH_KEYS, 4096), np.uint8))
        self.read_batches = [_until_done(self._store)[0] for _ in range(READ)]

    def fill(self) -> None:
        """Store a backlog, and match it, so that its blocks are demoted."""
        for batch in [_until_done(self._store)[0] for _ in range(BACKLOG)]:
            _until_done(lambda batch=batch: self._ask_for(batch))  # type: ignore[misc]

    def window(self) -> Window:
        """Time stores, reads and matches, interleaved."""
        seconds = Window([], [], [])
        for i in range(MATCHES):
            if i % (MATCHES // STORES) == 0:
                seconds.stores.append(_until_done(self._store)[1])
            if i % (MATCHES // READS) == 0:
                seconds.reads.append(_until_done(self._read))
            seconds.matches.append(_until_done(self._match))
        return seconds

    def _store(self) -> tuple[int, float]:
        """Store a new batch. Returns (the batch's number, seconds of the batch's copies)."""
        self.fresh += 1
        return self.fresh, self.store(self.fresh)[0]

    def _ask_for(self, batch: int) -> None:
        with self.cache.match(self.keys(batch)) as match:
            assert match.num_blocks == BATCH

    def _read(self) -> float:
        self.turn += 1
        return self.read(self.read_batches[self.turn % READ], False)[0]

    def _match(self) -> float:
        begin = time.perf_counter()
        with self.small.match(self.prompt) as match:
            seconds = time.perf_counter() - begin
            assert match.num_blocks == MATCH_KEYS
        return seconds


class Bench:
    def __init__(self, pool: Any, engine: Any) -> None:
        self.pool, self.engine = pool, engine

    def demoted(self) -> int:
        """Number of blocks that were demoted so far."""
        (tier,) = self.pool.stats()["tiers"].values()
        return int(tier["demoted"])

    def until_demoted(self, blocks: int) -> None:
        end = time.monotonic() + DEADLINE_S
        while self.demoted() < blocks:
            if time.monotonic() > end:
                raise ValueError(f"{self.demoted()} of {blocks} blocks were demoted in {DEADLINE_S:.0f} s")
            time.sleep(0.05)

    def pair(self) -> tuple[list[Window], list[Window], float]:
        """Return (windows during demotion, the same number of windows without demotion, GB/s of the demotion)."""
        before = self.demoted()
        ray.get(self.engine.fill.remote())
        busy: list[Window] = []
        first, begin = self.demoted(), time.monotonic()
        for _ in range(WINDOWS):
            window = ray.get(self.engine.window.remote())
            now, seconds = self.demoted(), time.monotonic() - begin
            if now >= before + BACKLOG * BATCH:  # demotion ended during this window, so the window does not count
                break
            busy.append(window)
            down = (now - first) * BLOCK_BYTES / seconds / 1e9
        if not busy:
            raise ValueError("the backlog was demoted before anything was measured")
        self.until_demoted(before + BACKLOG * BATCH)
        return busy, ray.get([self.engine.window.remote() for _ in busy]), down


def run(directory: str) -> dict[str, float]:
    """Return median GB/s (1e9 bytes) and microseconds, and ratios of the speed during demotion to the speed without it.

    directory: a folder on the disk to write to.
    """
    with tempfile.TemporaryDirectory(dir=directory, prefix="raykv-bench-") as folder:
        settings: dict[str, Any] = {"write": "through", "min_hits": 1, "deadline": 10.0}  # lets slow calls count
        settings["external"] = f"file://{folder}?capacity={CAPACITY}"
        with local_cluster(1) as (node,), local_pool(POOL, CPU_MEMORY, secret=b"bench", **settings) as pool:
            engine = on_node(Engine, node)
            ray.get(engine.prepare.remote())
            bench = Bench(pool, engine)
            pairs = [bench.pair() for _ in range(WARM + PAIRS)][WARM:]
            assert pool.stats()["external_hits"] == 0, "what is read was to stay in memory"
    busy, idle = ([_medians(windows) for windows in side] for side in list(zip(*pairs, strict=True))[:2])
    figures = {"down_gbps": statistics.median(down for _, _, down in pairs), "pairs": float(PAIRS)}
    for i, name in enumerate(("store", "read")):
        for side, rows in (("idle", idle), ("busy", busy)):
            figures[f"{side}_{name}_gbps"] = gbps(BATCH_BYTES, (row[i] for row in rows))
        figures[f"{name}_ratio"] = statistics.median(b[i] / a[i] for a, b in zip(busy, idle, strict=True))
    for side, rows in (("idle", idle), ("busy", busy)):
        figures[f"{side}_match_us_p50"] = statistics.median(row[2] for row in rows) * 1e6
    figures["match_ratio"] = statistics.median(a[2] / b[2] for a, b in zip(busy, idle, strict=True))
    return figures


def _until_done(call: Callable[[], T]) -> T:
    """Repeat a call until it succeeds. While a busy node's heartbeat is late, the directory does not use that node."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            return call()
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _medians(windows: list[Window]) -> list[float]:
    return [statistics.median(second for window in windows for second in window[i]) for i in range(3)]
