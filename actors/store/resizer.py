"""Changes the number of slabs that a node store offers to the directory, after `raykv resize` or a restart.

The Resizer offers slabs one by one until it reaches its limit. To offer fewer slabs, it reports the new limit to the
directory. The answer names slabs that the directory no longer uses. Once nobody can still be reading these slabs, their
memory is returned to the machine.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from raykv.actors.store.demoter import Demoter
from raykv.arena.arena import Arena
from raykv.arena.superblock import layout
from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept
from raykv.config import capacity_bytes
from raykv.errors import CapacityError
from raykv.line.periodic import Pause, Periodic
from raykv.protocol.stores import SlabReport, SlabTarget
from raykv.protocol.transfers import data_deadline
from raykv.system import events, free_memory

log = logging.getLogger("raykv")
POLL_S = 0.05  # time between two checks whether the size is reached


class SavedSize(NamedTuple):
    """The size of a node after `resize`.

    It is kept in Ray's internal KV, so that a restarted store gets this size again.
    """

    pool: str
    node_id: str

    def load(self, default: float | int) -> float | int:
        """Return the `cpu_memory` of the last resize, or `default` if there was none."""
        saved = self.get()
        size: float | int = json.loads(saved) if saved else default
        return size

    def save(self, cpu_memory: float | int) -> None:
        self.restore(json.dumps(cpu_memory).encode())

    def get(self) -> bytes | None:
        """Return the saved bytes, for `restore`."""
        return internal_kv.get(self.pool, Kept.MEMORY, self.node_id)

    def restore(self, saved: bytes | None) -> None:
        """Undo a `save`. saved: the result of `get` before the `save`."""
        if saved is None:
            internal_kv.drop(self.pool, Kept.MEMORY, self.node_id)
        else:
            internal_kv.put(self.pool, Kept.MEMORY, saved, self.node_id)


class Resizer:
    """Offers slabs of an arena, and gives back slabs that the directory no longer uses, in its own thread.

    Three threads use this object. The Resizer's own thread changes the arena. The heartbeat's thread calls `report` and
    `on_directory_reply`, and a thread of the actor calls `resize`. The data that they share needs no lock: it consists
    of single values, and of dictionaries that are changed by single operations.
    """

    def __init__(
        self,
        saved_size: SavedSize,
        arena: Arena,
        limit: int,
        demoter: Demoter | None,
        withdraw: Callable[[int], None],
    ) -> None:
        """limit: number of slabs to offer. withdraw: called with a slab's number before its memory is freed."""
        self.limit = limit
        self._saved_size, self._arena, self._demoter, self._withdraw = saved_size, arena, demoter, withdraw
        self._known_slabs = 0  # number of slabs that the directory knows
        self._to_give_back: dict[int, int] = {}  # slab -> generation since which the directory does not use it
        self._grace = data_deadline(arena.slab_bytes)  # seconds for reads that began before a slab was given back
        # slab -> time to free its memory. The arena's earlier owner may have given these slabs back a moment ago.
        self._to_discard = dict.fromkeys(arena.given_back(), time.monotonic() + self._grace)
        self._full = ""  # why no more slabs can be offered; "" if more can
        self._resizing = threading.Lock()  # one `resize` at a time; guards changes of the saved size and the limit
        self._loop = Periodic("raykv-resizer", self._step, self._on_error)
        self._loop.start()

    @property
    def at_limit(self) -> bool:
        """Whether the number of slabs that the directory knows equals the limit, or the node can't have more slabs."""
        return self._known_slabs == self._arena.available == self.limit or bool(self._full)

    @property
    def _done(self) -> bool:
        """Whether the limit is reached, and the memory of slabs that were given back has been freed."""
        return self.at_limit and not self._to_give_back and not self._to_discard

    def report(self) -> SlabReport:
        """Return the report on this memory's slabs that is sent with every `heartbeat` and `adopt`."""
        promised = list(self._to_give_back)  # read first, so that no slab given back meanwhile is missed
        given_back = {*promised, *self._arena.given_back()}
        return SlabReport(self._arena.offered, self.limit, np.array(sorted(given_back), np.int32).tobytes())

    def on_directory_reply(self, report: SlabReport, target: SlabTarget) -> None:
        """Handle the directory's answer to a report. target: the slabs to give back."""
        self._known_slabs = report.offered - len(report.given_back) // 4
        if target.numbers:
            numbers = np.frombuffer(target.numbers, np.int32).tolist()
            self._to_give_back.update(dict.fromkeys(numbers, target.generation))
            self._loop.wake()

    def resize(self, cpu_memory: float | int, seconds: float) -> int:
        """Change how much memory is offered; see KVPool.resize.

        Returns the bytes offered after `seconds`, or as soon as the size is reached. Raises CapacityError or ValueError
        if the node can't have that size; then the node keeps the old size.
        """
        end = time.monotonic() + seconds
        with self._resizing:
            limit = self._slabs_of(cpu_memory)
            if limit < self.limit and self._demoter:
                self._demoter.flush((end - time.monotonic()) / 2, lasting=False)
            limit_before, saved_before = self.limit, self._saved_size.get()
            events.tell("resize", cpu_memory=cpu_memory, bytes=limit * self._arena.slab_bytes, deadline=seconds)
            self._saved_size.save(cpu_memory)
            self.limit, self._full = limit, ""
            self._loop.wake()
            while not self._full and not self._done and time.monotonic() < end:
                self._loop.sleep(POLL_S)
            if self._full:
                self._undo(limit_before, saved_before)
            size = self._arena.available * self._arena.slab_bytes
            events.tell("resized", bytes=size)
            return size

    def stop(self) -> None:
        """Stop offering slabs and giving them back."""
        self._loop.stop()

    def _slabs_of(self, cpu_memory: float | int) -> int:
        """Return how many slabs fit in a size. Raises CapacityError or ValueError if the node can't have that size."""
        arena, asked = self._arena, capacity_bytes(cpu_memory, free_memory.total_bytes())
        limit = asked // arena.slab_bytes
        if not limit:
            raise ValueError(
                f"cpu_memory={cpu_memory} is less than a slab of this pool: give {arena.slab_bytes} bytes or more"
            )
        if limit > arena.slabs:
            raise CapacityError(free_memory.refusal(asked, free_memory.free_bytes()))
        if limit > self.limit:
            free_memory.check(layout(arena.slab_bytes, limit)[2] - layout(arena.slab_bytes, arena.available)[2])
        return limit

    def _undo(self, limit: int, saved: bytes | None) -> None:
        why, self.limit = self._full, limit
        events.tell("resize_refused", why=why)
        self._saved_size.restore(saved)
        self._full = ""
        self._loop.wake()
        raise CapacityError(why)

    # ------------------------------------------------------------------ the thread

    def _step(self) -> Pause:
        return 0.0 if self._offer() or self._give_back() else self._discard()

    def _on_error(self, error: Exception) -> Pause:
        log.error("%s: resizing it: %r", self._arena.path, error, exc_info=error)
        return self._grace

    def _offer(self) -> bool:
        """Offer one more slab. Returns whether a slab was offered."""
        try:
            return self._arena.available < self.limit and not self._full and self._arena.offer_next()
        except (CapacityError, OSError) as error:  # others took the memory meanwhile; offered slabs stay
            log.warning("%s: %s", self._arena.path, error)
            self._full = str(error)
            return False

    def _give_back(self) -> bool:
        """Give back one slab.

        Returns whether a slab was due. If the slab can't be given back now, the directory will name it again.
        """
        for slab, generation in list(self._to_give_back.items()):
            if self._arena.available > self.limit:
                with self._read_guard():
                    given_back = self._arena.give_back(slab, generation)
                if given_back:
                    self._to_discard[slab] = time.monotonic() + self._grace
            del self._to_give_back[slab]
            return True
        return False

    def _discard(self) -> Pause:
        """Free the memory of slabs that nobody can still be reading. Returns the pause until more may be freed.

        A late reader, or a client that maps the arena, may cause such a slab to be allocated again. A later call frees
        that memory too.
        """
        given_back, now = self._arena.given_back(), time.monotonic()
        for slab in self._to_discard.keys() - set(given_back):  # these were offered again
            del self._to_discard[slab]
        due = [slab for slab, when in self._to_discard.items() if when <= now]
        with self._read_guard() if due else nullcontext():
            if not (self._demoter and self._demoter.external.storing):
                for slab in due:
                    self._withdraw(slab)
                    self._arena.discard(slab)
                    del self._to_discard[slab]
        if not self._to_discard:
            self._to_discard.update(dict.fromkeys(self._arena.refilled(), now + self._grace))
        pause = min(self._to_discard.values()) - now if self._to_discard else self._grace
        return max(POLL_S, pause) if given_back else None

    def _read_guard(self) -> AbstractContextManager[Any]:
        return self._demoter.read_guard if self._demoter else nullcontext()
