"""Readers on several nodes: a process takes leases for them, or they read each other's copies of a long prompt."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.cluster.one_process import OneProcess
from helpers.pools import (
    BLOCK,
    MIB,
    a_cache,
    eventually,
    keep,
    locations,
    other_node,
    payload,
    settled,
    store,
    tokens,
    worker,
)
from numpy.typing import NDArray

import raykv
import raykv.client.leases.joint_match
from raykv.arena import buffers
from raykv.client.leases import stream
from raykv.client.leases.joint_match import JointMatch, Part
from raykv.client.leases.lease import Lease, Leased
from raykv.cluster import named_actors
from raykv.keys import Keys
from raykv.protocol.location import LOCATION, is_tier

SIZE, BLOCKS = 32 << 10, 16
_seeds = itertools.count(100)
READERS = 3  # of one long prompt at once
PIECE = 32  # blocks of a pull
LONG = 3 * PIECE


class Reader:
    """A reader that uses another process's leases."""

    def __init__(self, pool: str) -> None:
        self.pool = raykv.attach(pool)

    def read(self, leased: Leased) -> NDArray[np.uint8]:
        lease = Lease.borrowed(self.pool.session, SIZE, leased)
        out = np.zeros((len(lease), SIZE), np.uint8)
        return out[: lease.read(buffers.dense("out", out, len(lease), SIZE), verify=True)]


def test_the_stores_of_the_readers_nodes_bring_what_only_a_tier_has(
    start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    """This process maps only its own node's memory."""
    tier = f"file://{tmp_path}?capacity=256MiB&shared=1"
    pool = start(cpu_memory=8 * MIB, external=tier, secret=b"s", write="through")
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=SIZE)
    keys, nodes = cache.keys(tokens(1, BLOCKS)), [other_node(pool), pool.node_id]
    readers = [worker(pool, node, Reader) for node in nodes]

    def only_in_the_tier() -> bool:
        store(cache, keys)
        eventually(lambda: sum(tier["blocks"] for tier in pool.stats().get("tiers", {}).values()) >= BLOCKS)
        for _ in range(2 * 8 * MIB // (BLOCKS * SIZE)):
            store(cache, cache.keys(tokens(next(_seeds), BLOCKS)))
        found = locations(pool, cache, keys)["node"]
        return len(found) == BLOCKS and bool(is_tier(found).all())

    eventually(only_in_the_tier)
    match = JointMatch(pool.session, [Part(node, keys) for node in nodes], 20.0).ask()
    assert match.tokens == match.fetch_external() == BLOCKS * 16
    for part, reader in enumerate(readers):
        (leased,) = match.leased(part, 0, BLOCKS)
        assert (np.frombuffer(leased.source, LOCATION)["node"] == leased.name.node).all()
        assert (ray.get(reader.read.remote(leased)) == payload(keys, SIZE)).all()
    match.release()
    pool.session.directory.heartbeat()
    eventually(lambda: settled(pool))


def test_what_a_reader_pulled_by_a_lease_stays_on_its_node_though_that_ends_at_once(
    start: Callable[..., raykv.KVPool],
) -> None:
    pool = start(cpu_memory=8 * MIB)
    cache, there = (
        pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=SIZE),
        other_node(pool),
    )
    keys, reader = cache.keys(tokens(1, BLOCKS)), worker(pool, other_node(pool), Reader)
    eventually(lambda: store(cache, keys) >= 0 and len(locations(pool, cache, keys)) == BLOCKS)

    match = JointMatch(pool.session, [Part(there, keys)], 20.0).ask()
    (leased,) = match.leased(0, 0, BLOCKS)
    assert (ray.get(reader.read.remote(leased)) == payload(keys, SIZE)).all()
    match.release()
    pool.session.directory.heartbeat()
    assert pool.stats()["nodes"][there]["replica"] == BLOCKS

    match = JointMatch(pool.session, [Part(there, keys)], 20.0).ask()
    (leased,) = match.leased(0, 0, BLOCKS)
    assert (np.frombuffer(leased.source, LOCATION)["node"] == leased.name.node).all()
    match.release()
    eventually(lambda: settled(pool))


