"""One memory of a node, its own or a GPU's: what the directory has as a node."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from raykv.arena.arena import Arena
from raykv.config import HEARTBEAT_S
from raykv.protocol import LOCATION
from raykv.transports.selector import TransportSelector

log = logging.getLogger("raykv")
JOIN_DEADLINE_S = 30.0
Report = tuple[int, int, bytes]  # what a directory's `heartbeat` and `adopt` take: see Sizing.report


class NodeMemory:
    """An arena, how its blocks cross nodes, and what the directory calls it."""

    def __init__(
        self,
        name: str,
        arena: Arena,
        lanes: TransportSelector,
        report: Callable[[], Report],
        on_directory_reply: Callable[[Report, int, bytes], None],
    ) -> None:
        """name: see `raykv.protocol.host_of`. report: of its slabs. on_directory_reply: takes the answer to it."""
        self.name, self.arena, self.lanes = name, arena, lanes
        self.index = -1
        self.joined = threading.Event()
        self._report, self._on_directory_reply = report, on_directory_reply

    def heartbeat(self, directory: Any) -> bool:
        """Say that it is there, or tell a directory that does not know it what is here. Returns whether it did that.

        RayError if it does not answer; ValueError if it is not the one in charge.
        """
        if not self.joined.is_set():  # a restarted store: the directory may know what it had, but not this arena
            self._join(directory)
        report = self._report()
        answer = ray.get(directory.heartbeat.remote(self.name, *report), timeout=2 * HEARTBEAT_S)
        if answer is None:
            self._join(directory)
            return True
        (epoch, floor, quarantined), closed = answer
        if epoch < self.arena.epoch:
            raise ValueError(f"a directory of epoch {epoch} answered, {self.arena.epoch} is known")
        self._on_directory_reply(report, *closed)
        self.arena.raise_floor(floor)
        if quarantined:
            self._sweep(directory, np.frombuffer(quarantined, LOCATION))
        return False

    def _join(self, directory: Any) -> None:
        arena = self.arena
        report = self._report()
        joined = directory.join.remote(self.name, arena.nonce, arena.slab_bytes, report[1], arena.epoch)
        index, epoch = ray.get(joined, timeout=JOIN_DEADLINE_S)
        if not arena.raise_epoch(epoch):  # before the inventory: grants of an older directory are void from here
            raise ValueError(f"a directory of epoch {epoch} answered, {arena.epoch} is known")
        found = arena.inventory()
        found.ready["node"] = found.writing["node"] = index
        columns = (found.ready, found.keys, found.positions, found.stamps, found.writing)
        adopted = directory.adopt.remote(self.name, *self._report(), *(column.tobytes() for column in columns))
        ray.get(adopted, timeout=JOIN_DEADLINE_S)
        self.index = index
        self.joined.set()

    def _sweep(self, directory: Any, locations: NDArray[np.void]) -> None:
        verdicts = self.arena.sweep(locations)
        keys, gens = self.arena.identify(locations)
        directory.sweep_result.remote(locations.tobytes(), verdicts.tobytes(), keys.tobytes(), gens.tobytes())
