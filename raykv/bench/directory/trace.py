"""Share of a Mooncake-format trace's prompt tokens that a pool serves, by capacity. It needs no cluster.

The floors are an exact LRU over all nodes, and isolated LRUs of the nodes.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.bench.directory import mooncake
from raykv.bench.directory.mooncake import BLOCK_TOKENS
from raykv.config import MIB, PoolConfig
from raykv.directory.directory import Directory
from raykv.protocol.clients import Call, CommitRequest, MatchRequest, NextWindowRequest, ReserveRequest
from raykv.protocol.location import ALIGN, KEY_BYTES, LOCATION
from raykv.protocol.stores import ArenaDescription, Inventory
from raykv.protocol.tiers import DemotionReport, ExistingBlocks, TierReport

BLOCK_BYTES = 4 * MIB - ALIGN  # no bytes move. With a header, a power of two: so tiers have few spare slots
CLIENT = 1
MIN_WINDOW = 64  # staging slots of a node, at least

KeyArray = NDArray[np.uint64]  # (n, 2)


class Request(NamedTuple):
    """A prompt: ids of its blocks, and tokens of each block."""

    ids: list[int]
    tokens: list[int]


def run(
    path: str | PathLike[str],
    nodes: int,
    capacities: list[int],
    external: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Token-weighted hit percent of a trace whose requests go to `nodes` nodes in turn, by capacity.

    capacities: blocks of all nodes, without staging. external: blocks of all external tiers; 0: no tiers. advance:
    called after each figure.
    results: one row for each capacity: exact_lru, isolated, pool_strict (locality 1), pool; pool_one_writer and
    pool_one_writer_strict, with all requests on one node; local_stores: percent of the pool's stores that stayed on the
    writer's node. With `external` also exact_lru_external (an LRU of as many blocks), pool_shared_tier (all nodes share
    a tier) and pool_own_tiers (each node has a tier).
    Raises ValueError for a malformed trace, nodes < 1, or less than one block for each node.
    """
    if nodes < 1 or any(blocks < nodes for blocks in [*capacities, external or nodes]):
        raise ValueError(f"nodes={nodes}, capacity={capacities}, external={external}: every node needs a block")
    requests = read(path)
    default = PoolConfig().locality
    results = []
    for capacity in capacities:
        row: dict[str, Any] = {"capacity": capacity}

        def figure(name: str, serve: Callable[..., float], *arguments: Any, row: dict[str, Any] = row) -> None:
            row[name] = round(serve(requests, *arguments), 2)
            advance()

        figure("exact_lru", _isolated, divided(capacity, 1))
        figure("isolated", _isolated, divided(capacity, nodes))
        pool = Pool(divided(capacity, nodes), default)
        figure("pool_strict", Pool(divided(capacity, nodes), 1.0).serve, nodes)
        figure("pool", pool.serve, nodes)
        figure("pool_one_writer", Pool(divided(capacity, nodes), default).serve, 1)
        figure("pool_one_writer_strict", Pool(divided(capacity, nodes), 1.0).serve, 1)
        row["local_stores"] = round(100 * pool.local / max(1, pool.stored), 2)
        if external:
            figure("exact_lru_external", _isolated, [external])
            figure("pool_shared_tier", Pool(divided(capacity, nodes), default, [external]).serve, nodes)
            figure("pool_own_tiers", Pool(divided(capacity, nodes), default, divided(external, nodes)).serve, nodes)
        results.append(row)
    return {
        "requests": len(requests),
        "blocks": sum(len(request.ids) for request in requests),
        "nodes": nodes,
        "locality": default,
        "external": external,
        "results": results,
    }


def read(path: str | PathLike[str]) -> list[Request]:
    """The requests of a trace. Raises ValueError that names a malformed line."""
    return [
        Request(line.ids, [min(BLOCK_TOKENS, line.tokens - i * BLOCK_TOKENS) for i in range(len(line.ids))])
        for line in mooncake.lines(path)
    ]


