"""The directory as an actor: a thin shell that adds the time."""

import gc
import os
import time
from typing import Any

import raykv.directory.directory
from raykv import registry
from raykv.protocol import (
    KEY_BYTES,
    LOCATION,
    ArenaDescription,
    Call,
    CommitRequest,
    DemotionReport,
    ExistingBlocks,
    GpuDemotionReport,
    Inventory,
    MatchRequest,
    NextWindowRequest,
    ReserveRequest,
    SlabReport,
    SweepResult,
    TierReport,
)

Message = tuple[Any, ...]  # of raykv.protocol, as a plain tuple: Ray pickles that fastest


class Directory:
    """Where every block of a pool is. One actor, synchronous: calls are answered in the order they came."""

    def __init__(self, pool: str, locality: float, share: float, min_hits: int) -> None:
        self._pool = pool
        epoch = registry.take_epoch(pool)
        self._directory = raykv.directory.directory.Directory(epoch, locality, share=share, min_hits=min_hits)
        for name in registry.names(pool, "leaving"):
            self.leave(name)
        _warm_up()
        gc.freeze()  # a collection that walks all of numba would hold up every caller

    def __repr__(self) -> str:
        return f"Directory(pool={self._pool})"

    def ping(self) -> int:
        return os.getpid()

    def match(self, call: Message, request: Message) -> Message:
        return tuple(self._directory.match(Call(*call), MatchRequest(*request), time.monotonic()))

    def next_window(self, call: Message, request: Message) -> Message:
        return tuple(self._directory.next_window(Call(*call), NextWindowRequest(*request), time.monotonic()))

    def locate_prefix(self, keys: bytes) -> dict[str, int]:
        return self._directory.locate_prefix(keys)

    def reserve(self, call: Message, request: Message) -> Message:
        return tuple(self._directory.reserve(Call(*call), ReserveRequest(*request), time.monotonic()))

    def commit(self, call: Message, request: Message) -> Message:
        return tuple(self._directory.commit(Call(*call), CommitRequest(*request), time.monotonic()))

    def pin(self, call: Message, keys: bytes) -> Message:
        return tuple(self._directory.pin(Call(*call), keys, time.monotonic()))

    def unpin(self, call: Message, keys: bytes) -> Message:
        return tuple(self._directory.unpin(Call(*call), keys, time.monotonic()))

    def forget(self, call: Message, keys: bytes) -> Message:
        return tuple(self._directory.forget(Call(*call), keys, time.monotonic()))

    def preempted(self, call: Message, keys: bytes) -> Message:
        return tuple(self._directory.preempted(Call(*call), keys, time.monotonic()))

    def client_heartbeat(self, call: Message) -> Message:
        return tuple(self._directory.client_heartbeat(Call(*call), time.monotonic()))

    def disconnect(self, client: int) -> None:
        self._directory.disconnect(client, time.monotonic())

    def join(self, name: str, arena: Message) -> Message:
        before = self._directory.epoch
        joined = self._directory.join(name, ArenaDescription(*arena), time.monotonic())
        if joined.epoch != before:  # the arena knew of later directories than Ray did
            registry.take_epoch(self._pool, joined.epoch)
        return tuple(joined)

    def adopt(self, name: str, report: Message, found: Message) -> None:
        slabs = SlabReport(*report)
        self._directory.set_slab_target(name, slabs, time.monotonic())
        self._directory.adopt(name, Inventory(*found), time.monotonic(), slabs.offered)

    def heartbeat(self, name: str, report: Message) -> tuple[Message, Message] | None:
        """A Heartbeat and a SlabTarget; None where the node must `join` again."""
        slabs = SlabReport(*report)
        target = self._directory.set_slab_target(name, slabs, time.monotonic())
        answer = self._directory.heartbeat(name, slabs.offered, time.monotonic())
        return None if answer is None else (tuple(answer), tuple(target))

    def sweep_result(self, result: Message) -> None:
        self._directory.sweep_result(SweepResult(*result), time.monotonic())

    def leave(self, name: str) -> None:
        self._directory.leave(name, time.monotonic())

    def sole_copies(self, name: str) -> Message | None:
        answer = self._directory.sole_copies(name, time.monotonic())
        return None if answer is None else tuple(answer)

    def remove_node(self, name: str) -> int:
        return self._directory.remove_node(name, time.monotonic())

    def tier_heartbeat(self, name: str, report: Message) -> Message | None:
        reply = self._directory.tier_heartbeat(name, TierReport(*report), time.monotonic())
        return None if reply is None else tuple(reply)

    def report_existing(self, name: str, existing: Message) -> None:
        self._directory.report_existing(name, ExistingBlocks(*existing), time.monotonic())

    def demote(self, name: str, report: Message) -> Message:
        return tuple(self._directory.demote(name, DemotionReport(*report), time.monotonic()))

    def demote_gpu(self, name: str, report: Message) -> Message:
        return tuple(self._directory.demote_gpu(name, GpuDemotionReport(*report), time.monotonic()))

    def nodes(self) -> dict[int, str]:
        """Ray node ids by the index that locations carry, of nodes and of their own tiers."""
        return self._directory.indices()

    def clear(self) -> tuple[int, int]:
        """(generation up to which all blocks are forgotten, how many keys there were)."""
        keys = self._directory.clear(time.monotonic())
        return self._directory.floor, keys

    def stats(self) -> dict[str, Any]:
        return self._directory.stats(time.monotonic())


