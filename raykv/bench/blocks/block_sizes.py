"""Times whole calls of `store` and `read` beside memcpy, by number and size of blocks. `bench local` has the table."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

import raykv
from raykv.arena import block_copy
from raykv.bench.blocks.memcpy import Blocks, Memcpy
from raykv.bench.blocks.store_all import LATE_S, TRIES, store_all
from raykv.bench.testbed import local_pool, on_node, rows_cache
from raykv.config import MIB, parse_size
from raykv.keys import Keys

POOL, POOL_BYTES = "bench-sizes", 1024 * MIB
FILL = 1280 * MIB  # bytes stored before timing; more than the pool holds, so that timed stores evict
SPAN = 768 * MIB  # bytes of slots that copies use in turn; more than the CPU caches hold
BUFFERS = 256 * MIB  # bytes of the caller's buffers, which calls use in turn; more than the CPU caches hold
LARGEST = 128 * MIB  # maximum bytes of a call
CHUNK = 32 * MIB
PAIRS_MIN, PAIRS_MAX, PAIRS_BYTES = 16, 200, 1024 * MIB


class Shape(NamedTuple):
    """Number of blocks of a call, and bytes of a block."""

    blocks: int
    block_bytes: int

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def pairs(self) -> int:
        return min(PAIRS_MAX, max(PAIRS_MIN, PAIRS_BYTES // self.bytes))


class Times(NamedTuple):
    """Seconds of a call, of a memcpy of the same bytes by one thread, and of a memcpy by an arena's threads."""

    call: float
    one: float
    all: float


def shapes(blocks: str, block_bytes: str) -> list[Shape]:
    """Shapes from texts like "1,4" and "64KiB,2MiB": each number with each size. Raises ValueError for other texts."""
    if not all(count.isdecimal() for count in blocks.split(",")):
        raise ValueError(f"blocks={blocks!r}: give numbers, such as 1,4,16,64")
    sizes = [parse_size("block-bytes", part) for part in block_bytes.split(",")]
    made = [Shape(int(count), int(size)) for count, size in itertools.product(blocks.split(","), sizes)]
    for shape in made:
        if shape.blocks < 1 or shape.block_bytes < 4096 or shape.bytes > LARGEST:
            raise ValueError(f"{shape.blocks} x {shape.block_bytes} bytes: a call takes from 4 KiB to 128 MiB")
    return made