def divided(capacity: int, parts: int) -> list[int]:
    """A capacity, divided into shares that differ by at most one."""
    return [capacity // parts + (i < capacity % parts) for i in range(parts)]


def percent(requests: list[Request], hits: list[int]) -> float:
    """Token-weighted hit percent. hits: number of served leading blocks, by request."""
    served = sum(sum(request.tokens[:n]) for request, n in zip(requests, hits, strict=True))
    return 100 * served / max(1, sum(sum(request.tokens) for request in requests))


def _isolated(requests: list[Request], capacities: list[int]) -> float:
    """Hit percent of exact LRUs that serve requests in turn. A request touches its blocks last to first."""
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
    hits = []
    for number, request in enumerate(requests):
        at = number % len(caches)
        cache = caches[at]
        hits.append(next((i for i, block in enumerate(request.ids) if block not in cache), len(request.ids)))
        for block in reversed(request.ids):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacities[at]:
            cache.popitem(last=False)
    return percent(requests, hits)


class Pool:
    """The real directory, and a simulated `KVCache` on every node."""

    def __init__(self, shares: list[int], locality: float, tiers: Sequence[int] = ()) -> None:
        """shares: blocks of each node. tiers: blocks of each node's external tier, or of the single shared tier."""
        self.directory = Directory(locality=locality)
        self.window = max(MIN_WINDOW, sum(shares) // len(shares) // 50)
        self.calls = itertools.count(1)
        self.stored = self.local = 0
        for node, share in enumerate(shares):
            slab_bytes = (share + self.window) * BLOCK_BYTES  # one slab: the capacity is exact
            arena = ArenaDescription(b"%d" % node, slab_bytes, 1, 0)
            self.directory.join(str(node), arena, 0.0, self.window * BLOCK_BYTES)
            self.directory.adopt(str(node), Inventory(b"", b"", b"", b"", b""), 0.0)
            self.directory.heartbeat(str(node), 1, 0.0)
            if tiers:
                capacity = tiers[node % len(tiers)] * (BLOCK_BYTES + ALIGN)
                report = TierReport(capacity, shared=len(tiers) < len(shares), reached=True, lost=b"")
                self.directory.tier_heartbeat(str(node), report, 0.0)
                self.directory.report_existing(str(node), ExistingBlocks(b"", b"", True), 0.0)

    def serve(self, requests: list[Request], writers: int) -> float:
        """Send the requests to the first `writers` nodes in turn. Returns the hit percent."""
        hits = [self.ask(number % writers, request.ids) for number, request in enumerate(requests)]
        return percent(requests, hits)

    def ask(self, node: int, ids: list[int]) -> int:
        """Serve a prompt on a node: read its stored blocks, store the rest. Returns the number of blocks read."""
        keys = _keys(ids)
        served = self._read(node, keys)
        self._store(node, keys, served)
        self._demote()
        return served

    def _read(self, node: int, keys: KeyArray) -> int:
        """Match and read. Remote blocks come through staging, a window at a time. Returns the number of blocks read."""
        lease = next(self.calls)
        held = np.uint64(lease).tobytes()
        request = MatchRequest(lease, str(node), keys.tobytes(), BLOCK_BYTES, len(keys))
        match = self.directory.match(self._call(), request, 0.0)
        source, staged = np.frombuffer(match.source, LOCATION), np.frombuffer(match.staged, LOCATION).copy()
        if len(staged) == 0:
            staged = np.zeros(len(source), LOCATION)
        missing = (source["node"] != self.directory.nodes[str(node)].index) & (staged["slab_gen"] == 0)
        read, pulled = 0, b""
        while True:
            first = read + int(np.argmax(np.append(missing[read:], True)))  # the next block without a staging slot
            pulled = staged[read:first][staged[read:first]["slab_gen"] > 0].tobytes()
            read = first
            if read == len(source):
                break
            wanted = NextWindowRequest(CLIENT, lease, read, len(source), BLOCK_BYTES)
            more = self.directory.next_window(self._call(held, pulled), wanted, 0.0)
            slots = np.frombuffer(more.staged, LOCATION)
            staged[read : read + len(slots)] = slots
            missing[read : read + len(slots)] &= slots["slab_gen"] == 0
            pulled = b""
            if missing[read]:
                break
        self.directory.client_heartbeat(self._call(pulled=pulled), 0.0)  # it does not list the lease, so releases it
        return read

    def _store(self, node: int, keys: KeyArray, start: int) -> None:
        """Store the blocks that were not read: in several calls, since staging limits stores on other nodes."""
        index = self.directory.nodes[str(node)].index
        while start < len(keys):
            reservation = next(self.calls)
            wanted = ReserveRequest(reservation, str(node), keys.tobytes(), start, BLOCK_BYTES)
            granted = self.directory.reserve(self._call(), wanted, 0.0)
            chosen = keys[np.frombuffer(granted.indices, np.int32)]
            locations = np.frombuffer(granted.locations, LOCATION)
            held = np.uint64(reservation).tobytes()
            written = CommitRequest(reservation, granted.locations, chosen.tobytes(), b"\1" * len(locations))
            self.directory.commit(self._call(held), written, 0.0)
            self.stored += len(locations)
            self.local += int(np.count_nonzero(locations["node"] == index))
            if len(locations) == 0:
                break
            start = granted.covered

    def _demote(self) -> None:
        """Demote all due blocks at once, as node stores do over time."""
        for node in self.directory.nodes:
            demoted = self.directory.demote(node, DemotionReport(b"", b"", b"", 0, False), 0.0)
            while demoted.source:
                stored = b"\1" * (len(demoted.keys) // KEY_BYTES)
                report = DemotionReport(demoted.target, demoted.keys, stored, demoted.number, False)
                demoted = self.directory.demote(node, report, 0.0)

    def _call(self, held: bytes = b"", pulled: bytes = b"") -> Call:
        return Call(CLIENT, next(self.calls), held, pulled)


def _keys(ids: list[int]) -> KeyArray:
    keys = np.empty((len(ids), 2), np.uint64)
    keys[:, 0] = ids
    keys[:, 1] = keys[:, 0] * np.uint64(0x9E3779B97F4A7C15)
    return keys
