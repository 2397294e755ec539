"""Readers on several nodes that want the same long prompt at once read each other's copies."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.cluster.one_process import OneProcess
from helpers.pools import BLOCK, MIB, a_cache, eventually, payload, settled, tokens, worker

import raykv
from raykv.client.leases import stream
from raykv.cluster import named_actors
from raykv.keys import Keys

READERS = 3
PIECE = 32  # blocks of a pull
LONG = 3 * PIECE


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
