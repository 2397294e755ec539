"""Clients of a pool: their leases and reservations, and what happens to these when a client leaves."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np

from raykv.directory.kernels import leases
from raykv.directory.kernels.columns import Blocks
from raykv.directory.state.arrays import KeyArray, RowArray
from raykv.directory.state.size_classes import SizeClasses
from raykv.protocol.clients import Call

UNUSED_S = 600.0  # seconds after which an unused lease ends, as its reader has probably forgotten it


@dataclass(slots=True)
class Hold:
    """Rows held for a client, in the order of its keys: a lease, or a reservation (`writes`)."""

    seq: int  # sequence number of the call that asked for the hold
    node: int  # index of the client's node, -1 if it has none
    size_class: int  # size class on that node
    keys: KeyArray
    blocks: Blocks  # with an entry for each key
    writes: bool
    group: int  # id of the first hold of the same call; blocks at the same index in a group's holds belong together
    since: float  # when the hold began: seconds of the caller's clock
    used: float  # when the hold began, or when its reader last asked for staging slots (same clock)
    held_up: float | None = None  # when its reader began to wait for slots that others hold (same clock)
    waits: float | None = None  # when its reader began to wait for another reader's copy (same clock)
    waits_gen: int = 0  # newest generation when `waits` was set
    gave_up: int = 0  # newest generation of copies for which its reader no longer waits

    def cut(self, n: int) -> "Hold":
        """Remove the blocks from index n on from this hold. Returns them as a Hold, which the caller must release."""
        rest = replace(self, keys=self.keys[n:], blocks=self.blocks.part(slice(n, None)))
        self.keys, self.blocks = self.keys[:n].copy(), self.blocks.first(n)
        return rest


@dataclass(slots=True)
class Client:
    last_seen: float
    holds: dict[int, Hold] = field(default_factory=dict)  # by id, which the client has chosen
    swapped: dict[bytes, None] = field(default_factory=dict)  # keys that are pinned as long as the client exists


class Clients(dict[int, Client]):
    """Clients by id."""

    def __init__(self, size_classes: SizeClasses, ttl: float) -> None:
        """ttl: seconds without a call after which a client is gone."""
        self._size_classes, self._ttl = size_classes, ttl

    def seen(self, client: int, now: float) -> Client:
        """Note that a client calls, possibly for the first time."""
        known = self.get(client)
        if known is None:
            known = self[client] = Client(now)
        known.last_seen = now
        return known

    def end(self, client: Client, hold: int) -> None:
        """End a lease or reservation, if the client has it."""
        if hold in client.holds:
            self.release([client.holds.pop(hold)])

    def end_all(self, client: Client, holds: Iterable[int]) -> None:
        """End leases and reservations, if the client has them."""
        self.release([client.holds.pop(hold) for hold in holds if hold in client.holds])

    def end_unlisted(self, client: Client, call: Call) -> None:
        """End holds that a call does not list. Holds that the client requested after this call stay."""
        if client.holds:
            held = set(memoryview(call.held).cast("Q"))
            ended = [i for i, hold in client.holds.items() if i not in held and hold.seq < call.seq]
            self.release(map(client.holds.pop, ended))

    def disconnect(self, client: int) -> Client | None:
        """Remove a client that disconnects. The client no longer writes to any slot."""
        gone = self.pop(client, None)
        if gone:
            self.release(gone.holds.values())
        return gone

    def expire(self, client: int) -> Client:
        """Remove a client that has vanished. Slots to which it may still write are quarantined."""
        gone, c = self.pop(client), self._size_classes.c
        for hold in gone.holds.values():
            leases.abandon(c, hold.blocks.source, hold.blocks.gens)
            leases.abandon(c, hold.blocks.staged, hold.blocks.staged_gens)
            self.release([hold])
        return gone

    def end_unused(self, now: float) -> None:
        """End leases that nobody used for UNUSED_S. A reader that still reads notices the end by the blocks' headers.

        Slots to which the reader's node may still write are quarantined.
        """
        for client in self.values():
            unused = [i for i, hold in client.holds.items() if now - hold.used > UNUSED_S and not hold.writes]
            for hold in map(client.holds.pop, unused):
                leases.abandon(self._size_classes.c, hold.blocks.staged, hold.blocks.staged_gens)
                self.release([hold])

    def largest(self, n: int, now: float) -> list[dict[str, Any]]:
        """Return the `n` clients that hold the most blocks."""
        found = [
            {
                "client": f"{client:016x}",
                "blocks": sum(len(hold.keys) for hold in it.holds.values()) + len(it.swapped),
                "leases": sum(not hold.writes for hold in it.holds.values()),
                "reservations": sum(hold.writes for hold in it.holds.values()),
                "oldest_s": now - min((hold.since for hold in it.holds.values()), default=now),
            }
            for client, it in self.items()
        ]
        return sorted(filter(itemgetter("blocks"), found), key=itemgetter("blocks"), reverse=True)[:n]

    def expired(self, now: float) -> list[int]:
        return [i for i, client in self.items() if now - client.last_seen > self._ttl]

    def invalidate(self) -> None:
        """Remove the rows of closed slabs from all holds."""
        for client in self.values():
            for hold in client.holds.values():
                self._size_classes.invalidate(hold.blocks.source, hold.blocks.gens)
                self._size_classes.invalidate(hold.blocks.staged, hold.blocks.staged_gens)

    def release(self, ended: Iterable[Hold]) -> None:
        """Free the blocks of these holds. Blocks of one group are freed together, the last blocks first."""
        groups: dict[int, list[Blocks]] = {}
        for hold in ended:
            groups.setdefault(hold.group, []).append(hold.blocks)
        for first, *others in groups.values():
            blocks = map(_woven, zip(first, *others, strict=True)) if others else first
            leases.release(self._size_classes.c, *blocks)


def _woven(parts: tuple[RowArray, ...]) -> RowArray:
    """Interleave the parts: the first row of each, then the second row of each, and so on; -1 beyond a part's end."""
    woven = np.full((max(map(len, parts)), len(parts)), -1, np.int64)
    for i, part in enumerate(parts):
        woven[: len(part), i] = part
    return woven.ravel()
