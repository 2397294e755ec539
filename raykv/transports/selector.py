"""Which transport is used from which node: the best that both have, the next one while that fails."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv.arena.arena import Arena
from raykv.arena.gpu.device import device
from raykv.arena.gpu_arena import GpuArena
from raykv.protocol import FAILED, PULLED, data_deadline, host_of
from raykv.transports import nccl_pair
from raykv.transports.base import Peer, PullRequest, Transport
from raykv.transports.nccl import Nccl
from raykv.transports.nixl import Nixl, has_rdma, why_not
from raykv.transports.object_store import ObjectStore
from raykv.transports.tcp import Tcp

log = logging.getLogger("raykv")
OFFERS_S = 1.0  # for a peer to say what it offers
RETRY_S = 60.0  # what failed is tried again after so long, or when the peer offers another


@dataclass
class RouteStats:
    """One transport from one peer."""

    failed: int = 0
    failed_offer: Any = None
    retry_at: float = 0.0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class PeerState:
    """From one peer. A pull has it for itself: two at a time would both arrive late."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    offers: dict[str, Any] | None = None
    ways: dict[str, RouteStats] = field(default_factory=dict)
    last: str = ""  # the transport that was used last


class TransportSelector:
    """Pulls from peers, each by the first of the transports that it offers and that has not just failed."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        """transports: best first; what lies below a peer's memory comes by the last, which is tried whatever failed."""
        self._transports = transports
        self._lanes: dict[Peer, PeerState] = {}
        self._mutex = threading.Lock()

    def offers(self) -> dict[str, Any]:
        """What peers need to read from here, by transport."""
        offers = {transport.name: transport.offer() for transport in self._transports}
        return {name: offer for name, offer in offers.items() if offer is not None}

    def serve(self, name: str, *args: Any) -> Any:
        """What a peer's transport of that name asks for. ValueError where there is none."""
        for transport in self._transports:
            if transport.name == name:
                return transport.serve(*args)
        raise ValueError(f"this node does not offer {name}")

    def withdraw(self, slab: int) -> None:
        """The memory of a slab is about to go."""
        for transport in self._transports:
            transport.withdraw(slab)

    def pull(
        self, peer: Peer, source: NDArray[np.void], keys: NDArray[np.uint8], arena: Arena, target: NDArray[np.void]
    ) -> NDArray[np.uint8]:
        """Copy blocks (n LOCATIONs) of a peer into slots of `arena`; verdicts FAILED, PULLED, or ALTERED there.

        Raises TimeoutError or RayError if the peer does not answer in time.
        """
        with self._mutex:
            lane = self._lanes.setdefault(peer, PeerState())
        seconds = data_deadline(int(source["bytes"].sum()))
        wanted = PullRequest(source, keys, arena, target, time.monotonic() + seconds)
        if not lane.turn.acquire(timeout=seconds):
            raise TimeoutError(f"the blocks before these took {seconds:.1f} s")
        broken_off = False
        try:
            for transport, offer in self._usable(lane, peer):
                begin = time.monotonic()
                try:
                    verdicts = transport.pull(peer, offer, wanted)
                except (OSError, RayError) as error:
                    late = isinstance(error, TimeoutError)
                    if not late or wanted.end - begin > seconds / 2:  # else those before it are to blame
                        _failed(lane, transport.name, offer, peer, error)
                    if late:
                        raise
                    broken_off = True
                    continue
                _done(lane, transport.name, int(source["bytes"][verdicts == PULLED].sum()), time.monotonic() - begin)
                if broken_off:  # another way failed: what came by it is ready, and not written again
                    verdicts[(verdicts == FAILED) & arena.read_headers(target, keys)[2]] = PULLED
                return verdicts
        finally:
            lane.turn.release()
        raise ConnectionError(f"nothing reads from node {host_of(peer.name)[:8]}")

    def stats(self) -> dict[str, dict[str, Any]]:
        """By the name of what is read from: the `transport` used last, its GB/s (1e9 bytes), how often which failed."""
        with self._mutex:
            lanes = [(peer.name, lane) for peer, lane in self._lanes.items() if lane.last and not peer.external]
        return {
            name: {
                "transport": lane.last,
                "gbps": lane.ways[lane.last].bytes / max(1e-9, lane.ways[lane.last].seconds) / 1e9,
                "failed": {by: way.failed for by, way in dict(lane.ways).items() if way.failed},  # a pull may add one
            }
            for name, lane in lanes
        }

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    def _usable(self, lane: PeerState, peer: Peer) -> list[tuple[Transport, Any]]:
        """The transports to try, and what the peer offers for each."""
        last = self._transports[-1]
        if peer.external or last is self._transports[0]:
            return [(last, None)]
        now = time.monotonic()
        if lane.offers is None or any(0.0 < way.retry_at <= now for way in lane.ways.values()):
            lane.offers = ray.get(peer.store.offers.remote(peer.name), timeout=OFFERS_S)
            for way in lane.ways.values():
                way.retry_at = way.retry_at if way.retry_at > now else 0.0  # asked for once, not with every pull
        usable = []
        for transport in self._transports[:-1]:
            way, offer = lane.ways.setdefault(transport.name, RouteStats()), lane.offers.get(transport.name)
            if offer is not None and (now >= way.retry_at or offer != way.failed_offer):
                usable.append((transport, offer))
        return [*usable, (last, None)]


def open_transports(arena: Arena, chosen: str, host: str) -> TransportSelector:
    """The transports of a pool whose PoolConfig says `chosen`, as far as this node has them."""
    # With RAY_USE_TLS whoever runs Ray wants what crosses nodes encrypted: Ray does that, the others do not.
    if chosen == "object_store" or os.environ.get("RAY_USE_TLS", "0").lower() not in ("0", "false"):
        return TransportSelector([ObjectStore()])
    transports: list[Transport] = [Tcp(arena, host), ObjectStore()]
    try:
        if isinstance(arena, GpuArena):  # NIXL goes by addresses, of host memory
            transports[:0] = [Nccl(arena, device(arena.gpu))] if chosen == "auto" and not nccl_pair.why_not() else []
        elif (chosen == "nixl" or (chosen == "auto" and has_rdma())) and not why_not():
            transports.insert(0, Nixl(arena))
    except Exception as error:  # whatever NCCL or UCX find wrong with this machine
        log.warning("%s goes by TCP: %r", arena.path, error)
    return TransportSelector(transports)


def _failed(lane: PeerState, name: str, offer: Any, peer: Peer, error: Exception) -> None:
    way = lane.ways.setdefault(name, RouteStats())
    way.failed += 1
    way.failed_offer, way.retry_at, lane.offers = offer, time.monotonic() + RETRY_S, None
    log.warning(
        "node %s by %s: %r; another way for %.0f s, or until it restarts", host_of(peer.name)[:8], name, error, RETRY_S
    )


def _done(lane: PeerState, name: str, size: int, seconds: float) -> None:
    lane.last, way = name, lane.ways.setdefault(name, RouteStats())
    way.retry_at = 0.0
    way.bytes += size
    way.seconds += seconds
