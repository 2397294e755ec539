"""A pool that serves a trace without moving a byte: the real directory, and a simulated `KVCache` on every node."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.bench.trace.formats import Trace
from raykv.config import MIB
from raykv.directory.directory import Directory
from raykv.protocol.clients import Call, CommitRequest, MatchRequest, NextWindowRequest, ReserveRequest
from raykv.protocol.location import ALIGN, KEY_BYTES, LOCATION
from raykv.protocol.stores import ArenaDescription, Inventory
from raykv.protocol.tiers import DemotionReport, ExistingBlocks, TierReport

BLOCK_BYTES = 4 * MIB - ALIGN  # a block and its header take 4 MiB in a tier, so blocks fill a tier's slabs exactly
CLIENT = 1
PLAN_EVERY = 50  # requests between two plans of the directory: see `HitCurve.plan`
LONG_WAIT_S = 10.0  # seconds; a session that waits longer waits for a person, not for a tool
MIN_WINDOW = 64  # minimum number of staging slots of a node

KeyArray = NDArray[np.uint64]  # (n, 2)


class Served(NamedTuple):
    """Percent of a trace's tokens that were read: in all, on the reader's node, and from other nodes.

    crossed_bytes: bytes from other nodes per token read, if a block has BLOCK_BYTES bytes.
    """

    percent: float
    here: float
    crossed: float
    crossed_bytes: float


class Pool:
    """The real directory, and a simulated `KVCache` on every node."""

    def __init__(self, shares: list[int], locality: float, tiers: Sequence[int] = ()) -> None:
        """shares: number of blocks of each node. tiers: number of blocks of each node's tier, or of a shared tier."""
        self.directory = Directory(locality=locality)
        self.window = max(MIN_WINDOW, sum(shares) // len(shares) // 50)
        self.calls, self.asked = itertools.count(1), itertools.count(1)
        self.stored = self.local = 0
        self.now = 0.0
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

    def serve(self, trace: Trace, nodes: Sequence[int], waits: Sequence[float] = ()) -> Served:
        """Send each request to its node. nodes: the node of each request.

        waits: seconds from each request to the session's next request; inf after the last. Before a long wait, a
        session tells the pool that it is done with its own blocks: the blocks that its first request did not find.
        """
        asked, own, begin = [], dict[int | None, int](), self.now
        for number, (node, request) in enumerate(zip(nodes, trace.requests, strict=True)):
            if waits:
                self.let_pass(begin + request.at - trace.requests[0].at)
            asked.append(self.ask(node, request.ids))
            start = own.setdefault(request.session, asked[-1][0])
            if waits and waits[number] >= LONG_WAIT_S:
                keys, again = keys_of(request.ids[start:]), waits[number] < math.inf
                self.directory.done(self._call(), keys.tobytes(), self.now, again)
        read, crossed = (sum(blocks) for blocks in zip(*asked, strict=True))
        hits = served(trace, [blocks for blocks, _ in asked])
        one = 100 / max(1, sum(request.tokens for request in trace.requests))
        here = read - crossed
        return Served(
            hits * one,
            here * trace.block_tokens * one,
            crossed * trace.block_tokens * one,
            crossed * BLOCK_BYTES / max(1, hits),
        )

    def let_pass(self, until: float) -> None:
        """Set the clock to `until`. Then let all node stores send heartbeats."""
        self.now = max(self.now, until)
        for node in self.directory.nodes:
            self.directory.heartbeat(node, 1, self.now)

    def ask(self, node: int, ids: list[int]) -> tuple[int, int]:
        """Serve a prompt on a node: read its stored blocks, and store the others.

        Returns the number of blocks that were read, and how many of them came from other nodes.
        """
        keys = keys_of(ids)
        read, crossed = self.read(node, keys)
        self.store(node, keys, read)
        self._demote()
        if next(self.asked) % PLAN_EVERY == 0:
            plan = self.directory.next_plan()
            for name in self.directory.nodes:
                self.directory.follow(name, plan, self.now)
        return read, crossed

    def read(self, node: int, keys: KeyArray) -> tuple[int, int]:
        """Match and read blocks. Returns the same as `ask`.

        Remote blocks are copied through the staging slots, one window of blocks after another.
        """
        lease = next(self.calls)
        held = np.uint64(lease).tobytes()
        request = MatchRequest(lease, str(node), keys.tobytes(), BLOCK_BYTES, len(keys))
        match = self.directory.match(self._call(), request, self.now)
        source, staged = np.frombuffer(match.source, LOCATION), np.frombuffer(match.staged, LOCATION).copy()
        if len(staged) == 0:
            staged = np.zeros(len(source), LOCATION)
        remote = source["node"] != self.directory.nodes[str(node)].index
        missing = remote & (staged["slab_gen"] == 0)
        read, pulled = 0, b""
        while True:
            first = read + int(np.argmax(np.append(missing[read:], True)))  # next block that lacks a staging slot
            pulled = staged[read:first][staged[read:first]["slab_gen"] > 0].tobytes()
            read = first
            if read == len(source):
                break
            wanted = NextWindowRequest(CLIENT, lease, read, len(source), BLOCK_BYTES)
            more = self.directory.next_window(self._call(held, pulled), wanted, self.now)
            slots = np.frombuffer(more.staged, LOCATION)
            staged[read : read + len(slots)] = slots
            missing[read : read + len(slots)] &= slots["slab_gen"] == 0
            pulled = b""
            if missing[read]:
                break
        self.directory.client_heartbeat(self._call(pulled=pulled), self.now)  # lists no lease, so the lease ends
        return read, int(np.count_nonzero(remote[:read]))

    def store(self, node: int, keys: KeyArray, start: int) -> None:
        """Store the blocks that were not read, by several calls. One call may store only few blocks on other nodes."""
        index = self.directory.nodes[str(node)].index
        while start < len(keys):
            reservation = next(self.calls)
            wanted = ReserveRequest(reservation, str(node), keys.tobytes(), start, BLOCK_BYTES)
            granted = self.directory.reserve(self._call(), wanted, self.now)
            chosen = keys[np.frombuffer(granted.indices, np.int32)]
            locations = np.frombuffer(granted.locations, LOCATION)
            held = np.uint64(reservation).tobytes()
            written = CommitRequest(reservation, granted.locations, chosen.tobytes(), b"\1" * len(locations))
            self.directory.commit(self._call(held), written, self.now)
            self.stored += len(locations)
            self.local += int(np.count_nonzero(locations["node"] == index))
            if len(locations) == 0:
                break
            start = granted.covered

    def _demote(self) -> None:
        """Demote all due blocks at once. Node stores do this over time."""
        for node in self.directory.nodes:
            demoted = self.directory.demote(node, DemotionReport(b"", b"", b"", 0, False), self.now)
            while demoted.source:
                stored = b"\1" * (len(demoted.keys) // KEY_BYTES)
                report = DemotionReport(demoted.target, demoted.keys, stored, demoted.number, False)
                demoted = self.directory.demote(node, report, self.now)

    def _call(self, held: bytes = b"", pulled: bytes = b"") -> Call:
        return Call(CLIENT, next(self.calls), held, pulled)


def keys_of(ids: list[int]) -> KeyArray:
    keys = np.empty((len(ids), 2), np.uint64)
    keys[:, 0] = ids
    keys[:, 1] = keys[:, 0] * np.uint64(0x9E3779B97F4A7C15)
    return keys


def served(trace: Trace, hits: Sequence[int]) -> int:
    """Number of served tokens. hits: number of served leading blocks of each request."""
    return sum(
        min(blocks * trace.block_tokens, request.tokens) for request, blocks in zip(trace.requests, hits, strict=True)
    )


def percent(trace: Trace, hits: Sequence[int]) -> float:
    """Token-weighted hit percent. hits: see `served`."""
    return 100 * served(trace, hits) / max(1, sum(request.tokens for request in trace.requests))