def _warm_up() -> None:
    """Compile, or load, every kernel before the first caller waits for it."""
    directory = raykv.directory.directory.Directory()
    held = (1).to_bytes(8, "little")
    first, second, third = bytes(range(64)), bytes(range(1, 65)), bytes(range(2, 66))
    for name in ("a", "b"):
        directory.join(name, ArenaDescription(name.encode(), 1 << 20, 1, 0), 0.0)
        directory.adopt(name, Inventory(b"", b"", b"", b"", b""), 0.0)
        directory.heartbeat(name, 1, 0.0)
    granted = directory.reserve(Call(1, 1), ReserveRequest(1, "a", first, 0, 4096), 0.0)
    directory.commit(Call(1, 2, held), CommitRequest(1, granted.locations, first, b"\1\1\1\0"), 0.0)
    directory.match(Call(1, 3), MatchRequest(2, "a", first, 4096), 0.0)
    directory.locate_prefix(first)
    remote = directory.match(Call(1, 4), MatchRequest(3, "b", first, 4096), 0.0)
    call = Call(1, 5, (3).to_bytes(8, "little"), pulled=remote.staged)
    directory.next_window(call, NextWindowRequest(3, 1, 4096), 0.0)
    directory.client_heartbeat(Call(1, 6, corrupt=granted.locations[: LOCATION.itemsize]), 0.0)
    directory.reserve(Call(2, 1), ReserveRequest(1, "a", second, 0, 4096), 0.0)
    directory.reserve(Call(3, 1), ReserveRequest(1, "a", first, 0, 8192), 0.0)  # another size
    heartbeat = directory.heartbeat("a", 1, 1e6)  # that client is gone by now
    if heartbeat is not None:
        n = len(heartbeat.sweep) // LOCATION.itemsize
        directory.sweep_result(SweepResult(heartbeat.sweep, bytes(n), bytes(16 * n), bytes(8 * n)), 1e6)
    directory.tier_heartbeat("a", TierReport(1 << 20, False, True, b""), 1e6)
    directory.report_existing("a", ExistingBlocks(first[:16], (4096).to_bytes(8, "little"), True), 1e6)
    granted = directory.reserve(Call(4, 1), ReserveRequest(1, "a", third, 0, 4096), 1e6)
    directory.commit(Call(4, 2, held), CommitRequest(1, granted.locations, third, b"\1" * 4), 1e6)
    demoted = directory.demote("a", DemotionReport(b"", b"", b"", 0, True), 1e6)
    failed = bytes(len(demoted.keys) // KEY_BYTES)
    directory.demote("a", DemotionReport(demoted.target, demoted.keys, failed, 0, True), 1e6)
    directory.leave("a", 1e6)
    directory.sole_copies("a", 1e6)
    directory.heartbeat("b", 1, 1e6)
    leased = directory.match(Call(5, 1), MatchRequest(1, "b", third, 4096), 1e6)
    directory.client_heartbeat(Call(5, 2, held, pulled=leased.staged), 1e6)
    directory.pin(Call(4, 3), first, 1e6)
    directory.unpin(Call(4, 4), first, 1e6)
    directory.forget(Call(4, 5), first, 1e6)
    for limit in (0, 1):  # a slab that is to go, in which something is held, and is to stay after all
        directory.set_slab_target("a", SlabReport(1, limit, b""), 1e6)
    directory.clear(1e6)
    directory.stats(1e6)
    directory.remove_node("b", 1e6)
