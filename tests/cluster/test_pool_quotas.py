"""Tenants of a running pool: one floods it, and the other keeps its minimum."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.command_line import command, last_json
from helpers.pools import BLOCK, MIB, eventually, keep, kill, payload, read, store, tokens

import raykv
from raykv.keys import Keys

PROMPT = 16  # blocks
PROMPTS = 6  # of the tenant that has a minimum: 24 MiB of 112 that the pool has for blocks
MINIMUM = 0.25


@pytest.fixture(scope="module")
def shared(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=64 * MIB)


@pytest.fixture
def pool(shared: raykv.KVPool) -> raykv.KVPool:
    """Empty, and without quotas."""
    for tenant in filter(None, shared.quotas()):
        shared.remove_quota(tenant)
    shared.clear()
    return shared


def cache_of(pool: raykv.KVPool, tenant: str, **more: Any) -> raykv.KVCache:
    return pool.cache(
        model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK, tenant=tenant, **more
    )


def stored(pool: raykv.KVPool, tenant: str) -> list[Keys]:
    """Prompts of a tenant, who has read each once."""
    cache = cache_of(pool, tenant)
    prompts = [cache.keys(tokens(seed, PROMPT)) for seed in range(PROMPTS)]
    for keys in prompts:
        keep(cache, keys)
        assert read(cache, keys).matched == PROMPT
    return prompts


@contextmanager
def flood(pool: raykv.KVPool, tenant: str) -> Iterator[Callable[[], int]]:
    """A tenant stores at full speed, from two threads. Yields how many blocks it has stored so far."""
    cache, done, count = cache_of(pool, tenant), threading.Event(), [0, 0]

    def write(thread: int) -> None:
        seed = 1000 + thread
        while not done.is_set():
            count[thread] += store(cache, cache.keys(tokens(seed, PROMPT)))
            seed += 2

    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(write, thread) for thread in range(2)]
        try:
            yield lambda: sum(count)
        finally:
            done.set()
    for writer in writers:
        writer.result()


def test_a_flood_takes_nothing_of_a_minimum(pool: raykv.KVPool) -> None:
    pool.set_quota("b", minimum=MINIMUM)
    prompts, cache = stored(pool, "b"), cache_of(pool, "b")
    with flood(pool, "a") as blocks:
        for _ in range(3):
            enough = blocks() + 1000  # twice what the pool has room for
            eventually(lambda enough=enough: blocks() > enough)  # type: ignore[misc]
            found = [read(cache, keys) for keys in prompts]
            assert [(it.read, it.wrong) for it in found] == [(PROMPT, 0)] * PROMPTS
    quotas = pool.quotas()
    assert quotas["b"]["used"] == PROMPTS * PROMPT * BLOCK and quotas["b"]["evicted"] == 0
    assert quotas["b"]["minimum_bytes"] == 28 * MIB and quotas[""]["evicted"] > 1000


def test_without_a_minimum_the_flood_takes_all(pool: raykv.KVPool) -> None:
    prompts, cache = stored(pool, "b"), cache_of(pool, "b")
    with flood(pool, "a") as blocks:
        eventually(lambda: blocks() > 2000)
    assert not any(read(cache, keys).matched for keys in prompts)


def test_a_maximum_holds_for_who_floods(pool: raykv.KVPool) -> None:
    pool.set_quota("a", maximum=0.25)
    with flood(pool, "a") as blocks:
        eventually(lambda: blocks() > 500)
        assert 0 < pool.quotas()["a"]["used"] <= 28 * MIB
    assert pool.quotas()["a"]["evicted"] > 300


def test_quotas_outlive_the_directory(pool: raykv.KVPool) -> None:
    pool.set_quota("b", minimum=MINIMUM, maximum=0.5)
    pool.set_quota("c")
    pool.remove_quota("c")
    prompts, cache = stored(pool, "b"), cache_of(pool, "b")
    kill(pool, "directory")
    eventually(lambda: [read(cache, keys).read for keys in prompts] == [PROMPT] * PROMPTS)  # charged from now on
    eventually(lambda: pool.quotas()["b"]["minimum_bytes"] == 28 * MIB)  # both nodes have joined
    quotas = pool.quotas()
    assert quotas.keys() == {"", "b"} and (quotas["b"]["minimum"], quotas["b"]["maximum"]) == (MINIMUM, 0.5)
    with flood(pool, "a") as blocks:
        eventually(lambda: blocks() > 1000)
    assert [read(cache, keys).read for keys in prompts] == [PROMPT] * PROMPTS


def test_a_tenant_is_named_or_its_salt(pool: raykv.KVPool) -> None:
    named, salted = cache_of(pool, "b", salt="acme"), cache_of(pool, "", salt="acme")
    tenant = salted.id.tenant
    assert named.id.tenant == "b" and len(tenant) == 8
    pool.set_quota("b")
    pool.set_quota(tenant)
    keys = named.keys(tokens(1, 4))
    keep(named, keys)
    assert pool.quotas()["b"]["used"] == 4 * BLOCK
    again = salted.keys(tokens(1, 4))
    assert again.tobytes() == keys.tobytes() and read(salted, again).read == 4
    assert (pool.quotas()["b"]["used"], pool.quotas()[tenant]["used"]) == (0, 4 * BLOCK)


def test_the_command(pool: raykv.KVPool, cluster: Any) -> None:
    def quota(*words: str) -> Any:
        return command("quota", *words, "--name", pool.name, address=cluster.address)

    assert quota("set", "team a/b", "--minimum", "0.25").returncode == 0
    assert "team a/b  0 MiB  25.0% (28 MiB)  100.0% (112 MiB)" in quota().stdout
    assert last_json(quota("--json"))["tenants"] == pool.quotas()
    refused = quota("set", "other", "--minimum", "0.8")
    assert refused.returncode == 1 and "other tenants have minima of 0.25 together" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert quota("remove", "team a/b").returncode == 0 and pool.quotas().keys() == {""}
    assert "has no quota" in quota("remove", "team a/b").stderr
    with pytest.raises(ValueError, match="is above maximum"):
        pool.set_quota("b", 0.5, 0.25)
    for name in ("", 5, "a" * 65, "new\nline"):
        with pytest.raises(ValueError, match="give a name"):
            pool.set_quota(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give a name"):
        pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=1, block_bytes=BLOCK, tenant=7)  # type: ignore[arg-type]


def test_the_shell_takes_the_pool_before_and_after_what_to_do(cluster: Any, pool: raykv.KVPool) -> None:
    before = ("--name", pool.name)
    assert command("quota", *before, "set", "early", "--minimum", "0.1", address=cluster.address).returncode == 0
    assert "early" in pool.quotas()
    assert command("quota", *before, "remove", "early", address=cluster.address).returncode == 0
    assert "early" not in pool.quotas()


def test_a_pin_ends_with_its_time(pool: raykv.KVPool) -> None:
    cache = cache_of(pool, "")
    keys = cache.keys(tokens(1, 4))
    assert cache.store(keys, payload(keys, BLOCK), wait=True) == 4
    assert cache.pin(keys[:2], ttl=1.0) == 2 and cache.pin(keys[2:]) == 2
    assert pool.stats()["pinned"] == 4
    eventually(lambda: pool.stats()["pinned"] == 2)
    assert cache.pin(keys, priority=3) == 4
    for terms in ({"ttl": 0}, {"priority": "high"}):
        with pytest.raises(ValueError, match=next(iter(terms))):
            cache.pin(keys, **terms)
