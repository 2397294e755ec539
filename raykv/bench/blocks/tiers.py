"""`raykv bench tiers`: stores to and loads from external tiers, beside bare direct I/O and bare redis-py."""

import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raykv.arena.arena import Arena
from raykv.arena.files import SHM
from raykv.bench.testbed import await_port, free_port
from raykv.bench.timing import gbps, seconds_of
from raykv.config import MIB, fingerprint
from raykv.directory.state.tier_catalog import BATCH_BYTES
from raykv.protocol.location import CONTENT_BYTES, COUNTER_BITS, KEY_BYTES, LOCATION, Locations
from raykv.protocol.transfers import PULLED
from raykv.system.extras import to_install
from raykv.tiers import open_tier, parse
from raykv.tiers.copier import TierCopier
from raykv.tiers.file import IN_FLIGHT
from raykv.tiers.guarded import GuardedTier

BLOCK_BYTES, BLOCKS = 2 * MIB, 64
CAPACITY = "1GiB"
WARM, PAIRS = 2, 10
START_S = 10.0  # seconds for a Redis server to start
Keys = NDArray[np.uint8]


class Floor(Protocol):
    """The floor (baseline) of a tier: it moves the same bytes with only the tier's library."""

    def store(self, blocks: list[memoryview]) -> None: ...

    def load(self) -> None:
        """Load the blocks of the last `store`."""

    def delete(self) -> None:
        """Delete the blocks of the last `store`. Does nothing if the next `store` overwrites them, as in the tier."""

    def close(self) -> None: ...


class Node(TierCopier):
    """A node store's copies: from one slab of an arena to the tier, and from the tier to the other slab."""

    def __init__(self, url: str) -> None:
        path = f"{SHM}/raykv-bench-tiers-{os.getpid()}"
        arena = Arena.create(path, fingerprint("bench", b"bench"), BLOCKS * BLOCK_BYTES, 2)
        super().__init__(arena, GuardedTier(lambda: open_tier(parse(url)), fingerprint("bench", b"bench")))
        try:
            self.external.check()
            self.external.open(bytes(CONTENT_BYTES))
            while self._arena.offer_next():
                pass
        except BaseException:
            self.stop()
            raise
        self._blocks = np.random.default_rng(0).integers(0, 255, (BLOCKS, BLOCK_BYTES), np.uint8)

    def stop(self) -> None:
        self.external.close()
        self._arena.close(unlink=True)

    def fill(self, turn: int) -> tuple[Keys, list[memoryview]]:
        """Return new keys for this turn, and their blocks in the arena."""
        keys = np.random.default_rng(turn).integers(0, 255, (BLOCKS, KEY_BYTES), np.uint8)
        assert self._arena.write(_locations(0, turn), keys, self._blocks).all()
        return keys, [self._arena.views(location)[0].data for location in np.split(_locations(0, turn), BLOCKS)]

    def store(self, keys: Keys, turn: int) -> None:
        batch = BATCH_BYTES // BLOCK_BYTES
        for at in range(0, BLOCKS, batch):
            stored = self.demote(_locations(0, turn)[at : at + batch], keys[at : at + batch])
            assert stored.all(), f"blocks were not stored: {self.external.faults}"

    def fetch(self, keys: Keys, turn: int) -> None:
        assert (self.load(keys, self._arena, _locations(1, turn)) == PULLED).all(), (
            f"blocks were not loaded: {self.external.faults}"
        )

    def delete(self, keys: Keys) -> None:
        self.external.delete([key.tobytes() for key in keys])


class DirectIo:
    """Direct I/O on one preallocated file, with as many requests in flight as the tier has."""

    def __init__(self, folder: str) -> None:
        self._fd = os.open(os.path.join(folder, "floor"), os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, BLOCKS * BLOCK_BYTES)
        self._rows = np.frombuffer(mmap.mmap(-1, BLOCKS * BLOCK_BYTES), np.uint8).reshape(BLOCKS, BLOCK_BYTES)
        self._threads = ThreadPoolExecutor(IN_FLIGHT)

    def store(self, blocks: list[memoryview]) -> None:
        offsets = range(0, BLOCKS * BLOCK_BYTES, BLOCK_BYTES)
        done = sum(self._threads.map(lambda block, at: os.pwrite(self._fd, block, at), blocks, offsets))
        assert done == BLOCKS * BLOCK_BYTES

    def load(self) -> None:
        offsets = range(0, BLOCKS * BLOCK_BYTES, BLOCK_BYTES)
        done = sum(self._threads.map(lambda row, at: os.preadv(self._fd, [row], at), self._rows, offsets))
        assert done == BLOCKS * BLOCK_BYTES

    def delete(self) -> None:
        """Do nothing: as in the tier, the next `store` overwrites these blocks."""

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)


