"""Sends blocks both ways between every two nodes of a running pool, as engines do."""

import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raykv
from raykv.client.leases.match import Match
from raykv.cluster import internal_kv
from raykv.doctor.finding import OK, WRONG, Finding
from raykv.errors import reason_of

BLOCK_BYTES, BLOCKS = 512 << 10, 8  # all blocks together fill half of the smallest arena
TURNS = 3  # number of reads: the first one makes the connections, and the fastest one counts
DEADLINE_S = 60.0  # deadline for a task on another node
RATE = 1.0  # tokens that an engine computes per second; so low that a read always waits for a tier


class Reading(NamedTuple):
    """Number of blocks that were read, number of wrong blocks among them, and duration of the read in seconds."""

    read: int
    wrong: int
    seconds: float


@ray.remote(num_cpus=0, max_retries=0)
def store(pool: str, seed: int) -> int:
    """Store blocks on this node. Returns the number of new blocks."""
    cache = opened(pool)
    return cache.store(*content(cache, seed), wait=True)


@ray.remote(num_cpus=0, max_retries=0)
def read(pool: str, seed: int) -> Reading:
    """Read the blocks that another node stored with this seed."""
    cache = opened(pool)
    keys, blocks = content(cache, seed)
    out = np.zeros_like(blocks)
    begin = time.perf_counter()
    with Match(cache.session, keys, RATE, counted=False).ask() as match:
        count = match.read(out[: match.num_blocks])
    seconds = time.perf_counter() - begin
    return Reading(count, int((out[:count] != blocks[:count]).any(axis=1).sum()), seconds)


@lru_cache(1)
def opened(pool: str) -> raykv.KVCache:
    """Return a cache for these blocks. Tasks on a node mostly run in one worker, which attaches once."""
    return raykv.attach(pool).cache(
        model="raykv doctor", dtype="uint8", layout="rows", block_tokens=1, block_bytes=BLOCK_BYTES
    )


def content(cache: raykv.KVCache, seed: int) -> tuple[Any, Any]:
    """Return keys and blocks that depend only on the seed."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 1 << 31, BLOCKS)
    return cache.keys(tokens), random.integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)


def findings(pool: raykv.KVPool, hosts: dict[str, str]) -> Iterator[Finding]:
    """Yield findings on each node's store, and on every two nodes with a store. hosts: host names by Ray node id."""
    stats, idle = pool.stats(), internal_kv.left_nodes(pool.name)
    serve = []
    for node in hosts:
        state = stats.get("nodes", {}).get(node, {}).get("state", "no store")
        if node in idle:
            yield Finding(node, "store", OK, "none: nothing but the pool runs there; see idle_node_s")
        elif state == "alive":
            serve.append(node)
            yield Finding(node, "store", OK, f"serves pool {pool.name}")
        else:
            why = stats["failed"].get(node) or ("" if "nodes" in stats else "the directory does not answer")
            text = f"{state}{': ' if why else ''}{why}: see `raykv status --name {pool.name}`, and try again in 30 s"
            yield Finding(node, "store", WRONG, text)
    seed = int(np.random.default_rng().integers(1 << 32))
    for turn, (reader, source) in enumerate(permutations(serve, 2)):
        yield _exchange(pool, hosts, reader, source, seed + TURNS * turn)


def _exchange(pool: raykv.KVPool, hosts: dict[str, str], reader: str, source: str, seed: int) -> Finding:
    """Store blocks on one node, and read them on another node."""
    whose, see = f"{hosts[source]} ({source[:16]})", f"see `raykv status --name {pool.name}`"
    seconds = []
    for turn in range(TURNS):
        try:
            stored = _at(source, store, pool.name, seed + turn)
            found = _at(reader, read, pool.name, seed + turn)
        except RayError as error:
            return Finding(reader, "blocks", WRONG, f"none from {whose}: {reason_of(error)}", source)
        if stored < BLOCKS:
            text = f"{whose} had room for {stored} of {BLOCKS}: others hold its memory, or it has left; {see}"
            return Finding(reader, "blocks", WRONG, text, source)
        if found.read < BLOCKS or found.wrong:
            text = f"{found.read} of {BLOCKS} came from {whose}, {found.wrong} of them altered: {see} for what failed"
            return Finding(reader, "blocks", WRONG, text, source)
        seconds.append(found.seconds)
    gbps, mib = BLOCKS * BLOCK_BYTES / min(seconds) / 1e9, BLOCKS * BLOCK_BYTES >> 20
    return Finding(reader, "blocks", OK, f"{mib} MiB from {whose} at {gbps:.2f} GB/s", source, gbps)


def _at(node: str, task: Any, *args: Any) -> Any:
    """Run a task on a node. Returns the task's result."""
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.get(task.options(scheduling_strategy=pinned).remote(*args), timeout=DEADLINE_S)
