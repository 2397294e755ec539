"""Quotas in a pool in this process: one tenant floods the pool, and another keeps its minimum."""

from collections.abc import Callable

import pytest
from helpers.client.quotas import MINIMUM, PROMPT, PROMPTS, cache_of, emptied, flood, stored
from helpers.pools import BLOCK, MIB, eventually, keep, read, tokens

import raykv


@pytest.fixture(scope="module")
def shared(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=64 * MIB)


@pytest.fixture
def pool(shared: raykv.KVPool) -> raykv.KVPool:
    return emptied(shared)


def test_a_flood_takes_nothing_of_a_minimum(pool: raykv.KVPool) -> None:
    pool.set_quota("b", minimum=MINIMUM)
    prompts, cache = stored(pool, "b"), cache_of(pool, "b")
    with flood(pool, "a") as blocks:
        for _ in range(3):
            enough = blocks() + 1000  # twice as many as the pool has room for
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