class RedisPy:
    """SET and GET, with as many commands in a pipeline as the tier sends."""

    def __init__(self, port: int) -> None:
        import redis

        from raykv.tiers.redis import PIECE_BYTES, READ_BYTES

        self._batch = PIECE_BYTES // BLOCK_BYTES
        self._client = redis.Redis("127.0.0.1", port, socket_read_size=READ_BYTES)

    def store(self, blocks: list[memoryview]) -> None:
        for at in range(0, BLOCKS, self._batch):
            with self._client.pipeline(transaction=False) as pipe:
                for i in range(at, at + self._batch):
                    pipe.set(b"floor:%d" % i, blocks[i])
                pipe.execute()

    def load(self) -> None:
        for at in range(0, BLOCKS, self._batch):
            with self._client.pipeline(transaction=False) as pipe:
                for i in range(at, at + self._batch):
                    pipe.get(b"floor:%d" % i)
                assert sum(map(len, pipe.execute())) == self._batch * BLOCK_BYTES

    def delete(self) -> None:
        self._client.unlink(*(b"floor:%d" % i for i in range(BLOCKS)))

    def close(self) -> None:
        self._client.close()


def run(directory: str) -> dict[str, Any]:
    """Return median GB/s (1e9 bytes), and ratios to the floors. directory: a folder on the disk to measure."""
    with _folder(directory) as folder:
        figures: dict[str, Any] = _figures("file", f"file://{folder}/tier?capacity={CAPACITY}", DirectIo(folder))
    missing = _missing()
    if missing:
        return {**figures, "redis": f"left out: {missing}", "pairs": PAIRS}
    with _redis_server() as port:
        figures |= _figures("redis", f"redis://127.0.0.1:{port}?capacity={CAPACITY}", RedisPy(port))
    return {**figures, "pairs": PAIRS}


def _figures(name: str, url: str, floor: Floor) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"store": [], "load": [], "floor_store": [], "floor_load": []}
    node = Node(url)
    try:
        for turn in range(1, WARM + PAIRS + 1):
            keys, blocks = node.fill(turn)
            calls: dict[str, Callable[[], None]] = {
                "store": lambda keys=keys, turn=turn: node.store(keys, turn),  # type: ignore[misc]
                "floor_store": lambda blocks=blocks: floor.store(blocks),  # type: ignore[misc]
                "load": lambda keys=keys, turn=turn: node.fetch(keys, turn),  # type: ignore[misc]
                "floor_load": floor.load,
            }
            for what, call in calls.items():
                took = seconds_of(call)
                if turn > WARM:
                    seconds[what].append(took)
            node.delete(keys)
            floor.delete()
    finally:
        node.stop()
        floor.close()
    figures = {f"{name}_{what}_gbps": gbps(BLOCKS * BLOCK_BYTES, values) for what, values in seconds.items()}
    return figures | {f"{name}_{what}_ratio": _ratio(seconds, what) for what in ("store", "load")}


def _ratio(seconds: dict[str, list[float]], what: str) -> float:
    pairs = zip(seconds[f"floor_{what}"], seconds[what], strict=True)
    return statistics.median(floor / ours for floor, ours in pairs)


def _locations(slab: int, turn: int) -> Locations:
    """Locations of all slots of a slab, with a new generation in every turn."""
    locations = np.zeros(BLOCKS, LOCATION)
    locations["slab"], locations["slot"], locations["bytes"] = slab, np.arange(BLOCKS), BLOCK_BYTES
    locations["slab_gen"], locations["gen"] = 1 << COUNTER_BITS, (1 << COUNTER_BITS) + turn
    return locations


@contextmanager
def _folder(directory: str) -> Iterator[str]:
    """Yield a temporary folder. Raises ValueError if its file system does not support direct I/O."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="raykv-bench-") as folder:
        try:
            os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            raise ValueError(f"{directory}: no direct I/O there ({error.strerror}): name a folder on a disk") from None
        yield folder


def _missing() -> str | None:
    """Return what is missing for the Redis bench; None if nothing is missing."""
    try:
        import redis  # noqa: F401
    except ModuleNotFoundError:
        return to_install("redis")
    return None if shutil.which("redis-server") else "there is no redis-server on PATH"


@contextmanager
def _redis_server() -> Iterator[int]:
    """Run a Redis server that keeps nothing on disk. Yields its port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            await_port(port, process, START_S)
            yield port
        finally:
            process.kill()
            process.wait()
