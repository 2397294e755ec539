"""Chooses for each peer the best transport that both nodes have, or the next best while that transport fails."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv.arena.arena import Arena
from raykv.arena.gpu.device import device
from raykv.arena.gpu_arena import GpuArena
from raykv.cluster import ray_calls
from raykv.config import MIB
from raykv.protocol.location import Locations, host_of
from raykv.protocol.transfers import FAILED, PULLED, data_deadline, seconds_left
from raykv.transports import nccl_pair
from raykv.transports.base import Peer, PullRequest, Transport
from raykv.transports.nccl import Nccl
from raykv.transports.nixl import Nixl, has_rdma, why_not
from raykv.transports.object_store import ObjectStore
from raykv.transports.tcp import Tcp

log = logging.getLogger("raykv")
OFFERS_S = 1.0  # maximum time for a peer to answer which transports it offers
LARGE_PULLS, LARGE_BYTES = 4, 16 * MIB  # maximum number of simultaneous large pulls from a peer; their minimum size
RETRY_S = 60.0  # time until a failed transport is tried again, unless the peer makes a new offer earlier


@dataclass
class RouteStats:
    """What is known about pulls from one peer by one transport."""

    failures: int = 0
    failed_offer: Any = None  # the peer's offer at the last failure
    retry_at: float = 0.0  # time.monotonic() until which the transport is not used; 0: no recent failure
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class PeerState:
    """The state of one peer."""

    # Held while the peer is asked for its offers, and during a pull by a transport that is not concurrent. Taken before
    # the locks of the transport and of the slots.
    turn: threading.Lock = field(default_factory=threading.Lock)
    # Held during large pulls by concurrent transports. Too many large pulls at once would all be late on a slow link.
    large: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(LARGE_PULLS))
    mutex: threading.Lock = field(default_factory=threading.Lock)  # guards the other fields; taken last
    offers: dict[str, Any] | None = None  # by transport; None: the peer must be asked for them
    routes: dict[str, RouteStats] = field(default_factory=dict)  # by transport
    last_used: str = ""  # name of the transport used last


class TransportSelector:
    """Pulls from each peer by the first transport that the peer offers, that is connected, and that did not just fail.

    Thread-safe.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        """transports: best first. The last transport is used if all others fail, and reads peers' external tiers."""
        self._transports = transports
        self._states: dict[Peer, PeerState] = {}
        self._mutex = threading.Lock()  # guards `_states`; nothing else is locked meanwhile

    def offers(self) -> dict[str, Any]:
        """Return the offers of this node's transports, by the name of the transport. See Transport.offer."""
        offers = {transport.name: transport.offer() for transport in self._transports}
        return {name: offer for name, offer in offers.items() if offer is not None}

    def serve(self, name: str, *args: Any) -> Any:
        """Answer a question of a peer's transport `name`. Raises ValueError if this node lacks this transport."""
        for transport in self._transports:
            if transport.name == name:
                return transport.serve(*args)
        raise ValueError(f"this node does not offer transport {name}")

    def withdraw(self, slab: int) -> None:
        """See Transport."""
        for transport in self._transports:
            transport.withdraw(slab)

    def pull(
        self, peer: Peer, source: Locations, keys: NDArray[np.uint8], arena: Arena, target: Locations
    ) -> NDArray[np.uint8]:
        """Copy blocks from a peer into slots of `arena`.

        source, target: (n,) LOCATION. keys: (n, 16). Returns (n,) verdicts FAILED, PULLED, or ALTERED. Raises
        TimeoutError or RayError if the peer does not answer in time, and ConnectionError if no transport works.
        """
        with self._mutex:
            state = self._states.setdefault(peer, PeerState())
        seconds = data_deadline(int(source["bytes"].sum()))
        request = PullRequest(source, keys, arena, target, time.monotonic() + seconds)
        interrupted = False
        with _held(state.turn, request.end):  # so that only one pull asks for the offers
            usable = self._usable(state, peer)
        for transport, offer in usable:
            with self._turn(transport, state, request):
                begin = time.monotonic()
                try:
                    verdicts = transport.pull(peer, offer, request)
                except (OSError, RayError) as error:
                    late = isinstance(error, TimeoutError)
                    if not late or request.end - begin > seconds / 2:  # otherwise the pull began too late
                        _note_failure(state, transport.name, offer, peer, error)
                    if late:
                        raise
                    interrupted = True
                    continue
                pulled = int(source["bytes"][verdicts == PULLED].sum())
                _note_success(state, transport.name, pulled, time.monotonic() - begin)
            if interrupted:  # the failed transport had already written these blocks
                verdicts[(verdicts == FAILED) & arena.read_headers(target, keys).there] = PULLED
            return verdicts
        raise ConnectionError(f"no transport reads from node {host_of(peer.name)[:8]}")

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return for each peer: `transport`, the transport used last, and `gbps`, its rate in 1e9 bytes per second.

        Also returns `bytes`, the pulled bytes by transport, and `failed`, the number of failures by transport.
        """
        with self._mutex:
            states = [
                (peer.name, state) for peer, state in self._states.items() if state.last_used and not peer.external
            ]
        return {
            name: {
                "transport": state.last_used,
                "gbps": state.routes[state.last_used].bytes / max(1e-9, state.routes[state.last_used].seconds) / 1e9,
                # over a copy of the routes, as a pull may add a route meanwhile
                "bytes": {by: route.bytes for by, route in dict(state.routes).items() if route.bytes},
                "failed": {by: route.failures for by, route in dict(state.routes).items() if route.failures},
            }
            for name, state in states
        }

    def routes(self) -> list[tuple[str, str, RouteStats]]:
        """Return (name of the peer's memory, transport, statistics) for each peer and transport that was tried."""
        with self._mutex:
            states = [(peer.name, state) for peer, state in self._states.items() if not peer.external]
        return [(name, by, route) for name, state in states for by, route in dict(state.routes).items()]

    def forget_others(self, living: set[str]) -> set[str]:
        """Forget peers whose nodes are not in `living` (Ray ids of living nodes). Returns the forgotten nodes' ids."""
        with self._mutex:
            gone = [peer for peer in self._states if host_of(peer.name) not in living]
            for peer in gone:
                del self._states[peer]
        for transport in self._transports if gone else ():
            for peer in gone:
                transport.forget(peer.name)
        return {host_of(peer.name) for peer in gone}

    def close(self) -> None:
        """Stop serving. No `pull` follows."""
        for transport in self._transports:
            transport.close()

    def _turn(self, transport: Transport, state: PeerState, request: PullRequest) -> AbstractContextManager[None]:
        """Return a context in which the pull may run. Raises TimeoutError if there is no turn before the pull's end."""
        if not transport.concurrent:
            return _held(state.turn, request.end)
        if request.source["bytes"].sum() >= LARGE_BYTES:
            return _held(state.large, request.end)
        return nullcontext()

    def _usable(self, state: PeerState, peer: Peer) -> list[tuple[Transport, Any]]:
        """Return the transports to try, each with the peer's offer."""
        last = self._transports[-1]
        if peer.external or last is self._transports[0]:
            return [(last, None)]
        now = time.monotonic()
        with state.mutex:
            routes = [state.routes.setdefault(transport.name, RouteStats()) for transport in self._transports]
            offers = state.offers
        if offers is None or any(0.0 < route.retry_at <= now for route in routes):
            offers = ray_calls.get(peer.store.offers.remote(peer.name), timeout=OFFERS_S)
            with state.mutex:
                state.offers = offers
                for route in routes:
                    route.retry_at = route.retry_at if route.retry_at > now else 0.0  # the next pull won't ask the peer
        usable = []
        for transport, route in zip(self._transports[:-1], routes, strict=False):
            offer = offers.get(transport.name)
            failed = now < route.retry_at and offer == route.failed_offer
            if offer is not None and not failed and not transport.connecting(peer, offer):
                usable.append((transport, offer))
        return [*usable, (last, None)]


def uses_nccl(chosen: str) -> bool:
    """Whether NCCL reads from this node's GPUs. chosen: `transport` of PoolConfig."""
    return chosen == "auto" and not nccl_pair.why_not()


def open_transports(arena: Arena, chosen: str, host: str) -> TransportSelector:
    """Open this node's transports for an arena.

    chosen: `transport` of PoolConfig. host: address of this node that peers can reach.
    """
    if chosen == "object_store":
        return TransportSelector([ObjectStore()])
    transports: list[Transport] = [Tcp(arena, host), ObjectStore()]
    try:
        if isinstance(arena, GpuArena):  # raykv's NIXL transport reads host memory only
            transports[:0] = [Nccl(arena, device(arena.gpu))] if uses_nccl(chosen) else []
        elif (chosen == "nixl" or (chosen == "auto" and has_rdma())) and not why_not():
            transports.insert(0, Nixl(arena))
    except Exception as error:  # NCCL and UCX raise various errors about this machine
        log.warning("%s is read by TCP: %r", arena.path, error)
    return TransportSelector(transports)


@contextmanager
def _held(lock: Any, end: float) -> Iterator[None]:
    """Hold a lock or a semaphore. Raises TimeoutError if others hold it until `end` (time.monotonic())."""
    if not lock.acquire(timeout=seconds_left(end)):
        raise TimeoutError("earlier pulls from that node took all the time")
    try:
        yield
    finally:
        lock.release()


def _note_failure(state: PeerState, name: str, offer: Any, peer: Peer, error: Exception) -> None:
    with state.mutex:
        route = state.routes.setdefault(name, RouteStats())
        route.failures += 1
        route.failed_offer, route.retry_at, state.offers = offer, time.monotonic() + RETRY_S, None
    log.warning(
        "node %s can't be read by %s: %r; it is read by another transport for %.0f s, or until it restarts",
        host_of(peer.name)[:8],
        name,
        error,
        RETRY_S,
    )


def _note_success(state: PeerState, name: str, size: int, seconds: float) -> None:
    with state.mutex:
        state.last_used, route = name, state.routes.setdefault(name, RouteStats())
        route.retry_at = 0.0
        route.bytes += size
        route.seconds += seconds
