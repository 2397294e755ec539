"""`raykv trace` follows the requests of every client exactly, and records nothing while nobody follows."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray
from helpers.faces.trace import Lines
from helpers.pools import (
    BLOCK,
    MIB,
    eventually,
    kill,
    locations,
    node_store,
    other_node,
    pid,
    read,
    stopped,
    store,
    tokens,
    worker,
)

import raykv
import raykv.client.leases.stream
from raykv.cli.trace import text
from raykv.client.leases.stream import LATE
from raykv.directory.calls.why_missing import ABSENT

NOTHING = {"memory": 0, "node": 0, "external": 0}


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=32 * MIB)


def a_cache(pool: raykv.KVPool, model: str = "m", salt: str = "") -> raykv.KVCache:
    return pool.cache(model=model, dtype="uint8", layout="rows", salt=salt, block_tokens=16, block_bytes=BLOCK)


@contextmanager
def the_command(pool: raykv.KVPool, address: str) -> Iterator["subprocess.Popen[str]"]:
    """Run `raykv trace`, and interrupt it afterwards as Ctrl-C does."""
    command = [sys.executable, "-u", "-m", "raykv.cli", "trace", "--json", "--name", pool.name]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = {**os.environ, "RAY_ADDRESS": address}
    options["preexec_fn"] = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # SIGINT is ignored below a shell's background job
    with subprocess.Popen(command, **options) as it:
        try:
            yield it
        finally:
            it.send_signal(signal.SIGINT)
            assert it.wait(60) == 0, it.stderr and it.stderr.read()


def test_the_command_prints_hits_by_where_they_were(pool: raykv.KVPool, cluster: Any) -> None:
    cache, there = a_cache(pool), worker(pool, other_node(pool))
    own, others = (cache.keys(tokens(seed, 4)) for seed in (1, 2))
    assert store(cache, own) == 4 and ray.get(there.store.remote(others)) == 4
    eventually(lambda: len(locations(pool, cache, others)) == 4)
    with the_command(pool, cluster.address) as it:
        probe = a_cache(pool, model="probe")
        eventually(lambda: read(probe, probe.keys(tokens(0, 1))) and pool.session.directory.requests.followed)
        for keys in (own, others, cache.keys(tokens(3, 4))):
            read(cache, keys)
        longer = np.concatenate([tokens(1, 4), tokens(4, 2)])
        assert read(cache, cache.keys(longer)).read == 4
        ray.get(there.read.remote(own))
        assert it.stdout is not None
        lines: list[dict[str, Any]] = []
        while len(lines) < 5:
            line = json.loads(it.stdout.readline())
            lines += [line] * (line["model"] == "m")
    found = [(line["asked_tokens"], line["sources"], line["read_tokens"], line["short"]) for line in lines]
    assert sorted(map(str, found)) == sorted(
        map(
            str,
            [
                (64, {**NOTHING, "memory": 64}, 64, ""),
                (64, {**NOTHING, "node": 64}, 64, ""),
                (64, NOTHING, 0, ABSENT),
                (96, {**NOTHING, "memory": 64}, 64, ABSENT),
                (64, {**NOTHING, "node": 64}, 64, ""),
            ],
        )
    )
    pulled = [line for line in lines if line["sources"]["node"]]
    assert all(line["pull_ms"] >= 0 and line["copy_ms"] > 0 and line["bytes"] == 4 * BLOCK for line in pulled)
    assert {line["node"] for line in pulled} == {pool.node_id, other_node(pool)}
    assert [line["pull_ms"] for line in lines if not line["sources"]["node"]] == [None] * 3
    assert all(line["lookup_ms"] > 0 and line["kind"] == "request" for line in lines)


def test_a_read_that_is_cut_short_says_why(pool: raykv.KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        raykv.client.leases.stream, "data_deadline", lambda size: 1.0
    )  # this deadline ends before that of the store that pulls
    there, cache = worker(pool, other_node(pool)), a_cache(pool, model="late")
    keys = cache.keys(tokens(6, 4))
    assert ray.get(there.store.remote(keys, model="late")) == 4
    eventually(lambda: len(locations(pool, cache, keys)) == 4)
    lines = Lines(pool)
    with stopped(pid(node_store(pool, other_node(pool)))), cache.match(keys) as match:
        assert match.read(np.zeros((match.num_blocks, BLOCK), np.uint8)) < 4
    (line,) = lines.of("late", 1)
    assert (line["hit_tokens"], line["read_tokens"]) == (64, 0)
    assert (line["short"], line["short_node"]) == (LATE[0], other_node(pool))
    assert text(line).endswith(f"short: {LATE[0]} (node {other_node(pool)[:8]})")


def test_a_follower_goes_on_with_the_next_directory(pool: raykv.KVPool) -> None:
    cache, lines = a_cache(pool, model="after"), Lines(pool)
    kill(pool, "directory")
    keys = cache.keys(tokens(9, 1))

    def told() -> bool:
        read(cache, keys)
        lines.seen += lines.follower.poll()
        return any(line["model"] == "after" for line in lines.seen)

    eventually(told)
