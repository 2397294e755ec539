"""A small pool with an external tier on two nodes: its engines, load on both, and how blocks get into the tier."""

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray

import raykv
from helpers.pools import MIB, Worker, eventually, holds, locations, other_node, payload, store, tokens, worker
from helpers.tiers.moody import WAIT_S

CPU = 8 * MIB  # memory of a node: two slabs, with a staging window of 1 MiB
SIZE = 32 << 10
BLOCKS = 16  # of a prompt: half a MiB
MEMORY = 2 * CPU // (BLOCKS * SIZE)  # prompts that both nodes' memory holds
IN_TIME_S = WAIT_S / 2  # far more than any deadline, and less than a tier waits
Keys = raykv.Keys
_seeds = itertools.count(os.getpid() << 20)  # so that no two processes use the same seeds


def written_through(start: Callable[..., raykv.KVPool], external: str) -> raykv.KVPool:
    """A pool that writes each block to this tier as soon as it is stored."""
    return start(cpu_memory=CPU, external=external, secret=b"s", write="through")


def a_cache(pool: raykv.KVPool, model: str = "m", tokens_per_s: float = 20.0) -> raykv.KVCache:
    """A cache that waits long for a tier, because its model computes slowly."""
    return pool.cache(
        model=model,
        dtype="uint8",
        layout="rows",
        block_tokens=16,
        block_bytes=SIZE,
        recompute_tokens_per_s=tokens_per_s,
    )


class Engine(Worker):
    """An engine that waits long for tiers."""

    def cache(self, model: str = "m", block_bytes: int = SIZE) -> raykv.KVCache:
        return a_cache(self.pool, model)

    def push_out(self, keys: Keys) -> None:
        push_out(self.pool, self.cache(), keys)


class Totals(NamedTuple):
    stored: int
    read: int
    wrong: int
    calls: int
    longest_s: float
    errors: list[str]


class Load(Worker):
    """An engine that stores and reads, with the deadline that engines have, until `end` is called."""

    def __init__(self, pool: str) -> None:
        super().__init__(pool, be_patient=False)
        self._stopped = threading.Event()
        self._stored = self._read = self._wrong = self._calls = 0
        self._longest, self._errors = 0.0, list[str]()
        self._thread = threading.Thread(target=self._go, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def totals(self) -> Totals:
        return Totals(self._stored, self._read, self._wrong, self._calls, self._longest, self._errors)

    def end(self) -> Totals:
        self._stopped.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.totals()

    def _go(self) -> None:
        cache = a_cache(self.pool, "load", 10_000.0)
        mine = [next(_seeds) for _ in range(20)]  # prompts that no other load stores
        random = np.random.default_rng(mine[0])
        while not self._stopped.is_set():
            try:
                seed, blocks = random.choice([*range(20), *mine]), random.integers(1, BLOCKS + 1)
                self._step(cache, cache.keys(tokens(int(seed), int(blocks))))
            except Exception as error:
                self._errors.append(repr(error))

    def _step(self, cache: raykv.KVCache, keys: Keys) -> None:
        begin = time.monotonic()
        with cache.match(keys) as match:
            out = np.zeros((match.num_blocks, SIZE), np.uint8)
            n = match.read(out)
        self._longest = max(self._longest, time.monotonic() - begin)
        self._read += n
        blocks = payload(keys, SIZE)
        self._wrong += int((out[:n] != blocks[:n]).any(axis=1).sum())
        begin = time.monotonic()
        self._stored += cache.store(keys, blocks[n:], start=n)
        self._longest = max(self._longest, time.monotonic() - begin)
        self._calls += 1


class Under:
    """Load on both nodes during a `with` block. In the end no call may have failed or taken long."""

    def __init__(self, pool: raykv.KVPool) -> None:
        self._loads = [worker(pool, node_id, Load) for node_id in (pool.node_id, other_node(pool))]

    def __enter__(self) -> "Under":
        ray.get([load.begin.remote() for load in self._loads])
        eventually(lambda: all(load.stored and load.read for load in self._totals()))
        self.goes_on(10)
        return self

    def goes_on(self, calls: int) -> None:
        """Wait until each node has made `calls` more calls."""
        before = self._totals()
        eventually(lambda: all(now.calls >= old.calls + calls for now, old in zip(self._totals(), before, strict=True)))

    def _totals(self) -> list[Totals]:
        found: list[Totals] = ray.get([load.totals.remote() for load in self._loads])
        return found

    def __exit__(self, kind: object, *_: object) -> None:
        found = ray.get([load.end.remote() for load in self._loads])
        if kind is None:
            for totals in found:
                assert totals.errors == [] and totals.wrong == 0 and totals.stored and totals.read, totals
                assert totals.longest_s < IN_TIME_S, totals


def tiers(pool: raykv.KVPool) -> list[dict[str, Any]]:
    return list(pool.stats().get("tiers", {}).values())


def states(pool: raykv.KVPool) -> set[str]:
    return {tier["state"] for tier in tiers(pool)}


def total(pool: raykv.KVPool, what: str) -> int:
    return sum(tier[what] for tier in tiers(pool))


def in_tier_only(pool: raykv.KVPool, cache: raykv.KVCache, keys: Keys) -> int:
    """How many of these blocks a match would read from a tier."""
    return int((locations(pool, cache, keys)["node"] & 1).sum())


def prompts(cache: raykv.KVCache, count: int, blocks: int = BLOCKS) -> list[Keys]:
    """Prompts that nobody has stored before."""
    return [cache.keys(tokens(next(_seeds), blocks)) for _ in range(count)]


def store_slowly(pool: raykv.KVPool, cache: raykv.KVCache, kept: list[Keys]) -> None:
    """Store a quarter of the memory at a time, each time waiting until as many blocks are demoted."""
    for at in range(0, len(kept), MEMORY // 4):
        before, end = total(pool, "demoted"), time.monotonic() + 20.0
        stored = sum(store(cache, keys) for keys in kept[at : at + MEMORY // 4])
        for keys in kept[at : at + MEMORY // 4]:
            holds(cache, keys)  # a read: with min_hits=1 only blocks that were hit are demoted
        while total(pool, "demoted") < before + stored and time.monotonic() < end:
            time.sleep(0.02)


def keep_all(cache: raykv.KVCache, kept: list[Keys]) -> None:
    """Store missing blocks until none is missing: some may be evicted before they are demoted."""

    def missing() -> list[Keys]:
        return [keys for keys in kept if not holds(cache, keys)]

    def all_there() -> bool:
        for keys in missing():
            store(cache, keys)
        return not missing()

    eventually(all_there)


def push_out(pool: raykv.KVPool, cache: raykv.KVCache, *pushed: Keys) -> None:
    """Store until the blocks are in the tier, and no longer in memory."""

    def out() -> bool:
        store_slowly(pool, cache, list(pushed))
        for filler in prompts(cache, 5 * MEMORY // 4):  # more than memory holds
            store(cache, filler)
        in_tier = [in_tier_only(pool, cache, keys) for keys in pushed]  # this match is a use of the blocks
        return in_tier == list(map(len, pushed))

    eventually(out)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a disk of that size in a folder. Skips the test if this user can't mount, except under CI."""
    if os.geteuid() and not os.environ.get("CI"):
        pytest.skip("it takes root to mount a disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
