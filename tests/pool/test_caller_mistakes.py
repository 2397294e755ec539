"""Users' mistakes with a pool: each is a miss, or is refused with an error that says what to do."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from helpers.pools import BLOCK, PATIENCE_S, eventually, keep, read, settled, store, tokens

import raykv
from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept
from raykv.keys import CacheId, Keys
from raykv.line.directory_line import DirectoryLine
from raykv.protocol import calls
from raykv.protocol.calls import STORE
from raykv.protocol.stores import ArenaDescription


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module()


def a_cache(pool: raykv.KVPool, **arguments: Any) -> raykv.KVCache:
    return pool.cache(
        **{"model": "m", "dtype": "uint8", "layout": "rows", "block_tokens": 16, "block_bytes": BLOCK, **arguments}
    )


# ---------------------------------------------------------------------- keys of another cache

PAGED = np.zeros((4, BLOCK), np.uint8)
METHODS: dict[str, Callable[[raykv.KVCache, Any], object]] = {
    "match": lambda cache, keys: cache.match(keys),
    "amatch": lambda cache, keys: cache.amatch(keys),
    "prefetch": lambda cache, keys: cache.prefetch(keys),
    "store": lambda cache, keys: cache.store(keys, PAGED),
    "store_from": lambda cache, keys: cache.store_from(keys, PAGED, range(4)),
    "astore": lambda cache, keys: asyncio.run(cache.astore(keys, PAGED)),
    "astore_from": lambda cache, keys: asyncio.run(cache.astore_from(keys, PAGED, range(4))),
    "reserve": lambda cache, keys: cache.reserve(keys),
    "pin": lambda cache, keys: cache.pin(keys),
    "unpin": lambda cache, keys: cache.unpin(keys),
    "touch": lambda cache, keys: cache.touch(keys),
    "done": lambda cache, keys: cache.done(keys),
}
OTHERS: dict[str, dict[str, Any]] = {
    "another model": {"model": "n"},
    "another block size in tokens": {"block_tokens": 32},
    "another block size in bytes": {"block_bytes": BLOCK // 2},
    "another part": {"part": 1},
    "another tenant": {"salt": "tenant"},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_refuses_keys_of_another_cache_and_plain_arrays(pool: raykv.KVPool, method: str) -> None:
    mine, other = a_cache(pool), a_cache(pool, model="n")
    keys, before = other.keys(tokens(1, 4)), pool.stats()
    with pytest.raises(ValueError) as error:
        METHODS[method](mine, keys)
    assert str(mine.id) in str(error.value) and str(other.id) in str(error.value)
    with pytest.raises(ValueError, match=r"cache\.keys\(token_ids\), or of cache\.rekey\(hashes\)"):
        METHODS[method](mine, np.asarray(mine.keys(tokens(1, 4))))
    after = pool.stats()
    assert all(after[name] == before[name] for name in ("keys", "stored", "lookups", "leases", "reservations"))


@pytest.mark.parametrize("what", OTHERS)
def test_keys_are_refused_by_a_cache_that_differs_in_one_argument(pool: raykv.KVPool, what: str) -> None:
    mine, other = a_cache(pool), a_cache(pool, **OTHERS[what])
    with pytest.raises(ValueError, match="make them with the cache that they are used with"):
        mine.match(other.keys(tokens(1, 4)))
    with pytest.raises(ValueError, match="make them with the cache that they are used with"):
        mine.match(other.rekey([b"hash"]))


@pytest.mark.parametrize("believed", [BLOCK - 1, BLOCK - 5000], ids=["in a slot of the same size", "of another size"])
def test_a_reader_that_is_wrong_about_the_size_misses_and_harms_nobody(pool: raykv.KVPool, believed: int) -> None:
    mine = a_cache(pool)
    keys = mine.keys(tokens(4, 6))
    keep(mine, keys)
    before = pool.stats()["corrupt"]
    # Callers can't do this by the public interface, because block_bytes is part of each key.
    wrong = raykv.KVCache(mine.session, CacheId("m", 16, believed, b""), mine.root, mine.recompute_tokens_per_s)
    same = Keys(np.asarray(keys), wrong.id)
    for _ in range(2):
        with wrong.match(same) as match:
            assert match.read(np.zeros((match.num_blocks, believed), np.uint8), verify=True) == 0
    pool.session.directory.heartbeat()
    assert pool.stats()["corrupt"] == before
    assert read(mine, keys, verify=True)[:3] == (6, 6, 0)
    eventually(lambda: settled(pool))


# ---------------------------------------------------------------------- fork


def in_child(step: Callable[[], object]) -> tuple[str, float]:
    """(error, seconds) of a step in a forked child; the error is "" if there was none."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        begin, error = time.monotonic(), ""
        try:
            step()
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        os.write(writer, json.dumps([error, time.monotonic() - begin]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        error, seconds = json.loads(pipe.read())
    os.waitpid(child, 0)
    return error, seconds


@pytest.mark.parametrize("what", ["attach", "match", "read", "store", "stats", "amatch", "swap_out", "prefetch"])
def test_a_forked_child_is_told_to_attach_after_the_fork(pool: raykv.KVPool, what: str) -> None:
    cache = a_cache(pool)
    keys = cache.keys(tokens(5, 4))
    keep(cache, keys)

    async def amatch() -> None:
        async with cache.amatch(keys):
            pass

    with cache.match(keys) as match:
        steps: dict[str, Callable[[], object]] = {
            "attach": lambda: raykv.attach(pool.name),
            "match": lambda: cache.match(keys),
            "read": lambda: match.read(np.zeros((4, BLOCK), np.uint8)),
            "store": lambda: store(cache, keys),
            "stats": pool.stats,
            "amatch": lambda: asyncio.run(amatch()),
            "swap_out": lambda: cache.swap_out(PAGED, range(4), "request"),
            "prefetch": lambda: cache.prefetch(keys),
        }
        error, seconds = in_child(steps[what])
    assert error.startswith("RayKVError: ") and "attach in the child" in error and "spawn" in error
    assert seconds < 5.0
    assert read(cache, keys)[:3] == (4, 4, 0), "the parent goes on"


# ---------------------------------------------------------------------- another version of raykv


def test_a_pool_of_another_protocol_is_refused_with_both_versions(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    stored = internal_kv.get(pool.name, Kept.SETTINGS)
    assert stored
    settings = json.loads(stored)
    assert settings["protocol"] == calls.VERSION
    try:
        internal_kv.put(pool.name, Kept.SETTINGS, json.dumps({**settings, "protocol": calls.VERSION + 1}).encode())
        both = f"version {calls.VERSION + 1}, this process has version {calls.VERSION}: install one raykv"
        with pytest.raises(raykv.ProtocolMismatch, match=both):
            raykv.attach(pool.name)
        with pytest.raises(raykv.ProtocolMismatch, match=both):
            raykv.start(raykv.PoolConfig(name=pool.name))
    finally:
        internal_kv.put(pool.name, Kept.SETTINGS, stored)
    assert raykv.attach(pool.name).name == pool.name


def test_a_store_of_no_node_of_ray_does_not_join(pool: raykv.KVPool) -> None:
    """20 such stores once took up the directory's memory, and counted as nodes."""
    before = pool.stats()["nodes"]
    arena = ArenaDescription(bytes(16), 4 << 20, 8, 0)
    with closing(DirectoryLine(pool.name, STORE)) as line:
        assert line.find()
        for name in ("f" * 56, "f" * 56 + "/GPU-1", ""):
            with pytest.raises(ValueError, match=r"no node of this Ray cluster: a store joins by the id of its node"):
                line.call("join", name, tuple(arena), seconds=PATIENCE_S)
    assert pool.stats()["nodes"].keys() == before.keys()
