"""Hits that are longer than the staging window of the reader's node."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
from helpers.client.long_prompts import LONG, WINDOW, full
from helpers.pools import (
    BLOCK,
    MIB,
    a_cache,
    eventually,
    node_store,
    other_node,
    payload,
    pid,
    read,
    settled,
    tokens,
    worker,
)

import raykv
import raykv.client.leases.joint_match
import raykv.client.leases.match
import raykv.client.leases.stream
from raykv.client.leases.stream import PIECES_AHEAD, Stream, piece_blocks


def test_a_read_ends_where_a_store_stops_in_the_middle(
    start: Callable[..., raykv.KVPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.client.leases.stream, "PIECE_BYTES", 2 * BLOCK)
    pool, cache, (keys, _, _) = full(start, "tcp")
    stopped = pid(node_store(pool, other_node(pool)))
    arrived = threading.Semaphore(0)
    taken = Stream._arrived

    def counted(stream: Stream, *args: Any) -> Any:
        arrived.release()
        return taken(stream, *args)

    monkeypatch.setattr(Stream, "_arrived", counted)
    out = np.zeros((LONG, BLOCK), np.uint8)
    with cache.match(keys) as match, ThreadPoolExecutor(1) as thread:
        reading = thread.submit(match.read, out)
        for _ in range(3 * WINDOW // 2):
            arrived.acquire()
        os.kill(stopped, signal.SIGKILL)
        n = reading.result()
    assert n >= 2 * WINDOW and (out[:n] == payload(keys[:n], BLOCK)).all()
    eventually(lambda: settled(pool))
    eventually(lambda: read(cache, keys)[:3] == (LONG, LONG, 0))


@pytest.mark.full
def test_a_read_is_whole_though_the_store_that_has_the_copies_is_killed(
    start: Callable[..., raykv.KVPool], third_node: Callable[[], Any]
) -> None:
    copies = third_node().node_id
    pool = start(cpu_memory=512 * MIB, transport="tcp", locality=1e9)
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, (PIECES_AHEAD + 1) * piece_blocks(BLOCK)))
    writer, reader = worker(pool, other_node(pool)), worker(pool, copies)
    assert ray.get(writer.store.remote(keys)) == len(keys) == ray.get(reader.lease.remote(keys))
    with cache.match(keys) as match:
        assert ray.get(reader.read.remote(keys))[:3] == (len(keys), len(keys), 0)
        os.kill(pid(node_store(pool, copies)), signal.SIGKILL)
        out = np.zeros((len(keys), BLOCK), np.uint8)
        assert match.read(out) == len(keys) and (out == payload(keys, BLOCK)).all()
    assert pool.session.directory.faults["pull"]
