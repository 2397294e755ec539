"""Clients of a pool: the leases and reservations of each, and what becomes of them when it leaves."""

from dataclasses import dataclass, field

from raykv.directory.arrays import KeyArray, RowArray
from raykv.directory.kernels import leases
from raykv.directory.size_classes import SizeClasses
from raykv.protocol import Call


@dataclass(slots=True)
class Hold:
    """Rows held for a client, in the order of its keys: a lease, or a reservation (`writes`)."""

    seq: int  # of the call that asked for it
    node: int  # index of the client's node, -1 if it has none
    size_class: int  # on that node
    keys: KeyArray
    source: RowArray
    gens: RowArray
    staged: RowArray
    staged_gens: RowArray
    writes: bool
    since: float = 0.0  # seconds, of the caller's clock


@dataclass(slots=True)
class Client:
    last_seen: float
    holds: dict[int, Hold] = field(default_factory=dict)  # by the id that the client has chosen
    swapped: dict[bytes, None] = field(default_factory=dict)  # keys that are pinned while it is there


class Clients(dict[int, Client]):
    """By their ids."""

    def __init__(self, size_classes: SizeClasses, ttl: float) -> None:
        """ttl: seconds without a call after which a client is gone."""
        self._size_classes, self._ttl = size_classes, ttl

    def seen(self, client: int, now: float) -> Client:
        """A client calls, maybe for the first time."""
        known = self.get(client)
        if known is None:
            known = self[client] = Client(now)
        known.last_seen = now
        return known

    def end(self, client: Client, hold: int) -> None:
        """End a lease or reservation, if the client has it."""
        if hold in client.holds:
            self._release(client.holds.pop(hold))

    def end_unlisted(self, client: Client, call: Call) -> None:
        """End what a call no longer lists, unless it was sent before that was asked for."""
        if client.holds:
            held = set(memoryview(call.held).cast("Q"))
            for i in [i for i, hold in client.holds.items() if i not in held and hold.seq < call.seq]:
                self.end(client, i)

    def disconnect(self, client: int) -> Client | None:
        """A client leaves in order: it writes nothing any more."""
        gone = self.pop(client, None)
        for hold in gone.holds.values() if gone else ():
            self._release(hold)
        return gone

    def expire(self, client: int) -> Client:
        """A client has vanished: slots that it may still write are quarantined."""
        gone, c = self.pop(client), self._size_classes.c
        for hold in gone.holds.values():
            leases.abandon(c, hold.source, hold.gens)
            leases.abandon(c, hold.staged, hold.staged_gens)
            self._release(hold)
        return gone

    def expired(self, now: float) -> list[int]:
        return [i for i, client in self.items() if now - client.last_seen > self._ttl]

    def invalidate(self) -> None:
        """Slabs were closed: nobody holds rows there."""
        for client in self.values():
            for hold in client.holds.values():
                self._size_classes.invalidate(hold.source, hold.gens)
                self._size_classes.invalidate(hold.staged, hold.staged_gens)

    def _release(self, hold: Hold) -> None:
        leases.release(self._size_classes.c, hold.source, hold.gens, hold.staged, hold.staged_gens)
