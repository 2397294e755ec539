"""Floors (baselines): the time to move a prompt's KV without an engine, by Ray, by the pool, and by memcpy."""

import time
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raykv
from raykv.bench.blocks.memcpy import Memcpy
from raykv.bench.testbed import rows_cache
from raykv.config import MIB
from raykv.keys import Keys

BLOCK_BYTES = 2 * MIB  # 64 KiB per token: 16 layers of 4 heads of 128, keys and values, in float32


class Bytes:
    """An actor that holds as many bytes as a prompt's KV, to time how Ray moves them to another node."""

    def __init__(self, size: int) -> None:
        self.bytes = np.random.default_rng(0).integers(0, 255, size, np.uint8)

    def array(self) -> NDArray[np.uint8]:
        return self.bytes

    def seconds(self, other: Any) -> float:
        begin = time.perf_counter()
        array = ray.get(other.array.remote())
        assert array.nbytes == self.bytes.nbytes
        return time.perf_counter() - begin

    def memcpy_seconds(self) -> float:
        """Seconds of one thread's memcpy into memory that was written before."""
        return Memcpy(1).seconds([np.zeros_like(self.bytes)], [self.bytes])


class Lane:
    """An actor that stores a prompt's bytes in a pool, to time how the pool moves them to another node."""

    def __init__(self, pool: str, size: int) -> None:
        self.cache = rows_cache(raykv.attach(pool), BLOCK_BYTES, 1, "floor")
        self.blocks = np.zeros((-(-size // BLOCK_BYTES), BLOCK_BYTES), np.uint8)
        self.share = size / self.blocks.nbytes  # used share of the blocks: the last block may be partly unused

    def store(self, turn: int) -> None:
        count = self.cache.store(self._keys(turn), self.blocks, wait=True)
        assert count == len(self.blocks), f"{count} of {len(self.blocks)} blocks stored"

    def seconds(self, turn: int) -> float:
        """Seconds to fetch another node's blocks."""
        begin = time.perf_counter()
        with self.cache.match(self._keys(turn)) as match:
            count = match.fetch()
        seconds = time.perf_counter() - begin
        assert count == len(self.blocks), f"{count} of {len(self.blocks)} blocks came"
        return seconds * self.share

    def _keys(self, turn: int) -> Keys:
        return self.cache.keys(np.arange(len(self.blocks)) + turn * len(self.blocks))
