"""Records which slabs of a mapping are page-locked, so that GPUs can reach them."""

import logging
from collections import Counter
from collections.abc import Callable

from raykv.arena.gpu import cuda, host_copy
from raykv.arena.gpu.device import device
from raykv.errors import DeviceError

log = logging.getLogger("raykv")


class PageLocks:
    """Page-locks of one mapping of an arena's file.

    The arena's lock guards all methods except `lock`, which takes 0.04 s per GiB.
    """

    def __init__(self, first: int, slab_bytes: int) -> None:
        """first: address of slab 0."""
        self._first, self._slab_bytes = first, slab_bytes
        self.gpus: dict[int, str | None] = {}  # by slab: the first GPU that needed the slab; None if CUDA refused
        self._versions: dict[int, int] = {}  # by slab: the version that was page-locked
        self._locking: set[int] = set()  # slabs that a thread is locking now
        self._users = Counter[int]()  # by slab: number of running copies by GPUs

    def begin(self, slabs: set[int]) -> set[int]:
        """Return the slabs that the caller must lock.

        Returns an empty set if another thread is locking one of `slabs`, as the caller must not wait for that thread.
        """
        missing = slabs - self.gpus.keys()
        if missing & self._locking:
            return set()
        self._locking |= missing
        return missing

    def lock(self, gpu: str, slab: int, version: int) -> None:
        """Page-lock a slab. version: the slab's present version. Notes a refusal, unless a later call may succeed."""
        try:
            device(gpu).register(self._first + slab * self._slab_bytes, self._slab_bytes)
        except DeviceError as error:
            if error.status in cuda.CAPTURED:
                return
            log.warning(
                "%d bytes of host memory can't be page-locked, copies go through a bounce buffer: %s",
                self._slab_bytes,
                error,
            )
            self.gpus[slab] = None
        else:
            self._versions[slab] = version
            self.gpus[slab] = gpu

    def end(self, missing: set[int]) -> None:
        """Call this after `begin` and `lock`, even if some of the slabs could not be locked."""
        self._locking -= missing

    def is_busy(self, slab: int) -> bool:
        """Whether a thread is locking the slab, or a GPU copies from or to it."""
        return slab in self._locking or self._users[slab] > 0

    def reach(self, slabs: set[int]) -> bool:
        """Whether GPUs can reach all these slabs."""
        return all(self.gpus.get(slab) for slab in slabs)

    def use(self, slabs: set[int]) -> None:
        """Note that a GPU's copy from or to these slabs begins."""
        self._users.update(slabs)

    def leave(self, slabs: set[int]) -> None:
        """Note that a GPU's copy from or to these slabs has ended."""
        self._users.subtract(slabs)

    def unlock_changed(self, version: Callable[[int], int]) -> bool:
        """Unlock the slabs whose pages may have been discarded.

        Does nothing and returns False while any slab is being locked, or while a GPU copies from or to a changed slab.
        version: returns a slab's current version, or -1 if the slab was given back.
        """
        if self._locking:  # `lock` changes `gpus` and `_versions` without a lock
            return False
        changed = [slab for slab in self.gpus if not 0 <= self._versions.get(slab, -1) == version(slab)]
        if any(self._users[slab] for slab in changed):
            return False
        for slab in changed:
            self.unlock(slab)
        return True

    def unlock(self, slab: int) -> None:
        """Unlock a slab before its pages are freed. Does nothing if the slab is not page-locked."""
        if slab in self.gpus:
            host_copy.unregister(self._first, self._slab_bytes, {slab: self.gpus.pop(slab)})
            self._versions.pop(slab, None)
