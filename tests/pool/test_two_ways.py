"""The two ways to the directory, its socket and calls through Ray, behave alike; and clients change between them."""

import asyncio
import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import ray
from helpers.line.echo_server import flood
from helpers.line.interrupts import Interrupted, interrupt, interrupted_at
from helpers.pools import (
    BLOCK,
    WAYS,
    a_cache,
    eventually,
    free_port,
    holds,
    keep,
    node_store,
    on_way,
    other_node,
    payload,
    read,
    settled,
    store,
    tokens,
    worker,
)

import raykv
import raykv.client.session
from raykv.client.reservation import Reservation
from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept
from raykv.integrations.prefix_lookup import PrefixLookup, announce
from raykv.line import directory_line
from raykv.protocol.clients import Located
from raykv.protocol.location import Address

FLOOD = 12_000  # connections


@pytest.fixture(scope="module", params=WAYS)
def pool(start_for_module: Callable[..., raykv.KVPool], request: pytest.FixtureRequest) -> Iterator[raykv.KVPool]:
    with on_way(request.param, start_for_module) as pool:
        yield pool


# ---------------------------------------------------------------------- both ways


def test_blocks_are_stored_matched_and_read(pool: raykv.KVPool) -> None:
    cache = a_cache(pool)
    near, far = cache.keys(tokens(1, 30)), cache.keys(tokens(2, 30))
    assert store(cache, near) == 30
    there = worker(pool, other_node(pool))
    assert ray.get(there.store.remote(far)) == 30
    eventually(lambda: holds(cache, near) and holds(cache, far))
    assert cache.store(far, payload(far, BLOCK), wait=True) == 0

    async def ask() -> None:
        async def one(keys: raykv.Keys) -> None:
            async with cache.amatch(keys) as match:
                out = np.zeros((30, BLOCK), np.uint8)
                assert await match.aread(out) == 30 and len(match.nodes) <= 2
                assert (out == payload(keys, BLOCK)).all()

        await asyncio.gather(*(one(keys) for keys in (near, far) for _ in range(4)))

    asyncio.run(ask())


def test_blocks_are_pinned_done_with_swapped_prefetched_and_cleared(pool: raykv.KVPool) -> None:
    cache = a_cache(pool)
    keys = cache.keys(tokens(3, 10))
    keep(cache, keys)
    assert cache.pin(keys) == 10 and pool.stats()["pinned"] == 10
    cache.unpin(keys)
    assert pool.stats()["pinned"] == 0
    assert cache.touch(keys) == cache.touch(keys, until=time.time() + 60) == 10
    assert cache.done(keys) == cache.done(keys, again=True) == 10
    paged = np.random.default_rng(1).integers(0, 255, (10, BLOCK), np.uint8)
    before = paged.copy()
    assert cache.swap_out(paged, range(10), "r").result(60) == 10
    paged[:] = 0
    assert cache.swap_in(paged, range(10), "r").result(60) == 10 and (paged == before).all()
    assert cache.prefetch(keys).result(60) == 10
    pool.clear()
    assert read(cache, keys).matched == 0


def test_a_router_is_told_where_a_prompt_is(pool: raykv.KVPool) -> None:
    cache = a_cache(pool)
    keys = cache.keys(tokens(4, 10))
    keep(cache, keys)
    announce(pool.name, "m", root="00")

    async def ask() -> Located:
        lookup = PrefixLookup(pool.name, "m")
        while not (found := await lookup.locate_prefix(np.asarray(keys))):
            await asyncio.sleep(0.01)
        return found

    found = asyncio.run(asyncio.wait_for(ask(), 60.0))
    assert found == (10, {pool.node_id: 10})


