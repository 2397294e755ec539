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
from raykv.protocol import PLACE
from raykv.transports.selector import Lanes

log = logging.getLogger("raykv")
JOIN_DEADLINE_S = 30.0
Report = tuple[int, int, bytes]  # what a directory's `beat` and `adopt` take: see Sizing.report


class Home:
    """An arena, how its blocks cross nodes, and what the directory calls it."""

    def __init__(
        self,
        name: str,
        arena: Arena,
        lanes: Lanes,
        report: Callable[[], Report],
        told: Callable[[Report, int, bytes], None],
    ) -> None:
        """name: see `raykv.place.host_of`. report: of its slabs, of which `told` is what a directory said of it."""
        self.name, self.arena, self.lanes = name, arena, lanes
        self.index = -1
        self.joined = threading.Event()
        self._report, self._told = report, told

    def beat(self, directory: Any) -> bool:
        """Say that it is there, or tell a directory that does not know it what is here. Returns whether it did that.

        RayError if it does not answer; ValueError if it is not the one in charge.
        """
        if not self.joined.is_set():  # a restarted store: the directory may know what it had, but not this arena
            self._join(directory)
        report = self._report()
        answer = ray.get(directory.beat.remote(self.name, *report), timeout=2 * HEARTBEAT_S)
        if answer is None:
            self._join(directory)
            return True
        (epoch, floor, limbo), closed = answer
        if epoch < self.arena.epoch:
            raise ValueError(f"a directory of epoch {epoch} answered, {self.arena.epoch} is known")
        self._told(report, *closed)
        self.arena.raise_floor(floor)
        if limbo:
            self._sweep(directory, np.frombuffer(limbo, PLACE))
        return False

    def _join(self, directory: Any) -> None:
        arena = self.arena
        report = self._report()
        joined = directory.join.remote(self.name, arena.nonce, arena.slab_bytes, report[1], arena.epoch)
        index, epoch = ray.get(joined, timeout=JOIN_DEADLINE_S)
        if not arena.raise_epoch(epoch):  # before the inventory: grants of an older directory are void from here
            raise ValueError(f"a directory of epoch {epoch} answered, {arena.epoch} is known")
        found = arena.inventory()
        found.blocks["node"] = found.busy["node"] = index
        columns = (found.blocks, found.keys, found.positions, found.stamps, found.busy)
        adopted = directory.adopt.remote(self.name, *self._report(), *(column.tobytes() for column in columns))
        ray.get(adopted, timeout=JOIN_DEADLINE_S)
        self.index = index
        self.joined.set()

    def _sweep(self, directory: Any, places: NDArray[np.void]) -> None:
        verdicts = self.arena.sweep(places)
        keys, gens = self.arena.identify(places)
        directory.swept.remote(places.tobytes(), verdicts.tobytes(), keys.tobytes(), gens.tobytes())
