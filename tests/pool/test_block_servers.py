"""Blocks over TCP: peers that are served, nonsense from peers, and nodes that TCP can't reach."""

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import ray
import xxhash
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
import raykv.client.leases.lease
from raykv.config import KEYS_PER_CALL
from raykv.line import wire
from raykv.transports.block_server import CLAIM, REQUEST_BYTES


@contextmanager
def connection(address: tuple[str, int, bytes], token: bytes | None = None) -> Iterator[socket.socket]:
    host, port, right = address
    with socket.create_connection((host, port), 10.0) as peer:
        both = receive(peer, 32) + bytes(32)
        peer.sendall(bytes(32) + hmac.digest(token or right, b"client" + both, "sha256"))
        if token is None:
            assert receive(peer, 32) == hmac.digest(right, b"listener" + both, "sha256")
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
        wrong = np.flip(keys, axis=0)  # the middle key is still right
        peer.sendall(wire.frame(at.tobytes() + wrong.tobytes()))
        assert claims(peer)["there"].tolist() == [False, False, True, False, False]
        receive(peer, BLOCK)
        nonsense = np.random.default_rng(0).bytes(at.nbytes + keys.nbytes)
        peer.sendall(wire.frame(nonsense))
        assert not claims(peer)["there"].any()
        peer.sendall(wire.LENGTH.pack((KEYS_PER_CALL + 1) * REQUEST_BYTES))
        assert closed(peer)
    with connection(address) as peer:  # a peer that sends half a request must hinder nobody
        peer.sendall(request[:100])
        assert holds(cache, keys)
        assert ray.get(worker(pool, other_node(pool)).holds.remote(keys))


def forge(listening: socket.socket, came: list[int], asked: list[int]) -> None:
    """Answer readers like a store that has all blocks, but with wrong bytes and their checksums.

    came: ports of the readers. asked: how many blocks they asked for.
    """
    forged = bytes([13]) * BLOCK
    while True:
        try:
            reader, (_, port) = listening.accept()
        except OSError:  # the test is over
            return
        came.append(port)
        with reader, contextlib.suppress(OSError, AssertionError):
            reader.sendall(bytes(32))
            receive(reader, 64)
            reader.sendall(bytes(32))
            while True:
                blocks = int.from_bytes(receive(reader, 4), "little") // REQUEST_BYTES
                receive(reader, blocks * REQUEST_BYTES)
                asked.append(blocks)
                claims = np.zeros(blocks, CLAIM)
                claims["there"], claims["sum"] = True, xxhash.xxh3_64_intdigest(forged)
                reader.sendall(claims.tobytes() + forged * blocks)


def listener(host: str, port: int) -> socket.socket | None:
    """A listener at a port that another listener has just left; None if the port is taken."""
    with contextlib.suppress(OSError):
        return socket.create_server((host, port))
    return None


def test_who_takes_the_port_of_a_store_is_asked_for_nothing(start: Callable[..., raykv.KVPool]) -> None:
    """The impostor's blocks would verify, since it sends their checksums."""
    pool, came, asked = start(), list[int](), list[int]()
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 20))
    keep(cache, keys)
    store = node_store(pool, pool.node_id)
    host, port, _ = ray.get(store.offers.remote(pool.node_id))["tcp"]
    ray.get(store.__ray_call__.remote(lambda store: store._memory.transports.close()))
    listening = eventually(lambda: listener(host, port))
    assert listening
    with listening:
        forger = threading.Thread(target=forge, args=(listening, came, asked))
        forger.start()
        found: Any = ray.get(worker(pool, other_node(pool)).read.remote(keys))
        listening.shutdown(socket.SHUT_RDWR)
        forger.join()
    assert found[:3] == (20, 20, 0) and came and not asked


def test_a_node_that_tcp_does_not_reach_is_read_another_way(start: Callable[..., raykv.KVPool]) -> None:
    """The node is as behind a firewall that lets only Ray through."""
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
    """Otherwise a restarted directory would evict parents before their children."""
    pool = start(transport=transport)
    cache = a_cache(pool)
    keys = cache.keys(tokens(1, 10))
    keep(cache, keys)
    eventually(lambda: ray.get(worker(pool, other_node(pool)).holds.remote(keys)))
    there = node_store(pool, other_node(pool))
    found = ray.get(there.__ray_call__.remote(lambda store: store._arena.inventory()))
    positions = dict(zip(map(bytes, found.keys), found.positions.tolist(), strict=True))
    assert positions == {bytes(key): i for i, key in enumerate(keys)}
