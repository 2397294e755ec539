"""Blocks over TCP: who is served, what happens to nonsense, and to a node that can't be reached."""

import hmac
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import (
    BLOCK,
    TRANSPORTS,
    a_cache,
    eventually,
    holds,
    keep,
    locations,
    node_store,
    other_node,
    read,
    settled,
    tokens,
    worker,
)
from numpy.typing import NDArray

import raykv
import raykv.client.lease
from raykv.config import KEYS_PER_CALL
from raykv.system import wire
from raykv.transports.block_server import CLAIM, REQUEST_BYTES


@contextmanager
def connection(address: tuple[str, int, bytes], token: bytes | None = None) -> Iterator[socket.socket]:
    host, port, right = address
    with socket.create_connection((host, port), 10.0) as peer:
        peer.sendall(hmac.digest(token or right, receive(peer, 32), "sha256"))
        yield peer


def receive(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        assert more, f"closed after {len(data)} of {count} bytes"
        data += more
    return data


def claims(peer: socket.socket) -> NDArray[np.void]:
    return np.frombuffer(receive(peer, 5 * CLAIM.itemsize), CLAIM)


def closed(peer: socket.socket) -> bool:
    try:
        return not peer.recv(1)
    except ConnectionResetError:
        return True


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module()


def test_a_listener_serves_only_who_knows_the_token(pool: raykv.KVPool) -> None:
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 5))
    keep(cache, keys)
    at = locations(pool, cache, keys)
    address = ray.get(node_store(pool, pool.node_id).offers.remote(pool.node_id))["tcp"]
    request = wire.frame(at.tobytes() + keys.tobytes())
    with connection(address, token=b"guessed") as peer:
        assert closed(peer)
    with connection(address) as peer:
        for _ in range(2):
            peer.sendall(request)
            assert claims(peer)["there"].tolist() == [True] * 5
            receive(peer, 5 * BLOCK)
        wrong = np.flip(keys, axis=0)  # the middle one is right
        peer.sendall(wire.frame(at.tobytes() + wrong.tobytes()))
        assert claims(peer)["there"].tolist() == [False, False, True, False, False]
        receive(peer, BLOCK)
        nonsense = np.random.default_rng(0).bytes(at.nbytes + keys.nbytes)
        peer.sendall(wire.frame(nonsense))
        assert not claims(peer)["there"].any()
        peer.sendall(wire.LENGTH.pack((KEYS_PER_CALL + 1) * REQUEST_BYTES))
        assert closed(peer)
    with connection(address) as peer:  # who sends half a request hinders nobody
        peer.sendall(request[:100])
        assert holds(cache, keys)
        assert ray.get(worker(pool, other_node(pool)).holds.remote(keys))


def test_a_node_that_tcp_does_not_reach_is_read_another_way(start: Callable[..., raykv.KVPool]) -> None:
    """As behind a firewall that lets through only Ray."""
    pool = start()
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 20))
    keep(cache, keys)
    store = node_store(pool, pool.node_id)
    ray.get(store.__ray_call__.remote(lambda store: store._memory.transports.close()))
    found: Any = ray.get(worker(pool, other_node(pool)).read.remote(keys))
    assert found[:3] == (20, 20, 0)
    assert read(cache, keys).read == 20
    eventually(lambda: settled(pool))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_pulled_block_keeps_its_position_in_the_chain(start: Callable[..., raykv.KVPool], transport: str) -> None:
    """Else a restarted directory would let parents go before their children."""
    pool = start(transport=transport)
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 10))
    keep(cache, keys)
    eventually(lambda: ray.get(worker(pool, other_node(pool)).holds.remote(keys)))
    there = node_store(pool, other_node(pool))
    found = ray.get(there.__ray_call__.remote(lambda store: store._arena.inventory()))
    positions = dict(zip(map(bytes, found.keys), found.positions.tolist(), strict=True))
    assert positions == {bytes(key): i for i, key in enumerate(keys)}
