"""Faults that only a redis server causes."""

import dataclasses
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from helpers.tiers.redis_server import RedisServer, redis_server

from raykv.tiers import MARKER, Block, Tier, guarded, open_tier, parse
from raykv.tiers.guarded import GuardedTier

redis = pytest.importorskip("redis")

MIB = 1 << 20
STALL_S = 6.0  # at most, for a call to a server that stands still: twice 2 s, and time for a busy machine
KEY, OTHER = bytes(range(16)), bytes(range(1, 17))
BODY = bytes(range(256)) * (MIB // 256)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def tier(server: RedisServer) -> Iterator[Tier]:
    tier = open_tier(parse(server.url()))
    yield tier
    tier.close()


def put(tier: Tier, key: bytes = KEY) -> bool:
    (stored,) = tier.put_many([Block(key, key * 4, memoryview(BODY))])
    return stored


def there(tier: Tier, key: bytes = KEY) -> bool:
    out = bytearray(len(BODY))
    (head,) = tier.get_many([key], [memoryview(out)])
    return head == key * 4 and out == BODY


def test_a_killed_server_raises_and_a_new_one_serves(server: RedisServer, tier: Tier) -> None:
    assert put(tier) and there(tier)
    server.kill()
    for call in (put, there, lambda tier: tier.delete_many([KEY])):
        with pytest.raises((OSError, redis.RedisError)):
            call(tier)
    with pytest.raises((OSError, redis.RedisError)):
        list(tier.scan())
    server.start()
    assert not there(tier)
    assert put(tier) and there(tier)


@pytest.mark.full
def test_a_server_that_hangs_raises_in_time(server: RedisServer, tier: Tier) -> None:
    assert put(tier)
    server.pause()

    def stalled(call: Callable[[Tier], object]) -> float:
        start = time.monotonic()
        with pytest.raises((OSError, redis.RedisError)):
            call(tier)
        return time.monotonic() - start

    try:
        calls = (put, there, lambda tier: open_tier(parse(server.url())))
        with ThreadPoolExecutor(len(calls)) as threads:
            assert max(threads.map(stalled, calls)) < STALL_S
    finally:
        server.resume()
    assert there(tier) and put(tier, OTHER) and there(tier, OTHER) and there(tier)


def test_a_full_server_takes_no_more_and_goes_on_serving(tmp_path: Path) -> None:
    keys = [bytes([i]) * 16 for i in range(1, 31)]
    with redis_server(tmp_path, maxmemory="16mb") as server:
        tier = open_tier(parse(server.url()))
        stored = tier.put_many([Block(key, key * 4, memoryview(BODY)) for key in keys])
        assert any(stored) and not all(stored)
        assert [there(tier, key) for key in keys] == stored
        tier.delete_many(keys)
        assert put(tier, keys[-1]) and there(tier, keys[-1])
        tier.close()


def test_a_server_that_may_not_be_written_raises(tmp_path: Path) -> None:
    with redis_server(tmp_path, replicaof="127.0.0.1 1") as server:
        tier = open_tier(parse(server.url()))
        with pytest.raises(redis.exceptions.ReadOnlyError):
            put(tier)
        tier.close()


def test_an_evicted_marker_costs_no_block(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`allkeys-random` and `allkeys-lrm` may evict it. If all records are gone, the content gets a new name."""
    monkeypatch.setattr(guarded, "CHECK_S", 0.0)
    tier = GuardedTier(lambda: open_tier(parse(server.url())), bytes(16))
    assert tier.open(bytes(8))
    keys = np.arange(1, 1 + 200 * 16, dtype=np.int64).astype(np.uint8).reshape(200, 16)
    bodies = [memoryview(BODY[:4096])] * 200
    assert tier.store(keys, np.ones(200, np.uint64), np.zeros(200, np.uint32), bodies).all()
    content = tier.content
    with redis.Redis(port=server.port) as client:
        assert client.delete(f"raykv:default:{MARKER.hex()}") == 1
        assert tier.probe() is None and tier.up and tier.content == content
        assert [piece.there.all() for piece in tier.load(keys, 4096)] == [True]
        client.flushall()
        assert tier.store(~keys[:1], np.ones(1, np.uint64), np.zeros(1, np.uint32), bodies[:1]).all()  # not noticed
        assert tier.probe() is False and tier.up and tier.content != content
    tier.close()


def test_a_miss_is_reason_to_look_whether_all_is_gone(server: RedisServer) -> None:
    tier = GuardedTier(lambda: open_tier(parse(server.url())), bytes(16))
    assert tier.open(bytes(8))
    keys, one = np.arange(16, dtype=np.uint8).reshape(1, 16), np.ones(1, np.uint64)
    assert tier.store(keys, one, one.astype(np.uint32), [memoryview(BODY[:4096])]).all()
    assert [piece.there.all() for piece in tier.load(keys, 4096)] == [True]
    with redis.Redis(port=server.port) as client:
        client.flushall()
    assert tier.probe() is None  # the tier has looked a moment ago
    assert [piece.there.any() for piece in tier.load(keys, 4096)] == [False]
    assert tier.probe() is False and tier.up
    tier.close()


def test_a_server_that_became_a_replica_is_read_as_before(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "BACK_OFF_S", (0.0,))
    tier = GuardedTier(lambda: open_tier(parse(server.url())), bytes(16))
    assert tier.open(bytes(8))
    keys = np.arange(1, 1 + 40 * 16, dtype=np.int64).astype(np.uint8).reshape(40, 16)
    sums, positions, body = np.ones(20, np.uint64), np.zeros(20, np.uint32), memoryview(BODY[:4096])
    assert tier.store(keys[:20], sums, positions, [body] * 20).all()
    with redis.Redis(port=server.port) as client:
        client.replicaof("127.0.0.1", "1")
        assert not tier.store(keys[20:], sums, positions, [body] * 20).any()
        assert "read only replica" in tier.refusal
        assert tier.probe() is None and tier.up
        assert [piece.there.all() for piece in tier.load(keys[:20], 4096)] == [True]
        client.replicaof("NO", "ONE")
        assert tier.store(keys[20:], sums, positions, [body] * 20).all() and tier.refusal == ""
    tier.close()


def test_a_server_of_a_cluster_is_refused(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path, cluster_enabled="yes") as server,
        pytest.raises(ValueError, match="part of a Redis Cluster"),
    ):
        open_tier(parse(server.url()))


def test_a_user_who_may_not_write_is_refused(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as client:
        client.acl_setuser(
            "reader", enabled=True, passwords=["+secret"], categories=["+@read", "+@connection"], keys="*"
        )
    tier = GuardedTier(lambda: open_tier(parse(server.url("reader:secret@"))), bytes(16))
    with pytest.raises(OSError, match=r"it can't be written.*permissions"):
        tier.check()
    tier.close()
    mine = GuardedTier(lambda: open_tier(parse(server.url())), bytes(16))
    mine.check()
    with redis.Redis(port=server.port) as client:
        assert client.dbsize() == 0
    mine.close()


def test_pools_and_databases_are_separate(server: RedisServer) -> None:
    tiers = [
        open_tier(dataclasses.replace(parse(server.url(database=database)), pool=pool))
        for database, pool in ((0, "a"), (0, "b"), (1, "a"))
    ]
    for tier in tiers:
        assert not there(tier) and not list(tier.scan())
        assert put(tier)
    for tier in tiers:
        assert list(tier.scan()) == [[(KEY, len(BODY))]]
        tier.close()


def test_a_scan_lists_what_others_put_and_evict(server: RedisServer, tier: Tier) -> None:
    with redis.Redis(port=server.port) as client:
        client.set("raykv:default:not-a-block", "")
        other = open_tier(parse(server.url()))
        assert put(other) and put(other, OTHER)
        assert sorted(chain(*tier.scan())) == [(KEY, len(BODY)), (OTHER, len(BODY))]
        client.flushall()
        assert not list(tier.scan())
        other.close()


def test_a_scan_walks_more_than_one_batch(server: RedisServer, tier: Tier) -> None:
    keys = {i.to_bytes(16, "big") for i in range(1, 3001)}
    assert all(tier.put_many([Block(key, bytes(64), memoryview(b"body")) for key in keys]))
    assert {key for batch in tier.scan() for key, _ in batch} == keys


def refusal(url: str) -> str:
    with pytest.raises((OSError, ValueError)) as raised:
        open_tier(parse(url))
    assert "external=" in str(raised.value)
    return "".join(traceback.format_exception(raised.value))


def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path, requirepass="s3cret/?", user="kv on >s3cret/? ~* +@all") as server:
        assert "RAYKV_REDIS_PASSWORD" in refusal(server.url())
        assert "wr0ng" not in refusal(server.url("kv:wr0ng@"))
        for login in (":s3cret%2F%3F@", "kv:s3cret%2F%3F@"):
            tier = open_tier(parse(server.url(login)))
            assert put(tier) and there(tier)
            assert "s3cret" not in f"{tier!r} {tier.__dict__!r}"
            tier.close()
        monkeypatch.setenv("RAYKV_REDIS_PASSWORD", "s3cret/?")
        open_tier(parse(server.url())).close()
        monkeypatch.setenv("RAYKV_REDIS_USERNAME", "kv")
        open_tier(parse(server.url())).close()
        monkeypatch.setenv("RAYKV_REDIS_USERNAME", "nobody")
        assert "s3cret" not in refusal(server.url())


def test_an_address_where_nothing_listens(server: RedisServer) -> None:
    server.kill()
    assert "s3cret" not in refusal(server.url("kv:s3cret@"))


@pytest.mark.parametrize("url", ["redis:///0?capacity=1GiB", "redis://host/zero?capacity=1GiB"])
def test_addresses_that_are_not_valid(url: str) -> None:
    assert "host:6379" in refusal(url)


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = str(tmp_path / "certificate"), str(tmp_path / "key")
    request = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=raykv", "-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key]
    subprocess.run(["openssl", *request, *name], check=True, capture_output=True)
    options = {"tls_cert_file": certificate, "tls_key_file": key, "tls_auth_clients": "no"}
    with redis_server(tmp_path, "rediss", **options) as server:
        assert "certificate" in refusal(server.url())
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        tier = open_tier(parse(server.url()))
        assert put(tier) and there(tier)
        tier.close()
