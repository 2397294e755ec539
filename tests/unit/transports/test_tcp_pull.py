"""A pull over TCP between two arenas: its streams share its pieces. A stream that breaks costs no piece."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from helpers.arena import worker as w
from helpers.arena.worker import PRINT, locations
from helpers.pools import eventually
from helpers.transports.relay import FORWARD, Relay
from numpy.typing import NDArray

import raykv.transports.tcp
import raykv.transports.tcp_pull
from raykv.arena.arena import Arena
from raykv.line import tls
from raykv.protocol.location import Address
from raykv.protocol.transfers import ALTERED, FAILED, PULLED
from raykv.transports.base import Peer, PullRequest
from raykv.transports.tcp import FEWEST, MOST, SETTLED_S, Lane, Tcp
from raykv.transports.tcp_pull import TcpPull

pytestmark = pytest.mark.usefixtures("plain_and_tls")

MIB = 1 << 20
BLOCK, BLOCKS, SLABS = 1 * MIB, 24, 6
PEER = Peer("peer", None)
PATIENCE_S = 60.0


class Pair:
    """Two arenas, with blocks in one of them, and a relay between them."""

    def __init__(self, path: str) -> None:
        self.there, self.here = self.arenas = [Arena.create(f"{path}-{i}", PRINT, w.SLAB, SLABS) for i in range(2)]
        for arena in self.arenas:
            while arena.offered < SLABS:
                assert arena.offer_next()
            arena.raise_epoch(w.EPOCH)
        self.where = np.concatenate([locations(range(4), [2] * 4, size=BLOCK, slab=slab) for slab in range(SLABS)])
        rng = np.random.default_rng(0)
        self.keys = rng.integers(0, 256, (len(self.where), 16), np.uint8)
        self.blocks = rng.integers(0, 256, (len(self.where), BLOCK), np.uint8)
        assert self.there.write(self.where, self.keys, self.blocks, np.arange(len(self.where))).all()
        self.server, self.reader = Tcp(self.there, "127.0.0.1"), Tcp(self.here, "127.0.0.1")

    def pull(self, relay: Relay, which: slice = slice(None), seconds: float = PATIENCE_S) -> NDArray[np.uint8]:
        source, keys = self.where[which], self.keys[which]
        end = time.monotonic() + seconds
        return self.reader.pull(PEER, relay.address, PullRequest(source, keys, self.here, source.copy(), end))

    def arrived(self, which: slice = slice(None)) -> bool:
        """Whether all of these blocks are here and right, with their positions."""
        where, keys = self.where[which], self.keys[which]
        out = np.zeros((len(where), BLOCK), np.uint8)
        positions = self.here.read_headers(where, keys).positions.tolist()
        there = self.here.read(where, keys, out, verify=True)
        return bool(there.all()) and np.array_equal(out, self.blocks[which]) and positions == [*range(BLOCKS)][which]

    @contextmanager
    def relay(self, limit: Callable[[int], int] = lambda n: FORWARD, cut: bool = True) -> Iterator[Relay]:
        address = self.server.offer()
        assert address
        relay = Relay(address, limit, cut)
        try:
            yield relay
        finally:
            relay.close()

    def close(self) -> None:
        for tcp in (self.server, self.reader):
            tcp.close()
        for arena in self.arenas:
            arena.close(unlink=True)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(f"/dev/shm/raykv-test-tcp-{threading.get_native_id()}")
    yield pair
    pair.close()


def test_a_pull_takes_several_streams_and_keeps_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.transports.tcp_pull, "STALLED_S", PATIENCE_S)  # a machine may be busy
    with pair.relay() as relay:
        assert (pair.pull(relay, slice(0, 16)) == PULLED).all() and pair.arrived(slice(0, 16))
        assert relay.connections == FEWEST
        assert (pair.pull(relay, slice(16, None)) == PULLED).all() and pair.arrived()
        assert relay.connections == FEWEST, "connections are kept"


def test_a_connection_whose_key_is_worn_carries_no_other_pull(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "WORN_BYTES", 0)
    with pair.relay() as relay:
        assert (pair.pull(relay, slice(0, 16)) == PULLED).all()
        assert bool(pair.reader.lane(PEER, relay.address)._idle) != tls.used()
        assert (pair.pull(relay, slice(16, None)) == PULLED).all() and pair.arrived()


def test_connections_to_a_node_that_is_gone_are_closed(pair: Pair) -> None:
    with pair.relay() as relay:
        assert (pair.pull(relay) == PULLED).all()
        idle = list(pair.reader.lane(PEER, relay.address)._idle)
        pair.reader.forget("another")
        assert len(idle) == FEWEST and all(connection.fileno() >= 0 for connection in idle)
        pair.reader.forget(PEER.name)
        assert all(connection.fileno() < 0 for connection in idle) and not pair.reader._lanes


def test_a_block_that_is_gone_there_is_altered_and_one_that_changed_is_too(pair: Pair) -> None:
    pair.keys[3] = 0
    next(iter(pair.there.views(pair.where[5:6])))[100] ^= 1
    with pair.relay() as relay:
        verdicts = pair.pull(relay)
    assert np.flatnonzero(verdicts == ALTERED).tolist() == [3, 5] and (verdicts == PULLED).sum() == BLOCKS - 2
    assert pair.here.corrupt == 1
    assert np.flatnonzero(~pair.here.read_headers(pair.where, pair.keys).there).tolist() == [3, 5]


def test_a_slot_that_somebody_else_writes_fails_alone(pair: Pair) -> None:
    other = Arena.attach(pair.here.path, pair.here.nonce)
    with pair.relay() as relay:
        assert (pair.pull(relay, slice(5, 6)) == PULLED).all()  # so the slab has its format
    with pair.relay() as relay, other._locks.locked(other._lock_numbers(other._find(pair.where[4:5]).headers)):
        assert np.flatnonzero(pair.pull(relay) == FAILED).tolist() == [4, 5], "5 is here: its grant was used"
    with pair.relay() as relay:
        assert (pair.pull(relay, slice(4, 5)) == PULLED).all() and pair.arrived()
    other.close()


@pytest.mark.parametrize("sent", [40, 100, BLOCK // 2, 5 * BLOCK])
def test_a_stream_that_breaks_costs_nothing(pair: Pair, sent: int) -> None:
    with pair.relay(lambda n: FORWARD if n else sent) as relay:
        assert (pair.pull(relay) == PULLED).all() and pair.arrived()


@pytest.mark.full
def test_a_stream_that_stalls_costs_its_pieces_a_moment(pair: Pair) -> None:
    with pair.relay(lambda n: FORWARD if n else BLOCK // 2, cut=False) as relay:
        assert (pair.pull(relay) == PULLED).all() and pair.arrived()
        assert relay.held.is_set()


def test_connections_that_all_broke_meanwhile_are_made_anew(pair: Pair) -> None:
    with pair.relay(lambda n: FORWARD if n >= FEWEST else 13 * BLOCK // FEWEST) as relay:
        assert (pair.pull(relay, slice(0, 12)) == PULLED).all()
        assert (pair.pull(relay, slice(12, None)) == PULLED).all() and pair.arrived()


def test_a_peer_that_breaks_every_stream_fails_and_the_grants_stay_good(pair: Pair) -> None:
    with pair.relay(lambda n: 100) as relay, pytest.raises(ConnectionError):
        pair.pull(relay)
    assert not pair.here.read_headers(pair.where, pair.keys).there.any()
    with pair.relay() as relay:
        assert (pair.pull(relay) == PULLED).all() and pair.arrived()


@pytest.mark.full
def test_a_peer_that_says_nothing_is_waited_for_until_the_end_and_no_longer(pair: Pair) -> None:
    with pair.relay(lambda n: BLOCK // 2, cut=False) as relay:
        with pytest.raises(TimeoutError):
            pair.pull(relay, seconds=2.5)
        assert relay.connections == FEWEST, "while nobody moves, no stream is blamed"
    assert pair.here.inventory().writing.size == 0, "no slot is locked any more"


def test_a_pull_does_not_wait_for_another_from_the_same_peer(pair: Pair) -> None:
    with pair.relay(lambda n: BLOCK // 2 if n < FEWEST else FORWARD, cut=False) as relay, ThreadPoolExecutor() as pool:
        first = pool.submit(pair.pull, relay, slice(0, 12), 20.0)
        assert relay.held.wait(PATIENCE_S)
        assert (pair.pull(relay, slice(12, None)) == PULLED).all() and pair.arrived(slice(12, None))
        assert not first.done()
        relay.go_on.set()  # ends the held connections
        assert (first.result() == PULLED).all() and pair.arrived()


def test_pulls_from_many_threads(pair: Pair) -> None:
    with pair.relay() as relay, ThreadPoolExecutor(8) as pool:
        slices = [slice(i, i + 3) for i in range(0, BLOCKS, 3)]
        assert all((verdicts == PULLED).all() for verdicts in pool.map(lambda part: pair.pull(relay, part), slices))
        assert pair.arrived()


def test_one_stream_is_enough_where_no_thread_can_be_started(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pair.relay() as relay:
        pair.pull(relay, slice(0, 1))  # so the server has its threads
        with monkeypatch.context() as patch:
            patch.setattr(pair.reader._receivers, "submit", lambda *args: fail(threading.current_thread()))
            assert (pair.pull(relay, slice(1, None)) == PULLED).all() and pair.arrived()


def test_large_pulls_give_way_to_small_ones(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.transports.tcp, "SMALL_BYTES", 2 * BLOCK)
    monkeypatch.setattr(raykv.transports.tcp, "GIVE_WAY_S", PATIENCE_S)
    small, large = (
        TcpPull(PullRequest(pair.where[:n], pair.keys[:n], pair.here, pair.where[:n], 0.0), 1) for n in (2, 3)
    )
    lane = Lane(Address("127.0.0.1", 0, b""))
    with ThreadPoolExecutor(1) as pool, lane.running(large):
        with lane.running(small):
            waiting = pool.submit(lane._give_way, large)
            eventually(lambda: lane._none_small._waiters)  # type: ignore[attr-defined]
            lane._give_way(small)
            assert not waiting.done()
        waiting.result(PATIENCE_S / 2)
    monkeypatch.setattr(raykv.transports.tcp, "GIVE_WAY_S", 0.01)
    with lane.running(small):
        lane._give_way(large)  # a large pull does not wait for small ones for ever


def test_streams_are_added_while_the_rate_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(raykv.transports.tcp.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    lane = Lane(Address("127.0.0.1", 0, b""))
    for _ in range(2 * MOST):  # the rate grows with the number of streams
        lane._note(float(lane.streams))
    assert lane.streams == MOST
    lane = Lane(Address("127.0.0.1", 0, b""))
    for _ in range(2 * MOST):  # four streams fill the wire
        lane._note(float(min(lane.streams, 4)))
    assert lane.streams == 4
    now += SETTLED_S
    lane._note(4.0)
    assert lane.streams == 5, "the wire may be another by now"
