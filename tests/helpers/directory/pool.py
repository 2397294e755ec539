"""A directory with well-behaved node stores and clients, for tests by example."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helpers.directory.checks import check_invariants, rows_of
from helpers.directory.oracle.slots import LOCATION, split, unpack
from raykv.config import KEYS_PER_CALL
from raykv.directory.directory import Directory
from raykv.directory.kernels import columns
from raykv.protocol.clients import (
    Call,
    CommitRequest,
    Intent,
    Matched,
    MatchedPart,
    MatchedParts,
    MatchRequest,
    NextWindowRequest,
    Reserved,
    ReserveRequest,
    Window,
)
from raykv.protocol.stores import ArenaDescription, Inventory, Joined
from raykv.protocol.tiers import DemotionReport, Demotions, GpuDemotionReport, GpuDemotions

PAGE = 4096
EMPTY = Inventory(b"", b"", b"", b"", b"")
KEYS = [struct.pack(">QQ", 7, i) for i in range(1000)]


@dataclass
class Pool:
    """A directory with nodes of `slabs` slabs of `slots` pages, and a client for each node."""

    slots: int = 8
    slabs: int = 1
    window: int = 1  # pages of the staging window
    nodes: Sequence[str] = "a"
    locality: float = 1.5
    share: float = 0.25
    min_hits: int = 0
    long_bytes: int = 128 << 20

    def __post_init__(self) -> None:
        self.directory = Directory(
            locality=self.locality, share=self.share, min_hits=self.min_hits, long_bytes=self.long_bytes
        )
        self.now = 0.0
        self.id = 0
        self.seq = 0
        self.held: dict[str, list[int]] = {}
        self.seen: dict[str, int] = {}  # by node, the number of the last answer to `demote` that the node got
        for name in self.nodes:
            self.add(name)

    def add(self, name: str) -> None:
        self.join(name)
        self.adopt(name)
        self.directory.heartbeat(name, self.slabs, self.now)

    def join(self, name: str, nonce: bytes = b"", epoch: int = 0, slabs: int = 0) -> Joined:
        """nonce: of the arena, by default the node's name. epoch: in its superblock. slabs: by default the pool's."""
        arena = ArenaDescription(nonce or name.encode(), self.slots * PAGE, slabs or self.slabs, epoch)
        return self.directory.join(name, arena, self.now, self.window * PAGE)

    def adopt(self, name: str, found: Inventory = EMPTY, offered: int = 0) -> None:
        self.directory.adopt(name, found, self.now, offered)

    def call(self, node: str, pulled: bytes = b"", corrupt: bytes = b"") -> Call:
        self.seq += 1
        held = self.held.get(node, [])
        return Call(
            int.from_bytes(node.encode(), "big"), self.seq, struct.pack(f"<{len(held)}Q", *held), pulled, corrupt
        )

    def match(
        self, node: str, keys: list[bytes], size: int = PAGE, stage: int = KEYS_PER_CALL, tenant: str = ""
    ) -> tuple[int, Matched]:
        self.id += 1
        request = MatchRequest(self.id, node, b"".join(keys), size, stage, tenant=tenant)
        got = self.directory.match(self.call(node), request, self.now)
        self.held.setdefault(node, []).append(self.id)
        return self.id, got

    def match_parts(
        self,
        client: str,
        parts: Sequence[tuple[str, list[bytes]]],
        size: int = PAGE,
        stage: int = KEYS_PER_CALL,
        intent: Intent | None = None,
    ) -> tuple[list[int], MatchedParts]:
        """(leases, answer). client: the node that the client is on. parts: (node that reads it, keys) of each part."""
        leases = list(range(self.id + 1, self.id + 1 + len(parts)))
        self.id += len(parts)
        asked = zip(leases, parts, strict=True)
        requests = tuple(MatchRequest(lease, node, b"".join(keys), size, stage) for lease, (node, keys) in asked)
        got = self.directory.match_parts(self.call(client), requests, intent, self.now)
        self.held.setdefault(client, []).extend([*leases, intent.intent] if intent else leases)
        return leases, got

    def next_window(
        self,
        node: str,
        lease: int,
        start: int,
        stop: int = KEYS_PER_CALL,
        size: int = PAGE,
        by: str = "",
        again: bool = False,
        may_wait: bool = False,
    ) -> Window:
        """by: the client that asks; default: the client on the node, which owns the lease."""
        call = self.call(node)
        request = NextWindowRequest(call.client, lease, start, stop, size, again, may_wait)
        return self.directory.next_window(self.call(by) if by else call, request, self.now)

    def reserve(
        self, node: str, keys: list[bytes], start: int = 0, size: int = PAGE, tenant: str = ""
    ) -> tuple[int, Reserved]:
        self.id += 1
        request = ReserveRequest(self.id, node, b"".join(keys), start, size, tenant)
        got = self.directory.reserve(self.call(node), request, self.now)
        self.held.setdefault(node, []).append(self.id)
        return self.id, got

    def commit(self, node: str, hold: int, got: Reserved, keys: list[bytes], failed: tuple[int, ...] = ()) -> int:
        granted = np.frombuffer(got.indices, np.int32).tolist()
        written = bytes(n not in failed for n in range(len(granted)))
        mine = b"".join(keys[i] for i in granted)
        request = CommitRequest(hold, got.locations, mine, written)
        accepted = self.directory.commit(self.call(node), request, self.now).done
        if hold in self.held.get(node, []):
            self.held[node].remove(hold)
        return accepted

    def release(self, node: str, hold: int) -> None:
        self.held[node].remove(hold)
        self.heartbeat(node)

    def heartbeat(self, node: str, pulled: bytes = b"", corrupt: bytes = b"") -> None:
        self.directory.client_heartbeat(self.call(node, pulled, corrupt), self.now)

    def store(self, node: str, keys: list[bytes], size: int = PAGE, tenant: str = "") -> list[str]:
        """Store keys. Returns the node that each new one is on."""
        hold, got = self.reserve(node, keys, size=size, tenant=tenant)
        self.commit(node, hold, got, keys)
        return [self.name(location[0]) for location in unpack(got.locations)]

    def read(self, node: str, keys: list[bytes], size: int = PAGE, tenant: str = "") -> int:
        """Match and release. Returns how many blocks were hit."""
        lease, got = self.match(node, keys, size, tenant=tenant)
        self.release(node, lease)
        return blocks(got)

    def replicate(self, node: str, keys: list[bytes]) -> None:
        """Pull blocks of another node, and leave them there."""
        lease, got = self.match(node, keys)
        self.heartbeat(node, pulled=got.staged)
        self.release(node, lease)

    def demote(
        self,
        node: str,
        answer: Demotions | None = None,
        stored: bytes | None = None,
        whole: bool = False,
        lost: bool = False,
    ) -> Demotions:
        """Which blocks are demoted next.

        answer: an earlier answer, to report on. stored: which of its blocks were stored, by default all.
        lost: the node does not get the new answer. Otherwise it carries out the answer's deletions.
        """
        locations, keys = (answer.target, answer.keys) if answer else (b"", b"")
        done = bytes([1]) * (len(keys) // 16) if stored is None else stored
        report = DemotionReport(locations, keys, done, self.seen.get(node, 0), whole)
        got = self.directory.demote(node, report, self.now)
        if not lost:
            self.seen[node] = got.number
        return got

    def demote_all(self, node: str, whole: bool = False) -> list[bytes]:
        """Demote until there is nothing more to demote. Returns the keys in the order of demotion."""
        demoted: list[bytes] = []
        got = self.demote(node, whole=whole)
        while got.keys:
            demoted += split(got.keys)
            got = self.demote(node, got, whole=whole)
        check_invariants(self.directory)
        return demoted

    def demote_gpu(self, gpu: str, answer: GpuDemotions | None = None, stored: bytes | None = None) -> GpuDemotions:
        """Which of a GPU's blocks are demoted to memory next. answer, stored: as in `demote`."""
        locations, keys = (answer.target, answer.keys) if answer else (b"", b"")
        done = bytes([1]) * (len(keys) // 16) if stored is None else stored
        got = self.directory.demote_gpu(gpu, GpuDemotionReport(locations, done), self.now)
        check_invariants(self.directory)
        return got

    def name(self, number: int) -> str:
        return next(name for name, node in self.directory.nodes.items() if node.index == number)

    def has(self, keys: list[bytes]) -> list[bool]:
        rows = self.directory.c.rows
        present = (columns.READY, columns.REPLICA)
        return [any(rows[row]["state"] in present for row in rows_of(self.directory, key)) for key in keys]

    def keys(self) -> set[bytes]:
        """All keys of stored blocks."""
        rows = self.directory.c.rows
        stored = rows[np.isin(rows["state"], (columns.READY, columns.REPLICA))]
        return {struct.pack("<QQ", k0, k1) for k0, k1 in zip(stored["k0"], stored["k1"], strict=True)}

    def count(self, state: str, node: str = "a") -> int:
        return int(self.directory.stats(self.now)["nodes"][node][state])

    def tick(self, seconds: float, alive: str | None = None) -> None:
        """Time passes. Stores of the `alive` nodes, by default all, send heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for name in self.nodes if alive is None else alive:
                self.directory.heartbeat(name, self.slabs, self.now)
        check_invariants(self.directory)


def primary(pool: Pool, key: bytes) -> str:
    c = pool.directory.c
    (row,) = [row for row in rows_of(pool.directory, key) if c.rows[row]["state"] == columns.READY]
    return pool.name(int(c.size_classes[c.slabs[c.pages[row >> columns.PAGE_BITS]]["size_class"]]["node"]))


def blocks(got: Matched | MatchedPart | Window) -> int:
    return len(got.source) // LOCATION.size


def staged(got: Matched | MatchedPart | Window) -> int:
    return sum(location[4] > 0 for location in unpack(got.staged))
