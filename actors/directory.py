"""The directory as an actor: a thin shell that adds the time."""

import gc
import os
import time
from typing import Any

import ray

from raykv import registry
from raykv.config import WRITE_SHARES
from raykv.directory.directory import Directory
from raykv.protocol import (
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
from raykv.system.jit import compile_all

Message = tuple[Any, ...]  # of raykv.protocol, as a plain tuple: Ray pickles that fastest


class DirectoryActor:
    """Where every block of a pool is. One actor, synchronous: calls are answered in the order they came."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        compile_all("raykv.directory", lambda *done: registry.put(pool, "compiled", "{} {}".format(*done).encode()))
        settings = registry.await_settings(pool)
        epoch = registry.take_epoch(pool)
        self._directory = Directory(
            epoch, settings["locality"], share=WRITE_SHARES[settings["write"]], min_hits=settings["min_hits"]
        )
        for name in registry.names(pool, "leaving"):
            self.leave(name)
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


def start_directory(pool: str, number: int, node_id: str) -> Any:
    """Start a directory near a node, or find it. Returns at once; it answers when its kernels are loaded."""
    options = registry.options(registry.directory_name(pool, number), node_id, pinned=False)
    return ray.remote(DirectoryActor).options(**options).remote(pool)