class Worker:
    """A process that stores and reads blocks of one shape at a time."""

    def __init__(self) -> None:
        self.pool = raykv.attach(POOL)
        assert self.pool.session.local is not None
        self.arena = self.pool.session.local.arena
        self.one, self.all = Memcpy(1), Memcpy(block_copy.THREADS)
        self.slots: Blocks = []

    def take(self, shape: Shape) -> None:
        """Use blocks of this shape from now on."""
        self.shape = shape
        self.cache = rows_cache(self.pool, shape.block_bytes, model=str(shape))
        self.filled = FILL // shape.block_bytes
        self.keys = self.cache.keys(np.arange((self.filled + 2 * shape.pairs * shape.blocks) * 16))
        block = np.random.default_rng(0).integers(0, 255, shape.block_bytes, np.uint8)
        self.buffers = np.tile(block, (BUFFERS // shape.block_bytes, 1))  # all equal: memcpy may overwrite them

    def fill(self) -> None:
        """Store blocks until every slot has been used. Later stores evict the oldest blocks."""
        step = CHUNK // self.shape.block_bytes
        for at in range(0, self.filled, step):
            keys = self.keys[at : min(at + step, self.filled)]
            store_all(self.cache, keys, self.buffers[: len(keys)])
        self._find(self.filled)

    def stores(self) -> tuple[int, list[Times]]:
        """Time stores. Returns (number of keys stored so far, times). The memcpys copy into slots that are in use."""

        def store(turn: int) -> tuple[float, int]:
            at = self.filled + turn * self.shape.blocks
            keys, blocks = self.keys[at : at + self.shape.blocks], self._buffers(3 * turn)
            begin = time.perf_counter()
            stored = self.cache.store(keys, blocks)
            seconds = time.perf_counter() - begin
            if stored < len(keys):
                store_all(self.cache, keys, blocks)  # the readers need all blocks
            return seconds, stored

        turns, rows = self._pairs(
            store, lambda floor, turn: floor.seconds(self._slots(turn), list(self._buffers(turn)))
        )
        return self.filled + turns * self.shape.blocks, rows

    def reads(self, written: int) -> list[Times]:
        """Time reads of another process's blocks. The memcpys copy from the same slots."""
        self._find(written)
        first, last = written - len(self.slots), written - self.shape.blocks

        def read(turn: int) -> tuple[float, int]:
            at = first + 3 * turn * self.shape.blocks % (last - first + 1)
            keys, out = self.keys[at : at + self.shape.blocks], self._buffers(3 * turn)
            begin = time.perf_counter()
            with self.cache.match(keys) as match:
                count = match.read(out)
            return time.perf_counter() - begin, count

        return self._pairs(read, lambda floor, turn: floor.seconds(list(self._buffers(turn)), self._slots(turn)))[1]

    def _pairs(
        self, call: Callable[[int], tuple[float, int]], copy: Callable[[Memcpy, int], float]
    ) -> tuple[int, list[Times]]:
        """Return (number of turns, times of the turns whose call moved all blocks). A late call moves fewer blocks.

        call: returns (seconds that it took, number of blocks that it moved). copy: returns the seconds that it took.
        """
        rows: list[Times] = []
        for turn in range(2 * self.shape.pairs):
            seconds, moved = call(turn)
            one, both = copy(self.one, 3 * turn + 1), copy(self.all, 3 * turn + 2)
            if moved == self.shape.blocks:
                rows.append(Times(seconds, one, both))
            else:
                time.sleep(LATE_S)
            if len(rows) == self.shape.pairs:
                return turn + 1, rows
        raise AssertionError(f"{len(rows)} of {turn + 1} calls were whole: {self.pool.session.directory.faults}")

    def _find(self, stop: int) -> None:
        """Set `slots` to the slots of the last SPAN bytes of blocks before keys[stop]. A read maps these slots."""
        first, step = stop - SPAN // self.shape.block_bytes, CHUNK // self.shape.block_bytes
        self.slots = []
        # Match in steps: a match touches its blocks from last to first, so a single match of all blocks would reverse
        # the blocks' order of eviction.
        for at in range(first, stop, step):
            runs = self._views(self.keys[at : min(at + step, stop)])
            self.slots += [block for run in runs for block in run.reshape(-1, self.shape.block_bytes)]

    def _views(self, keys: Keys) -> Blocks:
        for _ in range(TRIES):
            with self.cache.match(keys) as match:
                count = match.read(self.buffers)
                if count == len(keys):
                    return [run for lease in match._leases for run in self.arena.views(lease.blocks.source)]
            time.sleep(LATE_S)
        raise AssertionError(f"{count} of {len(keys)} blocks are there: {self.pool.session.directory.faults}")

    def _buffers(self, turn: int) -> NDArray[np.uint8]:
        at = turn * self.shape.blocks % (len(self.buffers) - self.shape.blocks + 1)
        return self.buffers[at : at + self.shape.blocks]

    def _slots(self, turn: int) -> Blocks:
        at = turn * self.shape.blocks % (len(self.slots) - self.shape.blocks + 1)
        return self.slots[at : at + self.shape.blocks]


def table(node: str, wanted: list[Shape]) -> list[dict[str, float]]:
    """Return a row per shape: median GB/s (1e9 bytes), also as a share of memcpy by one thread and by all threads."""
    rows: dict[Shape, dict[str, float]] = {}
    for block_bytes in {shape.block_bytes: None for shape in wanted}:
        with local_pool(POOL, POOL_BYTES) as pool:  # a new pool for each size, so that all slabs have this size class
            rows |= _measure(pool, node, [shape for shape in wanted if shape.block_bytes == block_bytes])
    return [rows[shape] for shape in wanted]


def _measure(pool: Any, node: str, wanted: list[Shape]) -> dict[Shape, dict[str, float]]:
    writer, reader = on_node(Worker, node), on_node(Worker, node)
    rows: dict[Shape, dict[str, float]] = {}
    for shape in wanted:
        pool.clear()
        ray.get([worker.take.remote(shape) for worker in (writer, reader)])
        ray.get(writer.fill.remote())
        written, stores = ray.get(writer.stores.remote())
        reads = ray.get(reader.reads.remote(written))
        rows[shape] = {**shape._asdict(), **_figures(shape, stores, "store_"), **_figures(shape, reads, "read_")}
    for worker in (writer, reader):
        ray.kill(worker)
    return rows


def _figures(shape: Shape, rows: list[Times], prefix: str) -> dict[str, float]:
    call, one, both = (shape.bytes / statistics.median(column) / 1e9 for column in zip(*rows, strict=True))
    floors = "" if prefix == "read_" else prefix  # names as in the figures of `bench local`
    return {
        f"{prefix}e2e_gbps": call,
        f"{floors}memcpy1_gbps": one,
        f"{floors}memcpy_gbps": both,
        f"{prefix}of_memcpy1": call / one,
        f"{prefix}of_memcpy": call / both,
    }
