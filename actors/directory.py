"""The directory as an actor: a thin shell that adds the time."""

import gc
import os
import time
from typing import Any

import raykv.directory.directory
from raykv import registry
from raykv.protocol import Call

News = tuple[int, int, bytes, bytes, bytes]  # a Call
Answer = tuple[Any, ...]


class Directory:
    """Where every block of a pool is. One actor, synchronous: calls are answered in the order they came."""

    def __init__(self, pool: str, locality: float, share: float, min_hits: int) -> None:
        self._pool = pool
        epoch = registry.take_epoch(pool)
        self._directory = raykv.directory.directory.Directory(epoch, locality, share=share, min_hits=min_hits)
        for name in registry.names(pool, "leaving"):
            self.leave(name)
        gc.freeze()  # a collection that walks all of numba would hold up every caller

    def __repr__(self) -> str:
        return f"Directory(pool={self._pool})"

    def ping(self) -> int:
        return os.getpid()

    def match(self, call: News, lease: int, node: str, keys: bytes, block_bytes: int) -> Answer:
        return tuple(self._directory.match(Call(*call), lease, node, keys, block_bytes, time.monotonic()))

    def next_window(self, call: News, lease: int, start: int, block_bytes: int) -> Answer:
        return tuple(self._directory.next_window(Call(*call), lease, start, block_bytes, time.monotonic()))

    def locate_prefix(self, keys: bytes) -> dict[str, int]:
        return self._directory.locate_prefix(keys)

    def reserve(self, call: News, reservation: int, node: str, keys: bytes, start: int, block_bytes: int) -> Answer:
        return tuple(
            self._directory.reserve(Call(*call), reservation, node, keys, start, block_bytes, time.monotonic())
        )

    def commit(self, call: News, reservation: int, locations: bytes, keys: bytes, written: bytes) -> tuple[int, int]:
        return self._directory.commit(Call(*call), reservation, locations, keys, written, time.monotonic())

    def pin(self, call: News, keys: bytes) -> tuple[int, int]:
        return self._directory.pin(Call(*call), keys, time.monotonic())

    def unpin(self, call: News, keys: bytes) -> int:
        return self._directory.unpin(Call(*call), keys, time.monotonic())

    def forget(self, call: News, keys: bytes) -> int:
        return self._directory.forget(Call(*call), keys, time.monotonic())

    def preempted(self, call: News, keys: bytes) -> tuple[int, int]:
        return self._directory.preempted(Call(*call), keys, time.monotonic())

    def client_heartbeat(self, call: News) -> int:
        return self._directory.client_heartbeat(Call(*call), time.monotonic())

    def disconnect(self, client: int) -> None:
        self._directory.disconnect(client, time.monotonic())

    def join(self, name: str, nonce: bytes, slab_bytes: int, slab_count: int, epoch: int) -> tuple[int, int]:
        before = self._directory.epoch
        answer = self._directory.join(name, nonce, slab_bytes, slab_count, epoch, time.monotonic())
        if answer[1] != before:  # the arena knew of later directories than Ray did
            registry.take_epoch(self._pool, answer[1])
        return answer

    def adopt(
        self,
        name: str,
        offered: int,
        limit: int,
        given_back: bytes,
        locations: bytes,
        keys: bytes,
        positions: bytes,
        stamps: bytes,
        busy: bytes,
    ) -> None:
        self._directory.set_slab_target(name, limit, given_back, time.monotonic())
        self._directory.adopt(name, locations, keys, positions, stamps, busy, time.monotonic(), offered)

    def heartbeat(
        self, name: str, offered: int, limit: int, given_back: bytes
    ) -> tuple[tuple[int, int, bytes], tuple[int, bytes]] | None:
        """Answers of `heartbeat` and `set_slab_target`."""
        fitting = self._directory.set_slab_target(name, limit, given_back, time.monotonic())
        answer = self._directory.heartbeat(name, offered, time.monotonic())
        return answer and (answer, fitting)

    def sweep_result(self, locations: bytes, verdicts: bytes, keys: bytes, gens: bytes) -> None:
        self._directory.sweep_result(locations, verdicts, keys, gens, time.monotonic())

    def leave(self, name: str) -> None:
        self._directory.leave(name, time.monotonic())

    def sole_copies(self, name: str) -> tuple[bytes, bytes, int] | None:
        return self._directory.sole_copies(name, time.monotonic())

    def remove_node(self, name: str) -> int:
        return self._directory.remove_node(name, time.monotonic())

    def tier_heartbeat(
        self, name: str, capacity: int, shared: bool, reached: bool, lost: bytes
    ) -> tuple[int, bool] | None:
        return self._directory.tier_heartbeat(name, capacity, shared, reached, lost, time.monotonic())

    def report_existing(self, name: str, keys: bytes, sizes: bytes, last: bool) -> None:
        self._directory.report_existing(name, keys, sizes, last, time.monotonic())

    def demote(self, name: str, locations: bytes, keys: bytes, stored: bytes, seen: int, whole: bool) -> Answer:
        return tuple(self._directory.demote(name, locations, keys, stored, seen, whole, time.monotonic()))

    def demote_gpu(self, name: str, locations: bytes, stored: bytes) -> Answer:
        return tuple(self._directory.demote_gpu(name, locations, stored, time.monotonic()))

    def nodes(self) -> dict[int, str]:
        """Ray node ids by the index that places carry, of nodes and of their own tiers."""
        return self._directory.indices()

    def clear(self) -> tuple[int, int]:
        """(generation up to which all is forgotten, keys there were)."""
        keys = self._directory.clear(time.monotonic())
        return self._directory.floor, keys

    def stats(self) -> dict[str, Any]:
        return self._directory.stats(time.monotonic())
