"""Quotas on two Ray nodes: one tenant floods the pool, and another keeps its minimum."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.client.quotas import MINIMUM, PROMPT, PROMPTS, cache_of, emptied, flood, stored
from helpers.faces.command_line import command, last_json
from helpers.pools import BLOCK, MIB, eventually, kill, read

import raykv


@pytest.fixture(scope="module")
def shared(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=64 * MIB)


@pytest.fixture
def pool(shared: raykv.KVPool) -> raykv.KVPool:
    return emptied(shared)


@pytest.mark.promise
def test_quotas_outlive_the_directory(pool: raykv.KVPool) -> None:
    pool.set_quota("b", minimum=MINIMUM, maximum=0.5)
    pool.set_quota("c")
    pool.remove_quota("c")
    prompts, cache = stored(pool, "b"), cache_of(pool, "b")
    kill(pool, "directory")
    eventually(lambda: [read(cache, keys).read for keys in prompts] == [PROMPT] * PROMPTS)  # these reads charge b
    eventually(lambda: pool.quotas()["b"]["minimum_bytes"] == 28 * MIB)  # so both nodes have joined
    quotas = pool.quotas()
    assert quotas.keys() == {"", "b"} and (quotas["b"]["minimum"], quotas["b"]["maximum"]) == (MINIMUM, 0.5)
    with flood(pool, "a") as blocks:
        eventually(lambda: blocks() > 1000)
    assert [read(cache, keys).read for keys in prompts] == [PROMPT] * PROMPTS


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