def test_a_match_that_is_interrupted_leaves_nothing_leased(pool: raykv.KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes between several calls of a match, before the caller has the match."""
    cache, directory = a_cache(pool), pool.session.directory
    keys = cache.keys(tokens(5, 9))
    keep(cache, keys)
    wait, matches = directory.line.wait, []

    def wait_interrupted(sent: directory_line.Sent, seconds: float) -> Any:
        if sent.method == "match":
            matches.append(sent)
            if len(matches) == 2:
                signal.raise_signal(signal.SIGUSR1)
        return wait(sent, seconds)

    monkeypatch.setattr("raykv.client.leases.match.KEYS_PER_CALL", 3)
    monkeypatch.setattr(directory.line, "wait", wait_interrupted)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            cache.match(keys)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not directory.held
    eventually(lambda: pool.stats()["leases"] == 0)


def test_a_look_for_the_store_that_a_signal_interrupts_is_not_the_last(pool: raykv.KVPool) -> None:
    """The signal comes at each moment once."""

    def found() -> bool:
        pool.session._looked = -math.inf
        pool.session.refresh()
        return pool.session.local is not None

    for moment in itertools.count():
        pool.session._looked, pool.session.local = -math.inf, None
        with interrupted_at(moment, raykv.client.session) as at:
            pool.session.refresh()
        eventually(found)
        if not at:
            break
    assert moment > 1
    keep(a_cache(pool), a_cache(pool).keys(tokens(6, 3)))


def test_a_start_that_a_signal_interrupts_can_be_tried_again(pool: raykv.KVPool) -> None:
    """The signal comes at each moment once."""
    for moment in itertools.count():
        with interrupted_at(moment, internal_kv) as at, internal_kv.exclusive("nobody", 1.0):
            pass
        if not at:
            break
        with internal_kv.exclusive("nobody", 1.0):
            pass
        assert internal_kv.get("nobody", Kept.LOCK) is None
    assert moment > 5


# ---------------------------------------------------------------------- faults, on both ways


@pytest.fixture
def faulty(pool: raykv.KVPool) -> Iterator[raykv.KVPool]:
    """A pool for a test of faults. After the test the directory must answer on the same way, and nothing be held."""
    way, epoch = pool.session.directory.line.way, pool.stats()["epoch"]
    yield pool
    directory = pool.session.directory
    eventually(lambda: settled(pool))
    eventually(lambda: directory.nodes() and directory.up)
    assert directory.line.way == way and pool.stats()["epoch"] == epoch
    directory.faults.clear()


@pytest.mark.parametrize("when", ["copy_in", "commit"])
def test_a_store_that_is_aborted_gives_its_slots_back(
    faulty: raykv.KVPool, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The signal comes before the blocks are copied, or before they are committed."""
    cache, directory = a_cache(faulty), faulty.session.directory
    keys = cache.keys(tokens(23, 9))
    with monkeypatch.context() as aborted:
        aborted.setattr(Reservation, when, interrupt)
        with pytest.raises(Interrupted):
            store(cache, keys)
    assert not directory.held
    eventually(lambda: settled(faulty))
    assert read(cache, keys).matched == 0
    assert store(cache, keys) == 9 and holds(cache, keys)
    faulty.clear()


# ---------------------------------------------------------------------- from one way to the other


def put_address(pool: raykv.KVPool, address: Address | None) -> Address | None:
    """Set the address of the directory in Ray's KV. Returns the former address."""
    name, before = internal_kv.in_charge(pool.name)
    internal_kv.put_in_charge(pool.name, name, address)
    return before


def test_a_socket_that_is_refused_is_done_without_until_it_is_back(
    start: Callable[..., raykv.KVPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_line, "SOCKET_AGAIN_S", 0.5)
    pool = start()
    cache, line = a_cache(pool), pool.session.directory.line
    keys = cache.keys(tokens(1, 20))
    keep(cache, keys)
    assert line.way == "socket"
    connections = pool.stats()["connections"]
    right = put_address(pool, Address(ray.util.get_node_ip_address(), free_port(), b"nobody's"))
    assert line._pipeline
    line._pipeline.close()
    eventually(lambda: line.way == "ray")
    eventually(lambda: holds(cache, keys))
    pool.session.directory.faults.clear()
    for seed in range(2, 8):
        more = cache.keys(tokens(seed, 4))
        assert store(cache, more) == 4
        eventually(lambda more=more: holds(cache, more))  # type: ignore[misc]
    assert line.way == "ray" and pool.stats()["connections"] < connections
    put_address(pool, right)
    eventually(lambda: line.way == "socket")
    assert holds(cache, keys) and store(cache, cache.keys(tokens(9, 4))) == 4
    assert not pool.session.directory.faults, "nothing was lost on the way"
    assert pool.stats()["connections"] == connections
    eventually(lambda: settled(pool))


def test_connections_of_who_has_no_token_hinder_nobody(start: Callable[..., raykv.KVPool]) -> None:
    """12,000 connections to the directory's listener, and as many to a store's."""
    pool = start()
    cache = a_cache(pool)
    there = worker(pool, other_node(pool))
    far = [cache.keys(tokens(seed, 4)) for seed in range(30)]
    for keys in far:
        assert ray.get(there.store.remote(keys)) == 4
    offers = ray.get(node_store(pool, other_node(pool)).offers.remote(other_node(pool)))
    _, address = internal_kv.in_charge(pool.name)
    assert address and read(cache, far.pop()).read == 4
    directory, rounds = pool.session.directory, 0
    directory.faults.clear()
    with ExitStack() as stack:
        floods = [stack.enter_context(flood(at, FLOOD)) for at in (address, Address(*offers["tcp"]))]
        while any(flooding.poll() is None for flooding in floods) or far:
            keys = far.pop() if far else cache.keys(tokens(1000 + rounds, 4))
            if rounds >= 29:
                assert store(cache, keys) == 4
            assert read(cache, keys)[:3] == (4, 4, 0)
            rounds += 1
    newcomer = worker(pool, other_node(pool))
    assert ray.get(newcomer.holds.remote(keys))
    assert not directory.faults and directory.line.way == "socket"
    eventually(lambda: settled(pool))
