"""Followers get the requests of every client exactly. Nothing is recorded while nobody follows."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.faces.trace import Lines
from helpers.pools import (
    BLOCK,
    MIB,
    eventually,
    read,
    store,
    tokens,
)

import raykv
from raykv.directory.calls.why_missing import WRITTEN


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=32 * MIB)


def a_cache(pool: raykv.KVPool, model: str = "m", salt: str = "") -> raykv.KVCache:
    return pool.cache(model=model, dtype="uint8", layout="rows", salt=salt, block_tokens=16, block_bytes=BLOCK)


def test_nothing_is_sent_while_nobody_follows(
    start: Callable[..., raykv.KVPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = start(cpu_memory=32 * MIB)
    directory, told = pool.session.directory, list[str]()
    tell = directory.line.tell

    def spy(method: str, *arguments: Any, **how: Any) -> None:
        told.append(method)
        tell(method, *arguments, **how)

    monkeypatch.setattr(directory.line, "tell", spy)
    cache = a_cache(pool)
    keys = cache.keys(tokens(5, 4))

    def unrecorded() -> bool:
        with cache.match(keys) as match:
            return match._record is None

    assert store(cache, keys) == 4
    for _ in range(20):
        assert read(cache, keys).read == 4 and unrecorded()
    lines = Lines(pool)
    read(cache, keys)
    assert [line["read_tokens"] for line in lines.of("m", 1)] == [64]
    assert told.count("report_requests") == 1
    eventually(unrecorded)  # some time after the follower's last call
    assert not directory.requests.followed


def test_blocks_that_are_still_written_are_said_to_be(pool: raykv.KVPool) -> None:
    cache = a_cache(pool, model="slow")
    keys, lines = cache.keys(tokens(7, 2)), Lines(pool)
    reservation = cache.reserve(keys)
    assert len(reservation) == 2
    with cache.match(keys):
        pass
    reservation.release()
    assert [line["short"] for line in lines.of("slow", 1)] == [WRITTEN]


def test_tenants_are_told_apart(pool: raykv.KVPool) -> None:
    lines = Lines(pool)
    for salt in ("", "one", "two"):
        cache = a_cache(pool, model="shared", salt=salt)
        read(cache, cache.keys(tokens(8, 1)))
    read(cache, cache.keys(tokens(8, 1), salt="three"))
    assert [line["tenant"] for line in lines.of("shared", 4)] == ["", *map(pool.tenant_of, ("one", "two", "three"))]
    cache.prefetch(cache.keys(tokens(8, 1))).result()  # a prefetch is no request
    read(cache, cache.keys(tokens(8, 1)))
    lines.of("shared", 5)