def test_of_too_many_keys_of_parts_of_other_lengths_the_first_are_asked_for(
    start: Callable[..., raykv.KVPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such keys can't be asked for in pieces, and the keys of a call are bounded."""
    pool = start(cpu_memory=8 * MIB)
    short, long = (
        pool.cache(model="m", dtype="uint8", layout=f"of {count}", block_tokens=count, block_bytes=SIZE)
        for count in (16, 48)
    )
    asked = tokens(3, 24)
    parts = [Part(pool.node_id, short.keys(asked)), Part(pool.node_id, long.keys(asked), 2)]
    for cache, part in zip((short, long), parts, strict=True):
        keep(cache, part.keys)
    for most, found in ((32, 24), (31, 21), (16, 12), (4, 3), (3, 0)):
        monkeypatch.setattr(raykv.client.leases.joint_match, "KEYS_PER_JOINT_CALL", most)
        match = JointMatch(pool.session, parts, 1e4).ask()
        assert match.tokens == found * 16
        match.release()


def test_parts_with_blocks_ahead_are_asked_for_at_once(
    start: Callable[..., raykv.KVPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, each piece would lose its last block."""
    pool = start(cpu_memory=8 * MIB)
    caches = [
        pool.cache(model="m", dtype="uint8", layout=layout, block_tokens=16, block_bytes=SIZE)
        for layout in ("target", "drafter")
    ]
    target, drafter = (cache.keys(tokens(4, BLOCKS)) for cache in caches)
    for cache, keys in zip(caches, (target, drafter), strict=True):
        keep(cache, keys)
    monkeypatch.setattr(raykv.client.leases.joint_match, "KEYS_PER_CALL", 8)
    for ahead, found in ((0, BLOCKS), (1, BLOCKS - 1), (2, BLOCKS - 2)):
        match = JointMatch(pool.session, [Part(pool.node_id, target), Part(pool.node_id, drafter, 0, ahead)], 1e4).ask()
        assert match.tokens == match.fetch_external() == found * 16
        for part in (0, 1):
            assert sum(len(leased.source) for leased in match.leased(part, 0, BLOCKS)) == found * LOCATION.itemsize
            assert len(match.leased(part, 0, BLOCKS)) == (1 if ahead else 4)
        match.release()
    monkeypatch.setattr(raykv.client.leases.joint_match, "KEYS_PER_JOINT_CALL", 16)
    match = JointMatch(pool.session, [Part(pool.node_id, target), Part(pool.node_id, drafter, 2, 1)], 1e4).ask()
    assert match.tokens == 7 * 16 and match.first(1) == 5
    match.release()


class Crowd(NamedTuple):
    """Clients on other nodes than the node that has the prompt. matches: of each client, in one order."""

    pool: raykv.KVPool
    keys: Keys
    writer: str
    caches: list[raykv.KVCache]
    matches: list[raykv.Match]

    def bytes_from_writer(self) -> int:
        routes = self.pool.stats()["transports"]
        return sum(route["bytes"]["tcp"] for route in routes if route["from"] == self.writer)

    def read(self, reader: int) -> int:
        """How many leading blocks a client reads. AssertionError if one is wrong."""
        out = np.zeros((LONG, BLOCK), np.uint8)
        n = self.matches[reader].read(out)
        assert (out[:n] == payload(self.keys[:n], BLOCK)).all()
        return n

    def faults(self) -> list[dict[str, int]]:
        return [dict(cache.session.directory.faults) for cache in self.caches]


@pytest.fixture
def crowd(
    cluster: OneProcess,
    third_node: Callable[[], Any],
    start: Callable[..., raykv.KVPool],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Crowd]:
    """Pulls and long prompts are an eighth as large as elsewhere."""
    monkeypatch.setattr(stream, "PIECE_BYTES", PIECE * BLOCK)
    head, writer = cluster.nodes
    nodes = [head, *(third_node().node_id for _ in range(READERS - 1))]
    pool = start(cpu_memory=128 * MIB, transport="tcp", locality=1e9)
    ray.get(named_actors.find_directory(pool.name).__ray_call__.remote(_have_long_prompts))
    keys = a_cache(pool).keys(tokens(1, LONG))
    assert ray.get(worker(pool, writer).store.remote(keys)) == LONG
    caches = []
    for node in nodes:
        with cluster.on(node):
            caches.append(a_cache(raykv.attach(pool.name)))
    with ExitStack() as stack:
        matches = [stack.enter_context(cache.match(keys)) for cache in caches]
        assert [match.nodes for match in matches] == READERS * [[writer]]
        yield Crowd(pool, keys, writer, caches, matches)
    eventually(lambda: settled(pool))


def _have_long_prompts(actor: Any) -> None:
    """Have prompts of two pieces count as long."""
    actor._directory.long_bytes = 2 * PIECE * BLOCK


def test_a_node_sends_each_block_to_one_of_the_readers(crowd: Crowd) -> None:
    with ThreadPoolExecutor(READERS) as threads:
        assert list(threads.map(crowd.read, range(READERS))) == READERS * [LONG]
    assert crowd.faults() == READERS * [{}]
    assert crowd.bytes_from_writer() < 2 * LONG * BLOCK


def test_a_reader_reads_what_it_fetched_and_copies_behind(crowd: Crowd) -> None:
    assert crowd.read(0) == LONG
    there = crowd.matches[1].fetch()
    assert 0 < there < LONG
    before = crowd.bytes_from_writer()
    assert crowd.read(1) == LONG
    assert crowd.bytes_from_writer() < before + (LONG - there) * BLOCK
    assert crowd.faults() == READERS * [{}]


def test_a_reader_reads_no_copies_while_a_node_is_late(cluster: OneProcess, crowd: Crowd) -> None:
    assert crowd.read(0) == LONG
    before, late = crowd.bytes_from_writer(), crowd.pool.stats()["nodes"][cluster.nodes[0]]["index"]
    store = crowd.caches[1].session.local
    assert store is not None
    store.gave_up(np.array([late]))
    assert crowd.read(1) == LONG
    assert crowd.bytes_from_writer() == before + LONG * BLOCK
