"""Hit rate of a tenant with a memory quota: while another tenant floods the pool, and without the other tenant.

    python benchmarks/quotas.py [--seconds 60] [--json]

The pool has two nodes. The minimum of tenant `b` is a quarter of the pool's memory. The tenant has twice as many
prompts as fit into its minimum. It asks for some prompts more often than for other prompts, and stores the blocks that
it does not find. Meanwhile, a process on each node stores new prompts as tenant `a`, as fast as it can. `alone`: the
same requests without tenant `a`; the minimum is also the maximum. `without a minimum`: the same flood without a quota.
"""

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

import raykv
from raykv.bench.testbed import local_cluster, local_pool, on_node
from raykv.config import MIB

POOL, BLOCK_BYTES, PROMPT = "quotas", 256 << 10, 16  # PROMPT: number of blocks of a prompt
MINIMUM = 0.25  # share of both nodes' 112 MiB: 28 MiB, which hold 7 prompts of 4 MiB
PROMPTS = 14
PAUSE_S = 0.1  # seconds between two requests of b, since an engine also has other work
WARM = 50  # number of requests before the first one that counts


class Flood:
    """Stores new prompts until `end` is called."""

    def __init__(self, number: int) -> None:
        self._pool, self._number = raykv.attach(POOL), number
        self._end, self._blocks = threading.Event(), 0

    def run(self) -> int:
        """Store prompts. Returns the number of stored blocks."""
        cache, blocks = cache_of(self._pool, "a"), np.zeros((PROMPT, BLOCK_BYTES), np.uint8)
        random = np.random.default_rng(self._number + time.time_ns())
        while not self._end.is_set():
            self._blocks += cache.store(cache.keys(random.integers(0, 50_000, 16 * PROMPT)), blocks)
        self._pool.close()
        return self._blocks

    def end(self) -> None:
        self._end.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with local_cluster(2) as nodes, local_pool(POOL, 64 * MIB) as pool:
        pool.set_quota("b", minimum=MINIMUM)
        with flood(nodes) as stored:
            beside, requests = hit_rate(pool, seconds=arguments.seconds)
        pool.set_quota("b", minimum=MINIMUM, maximum=MINIMUM)
        alone, _ = hit_rate(pool, requests)
        pool.remove_quota("b")
        with flood(nodes):
            unprotected, _ = hit_rate(pool, requests)
    figures = {
        "hit_rate": beside,
        "alone": alone,
        "without_a_minimum": unprotected,
        "requests": requests,
        "flood_blocks_per_s": round(sum(stored) / arguments.seconds),
    }
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:<20} {figures[name]:.4g}" for name in figures))


def cache_of(pool: raykv.KVPool, tenant: str) -> raykv.KVCache:
    return pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK_BYTES, tenant=tenant)


@contextmanager
def flood(nodes: list[str]) -> Iterator[list[int]]:
    """Flood the pool from each node. At the end, the yielded list has the number of blocks that each process stored."""
    floods = [on_node(Flood, node, number, max_concurrency=2) for number, node in enumerate(nodes)]
    running, stored = [each.run.remote() for each in floods], list[int]()
    try:
        yield stored
    finally:
        ray.get([each.end.remote() for each in floods])
        stored += ray.get(running)


def hit_rate(pool: raykv.KVPool, requests: int = 0, seconds: float = 0.0) -> tuple[float, int]:
    """Clear the pool, and send requests. Returns (share of blocks found after WARM requests, number of requests)."""
    pool.clear()
    cache, blocks = cache_of(pool, "b"), np.zeros((PROMPT, BLOCK_BYTES), np.uint8)
    out, random = np.empty_like(blocks), np.random.default_rng(0)
    prompts = [cache.keys(random.integers(0, 50_000, 16 * PROMPT)) for _ in range(PROMPTS)]
    weights = 1 / np.arange(1, PROMPTS + 1)
    found, asked, end = 0, 0, time.monotonic() + seconds
    while asked < requests or time.monotonic() < end:
        n = request(cache, prompts[random.choice(PROMPTS, p=weights / weights.sum())], blocks, out)
        found += n if asked >= WARM else 0
        asked += 1
        time.sleep(PAUSE_S)
    return found / (PROMPT * (asked - WARM)), asked


def request(cache: raykv.KVCache, keys: Any, blocks: Any, out: Any) -> int:
    """Read a prompt's leading blocks, and store its other blocks. Returns the number of blocks read."""
    with cache.match(keys) as match:
        n = match.read(out[: match.num_blocks])
    if n < len(keys):
        cache.store(keys, blocks[n:], n)
    return int(n)


if __name__ == "__main__":
    main()
