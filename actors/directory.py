"""The directory as an actor: a thin shell that adds the time."""

import gc
import os
import time
from typing import Any

import raykv.directory.directory
from raykv import registry
from raykv.protocol import LOCATION, Call

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
        _warm_up()
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


def _warm_up() -> None:
    """Compile, or load, every kernel before the first caller waits for it."""
    directory = raykv.directory.directory.Directory()
    for name in ("a", "b"):
        directory.join(name, name.encode(), 1 << 20, 1, 0, 0.0)
        directory.adopt(name, b"", b"", b"", b"", b"", 0.0)
        directory.heartbeat(name, 1, 0.0)
    keys = bytes(range(64))
    granted = directory.reserve(Call(1, 1), 1, "a", keys, 0, 4096, 0.0)
    directory.commit(Call(1, 2, (1).to_bytes(8, "little")), 1, granted.locations, keys, b"\1\1\1\0", 0.0)
    directory.match(Call(1, 3), 2, "a", keys, 4096, 0.0)
    directory.locate_prefix(keys)
    remote = directory.match(Call(1, 4), 3, "b", keys, 4096, 0.0)
    directory.next_window(Call(1, 5, (3).to_bytes(8, "little"), pulled=remote.staged), 3, 1, 4096, 0.0)
    directory.client_heartbeat(Call(1, 6, corrupt=granted.locations[: LOCATION.itemsize]), 0.0)
    directory.reserve(Call(2, 1), 1, "a", bytes(range(1, 65)), 0, 4096, 0.0)
    directory.reserve(Call(3, 1), 1, "a", keys, 0, 8192, 0.0)  # another size
    quarantined = directory.heartbeat("a", 1, 1e6)  # that client is gone by now
    if quarantined is not None:
        n = len(quarantined[2]) // LOCATION.itemsize
        directory.sweep_result(quarantined[2], bytes(n), bytes(16 * n), bytes(8 * n), 1e6)
    directory.tier_heartbeat("a", 1 << 20, False, True, b"", 1e6)
    directory.report_existing("a", keys[:16], (4096).to_bytes(8, "little"), True, 1e6)
    granted = directory.reserve(Call(4, 1), 1, "a", bytes(range(2, 66)), 0, 4096, 1e6)
    directory.commit(Call(4, 2, (1).to_bytes(8, "little")), 1, granted.locations, bytes(range(2, 66)), b"\1" * 4, 1e6)
    demoted = directory.demote("a", b"", b"", b"", 0, True, 1e6)
    directory.demote("a", demoted.target, demoted.keys, bytes(len(demoted.keys) // 16), 0, True, 1e6)
    directory.leave("a", 1e6)
    directory.sole_copies("a", 1e6)
    directory.heartbeat("b", 1, 1e6)
    taken = directory.match(Call(5, 1), 1, "b", bytes(range(2, 66)), 4096, 1e6)
    directory.client_heartbeat(Call(5, 2, (1).to_bytes(8, "little"), pulled=taken.staged), 1e6)
    directory.pin(Call(4, 3), keys, 1e6)
    directory.unpin(Call(4, 4), keys, 1e6)
    directory.forget(Call(4, 5), keys, 1e6)
    for limit in (0, 1):  # a slab that is to go, in which something is held, and is to stay after all
        directory.set_slab_target("a", limit, b"", 1e6)
    directory.clear(1e6)
    directory.stats(1e6)
    directory.remove_node("b", 1e6)
