"""How much memory a node store offers: as many slabs as it is to have, whatever that is changed to."""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from raykv import registry
from raykv.actors.demoter import Demoter
from raykv.arena.arena import Arena
from raykv.arena.superblock import layout
from raykv.config import capacity_bytes
from raykv.errors import CapacityError
from raykv.protocol import data_deadline
from raykv.system import free_memory

log = logging.getLogger("raykv")
LOOK_S = 0.05  # between looks whether the size is reached


def size_of(pool: str, node_id: str, cpu_memory: float | int) -> float | int:
    """What a node was resized to last, if it was, else `cpu_memory`."""
    asked = registry.get(pool, f"memory/{node_id}")
    size: float | int = json.loads(asked) if asked else cpu_memory
    return size


class Resizer:
    """Offers slabs of an arena, and gives back those that the directory no longer uses: one thread, which may wait."""

    def __init__(
        self,
        pool: str,
        node_id: str,
        arena: Arena,
        limit: int,
        demoter: Demoter | None,
        withdraw: Callable[[int], None],
    ) -> None:
        """withdraw: told of a slab whose memory is about to go."""
        self.limit = limit  # slabs that there are to be
        self._pool, self._node_id, self._arena, self._demoter = pool, node_id, arena, demoter
        self._withdraw = withdraw
        self._known_slabs = 0  # slabs that the directory knows of
        self._closed: dict[int, int] = {}  # slabs that are to be given back, and of which generation
        self._grace = data_deadline(arena.slab_bytes)  # for the longest read that began before a slab was given back
        # Slabs whose memory goes, and when. Of those found here its last owner may have given back some just now.
        self._going = dict.fromkeys(arena.given_back(), time.monotonic() + self._grace)
        self._full = ""  # why there can't be more
        self._turn = threading.Lock()
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raykv-size", daemon=True)
        self._thread.start()

    @property
    def settled(self) -> bool:
        """Whether there are as many slabs as there are to be, or can be, and the directory knows."""
        return self._known_slabs == self._arena.available == self.limit or bool(self._full)

    @property
    def _done(self) -> bool:
        """Whether it is settled, and the machine has what was given back."""
        return self.settled and not self._closed and not self._going

    def report(self) -> tuple[int, int, bytes]:
        """What a directory's `heartbeat` and `adopt` take: slabs offered so far, to be had, and (int32) given back."""
        closed = list(self._closed)  # first: what is given back meanwhile is in both
        gone = {*closed, *self._arena.given_back()}
        return self._arena.offered, self.limit, np.array(sorted(gone), np.int32).tobytes()

    def on_directory_reply(self, report: tuple[int, int, bytes], generation: int, numbers: bytes) -> None:
        """A directory answered a report: slabs that it does not use from a generation on."""
        self._known_slabs = report[0] - len(report[2]) // 4
        if numbers:
            self._closed.update(dict.fromkeys(np.frombuffer(numbers, np.int32).tolist(), generation))
            self._changed.set()

    def resize(self, cpu_memory: float | int, seconds: float) -> int:
        """See KVPool.resize. Returns the bytes that there are after so many seconds, or as soon as that is done."""
        end = time.monotonic() + seconds
        with self._turn:
            if self._slabs(cpu_memory) < self.limit and self._demoter:
                self._demoter.flush((end - time.monotonic()) / 2, lasting=False)
            before, asked = self.limit, registry.get(self._pool, f"memory/{self._node_id}")
            limit = self._slabs(cpu_memory)
            registry.put(self._pool, f"memory/{self._node_id}", json.dumps(cpu_memory).encode())
            self.limit, self._full = limit, ""
            self._changed.set()
            while not self._full and not self._done and time.monotonic() < end:
                self._stopped.wait(LOOK_S)
            if self._full:
                self._undo(before, asked)
            return self._arena.available * self._arena.slab_bytes

    def stop(self) -> None:
        self._stopped.set()
        self._changed.set()

    def _slabs(self, cpu_memory: float | int) -> int:
        """CapacityError or ValueError where the node can't have that."""
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

    def _undo(self, limit: int, asked: bytes | None) -> None:
        why, self.limit = self._full, limit
        if asked is None:
            registry.drop(self._pool, f"memory/{self._node_id}")
        else:
            registry.put(self._pool, f"memory/{self._node_id}", asked)
        self._full = ""
        self._changed.set()
        raise CapacityError(why)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        pause: float | None
        while not self._stopped.is_set():
            self._changed.clear()
            try:
                pause = 0.0 if self._offer() or self._give_back() else self._discard()
            except Exception:  # a thread that ends would leave the size as it is for good
                log.exception("%s: its size", self._arena.path)
                pause = self._grace
            self._changed.wait(pause)

    def _offer(self) -> bool:
        try:
            return self._arena.available < self.limit and not self._full and self._arena.offer_next()
        except (CapacityError, OSError) as error:  # somebody else took the room meanwhile: what is offered stays
            log.warning("%s: %s", self._arena.path, error)
            self._full = str(error)
            return False

    def _give_back(self) -> bool:
        """One slab. Returns whether there was one: what can't be given back now is closed by the directory again."""
        for slab, generation in list(self._closed.items()):
            if self._arena.available > self.limit:
                with self._read_guard():
                    given_back = self._arena.give_back(slab, generation)
                if given_back:
                    self._going[slab] = time.monotonic() + self._grace
            del self._closed[slab]
            return True
        return False

    def _discard(self) -> float | None:
        """What nobody can be reading any more. Returns in how many seconds there is to be another look, if any.

        Who reads, or maps, a slab so late that it is gone fills it anew: that goes, too.
        """
        back, now = self._arena.given_back(), time.monotonic()
        for slab in self._going.keys() - set(back):  # offered again
            del self._going[slab]
        due = [slab for slab, when in self._going.items() if when <= now]
        with self._read_guard() if due else nullcontext():
            if not (self._demoter and self._demoter.external.storing):
                for slab in due:
                    self._withdraw(slab)
                    self._arena.discard(slab)
                    del self._going[slab]
        if not self._going:
            self._going.update(dict.fromkeys(self._arena.refilled(), now + self._grace))
        pause = min(self._going.values()) - now if self._going else self._grace
        return max(LOOK_S, pause) if back else None

    def _read_guard(self) -> AbstractContextManager[Any]:
        return self._demoter.read_guard if self._demoter else nullcontext()
