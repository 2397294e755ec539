"""An arena's file in this process's memory: its slabs, and the pages behind them.

The owner offers slabs one after the other. It allocates and faults in a slab's pages before anybody may use the slab.
When the pool shrinks, a slab is given back, and its pages are discarded later. Every process fills its own page tables
for the slabs that it uses, and registers slabs with CUDA if a GPU must reach them. `raykv.arena.arena` reads and writes
the blocks.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from raykv.arena import files, header, superblock
from raykv.arena.files import ArenaFile
from raykv.arena.gpu import cuda, host_copy
from raykv.arena.page_locks import PageLocks
from raykv.errors import CapacityError
from raykv.protocol.location import ALIGN, EPOCHS, GENERATIONS, epoch_of
from raykv.system.file_locks import SlotLocks

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]
_MADV_REMOVE, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 9, 14, 23
_madvise = ctypes.CDLL(None).madvise  # mmap.madvise would keep the GIL while a slab is faulted in
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """The slabs of an arena. Thread-safe. Methods marked "Owner" are only for the process that owns the file.

    path: the file's path. nonce: 16 bytes that no other arena has. slab_bytes, slabs: the arena's geometry.
    """

    def __init__(self, file: ArenaFile) -> None:
        """Take ownership of the file's descriptor."""
        words = file.first_page
        self.path = file.path
        self.nonce = superblock.nonce_of(words)
        self.slab_bytes, self.slabs = int(words[header.SLAB_BYTES]), int(words[header.SLABS])
        layout = superblock.layout(self.slab_bytes, self.slabs)
        self._shape = (self.slab_bytes, layout.headers // 8, layout.payload, self.slabs)
        self._size = layout.size
        # Guards changes of `_memory`, and the owner's changes of epoch and floor. May be taken under `_slab_lock`.
        self._mutex = threading.Lock()
        # Guards which slabs are offered, given back, discarded and registered. Held while the owner faults in a slab.
        self._slab_lock = threading.Lock()
        self._map(file.fd)
        self._locks = SlotLocks(file.fd, layout.headers, 8 * header.HEADER_WORDS)

    def _map(self, fd: int) -> None:
        data = np.frombuffer(_mmap(fd, self._size), np.uint8)
        self._memory = data[: self._shape[2]].view(np.int64), data  # one assignment: readers never mix two mappings
        self._populated: set[int] = set()
        self._discards = header.load(self._memory[0], header.DISCARDS)
        first = data.ctypes.data + self._shape[2]
        self._page_locks = PageLocks(first, self.slab_bytes)
        cuda.when_gone(data, host_copy.unregister, first, self.slab_bytes, self._page_locks.gpus)

    @property
    def door(self) -> str:
        """Owner: the path by which other processes open the file; in /proc if somebody removed the file's name."""
        return self.path if self.has_name else f"/proc/{os.getpid()}/fd/{self._locks.fd}"

    @property
    def has_name(self) -> bool:
        """Owner: whether the file is still at its path; somebody may have removed it. True after `close`."""
        return self._locks.fd < 0 or files.has_name(self.path, self._locks.fd)

    @property
    def lost(self) -> bool:
        """Whether the owner is dead and no store can adopt the arena, since somebody removed the file."""
        return not self._locks.named and not self._locks.owned_elsewhere(ALIGN)

    @property
    def incarnation(self) -> int:
        """How many owners the arena has had."""
        return header.load(self._memory[0], header.INCARNATION)

    @property
    def offered(self) -> int:
        """How many slabs have been offered. Some of them may have been given back since then: see `available`."""
        return max(0, min(header.load(self._memory[0], header.OFFERED), self.slabs))

    @property
    def available(self) -> int:
        """How many slabs may be used."""
        return self.offered - len(self.given_back())

    def given_back(self) -> list[int]:
        """Return the numbers of slabs that were given back: their memory was discarded, or will be."""
        words, _ = self._memory
        strides = words[header.TABLE + 1 :][: 2 * self.offered : 2]
        found: list[int] = np.flatnonzero(strides == header.GIVEN_BACK).tolist()
        return found

    @property
    def epoch(self) -> int:
        """The newest directory epoch that this arena knows. Grants of an older epoch are refused."""
        return header.load(self._memory[0], header.EPOCH)

    def raise_epoch(self, epoch: int) -> bool:
        """Owner: refuse grants older than `epoch` from now on. Returns False if the arena knows a newer epoch.

        Raises ValueError for an impossible epoch.
        """
        if not 0 <= epoch < EPOCHS:
            raise ValueError(f"epoch {epoch}: there are less than {EPOCHS}")
        with self._mutex:
            if epoch < self.epoch:
                return False
            header.store(self._memory[0], header.EPOCH, epoch)
            return True

    def raise_floor(self, generation: int) -> None:
        """Owner: leave blocks of this and older generations out of `Arena.inventory`, because they were cleared.

        Raises ValueError for an impossible generation.
        """
        if not 0 <= generation < GENERATIONS:
            raise ValueError(f"generation {generation}: there are less than {GENERATIONS}")
        with self._mutex:
            words, _ = self._memory
            header.store(words, header.FLOOR, max(generation, header.load(words, header.FLOOR)))

    def region(self, slab: int) -> tuple[int, int]:
        """Return a slab's address in this process's memory, and its size. Raises ValueError for an unknown slab."""
        if not 0 <= slab < self.slabs:
            raise ValueError(f"{self.path} has no slab {slab}, but {self.slabs}")
        start, length = self._payload(slab)
        return self._memory[1].ctypes.data + start, length

    # ------------------------------------------------------------------ the owner changes the size

    def offer_next(self) -> bool:
        """Owner: allocate, fault in and offer one more slab. Slabs that were given back are offered first.

        Returns False if all slabs are offered. Raises CapacityError if there is no room.
        """
        with self._slab_lock:
            words, data = self._memory
            back = self.given_back()
            slab = back[0] if back else self.offered
            if slab >= self.slabs or self._locks.fd < 0:
                return False
            _advise(data, *self._payload(slab), _MADV_HUGEPAGE)
            self._populate(data, {slab})  # before posix_fallocate: only page faults get huge pages
            try:
                os.posix_fallocate(self._locks.fd, *self._payload(slab))
                os.posix_fallocate(self._locks.fd, *self._headers(slab))
            except OSError as error:
                self._discard(slab)
                if error.errno != errno.ENOSPC:
                    raise
                raise CapacityError(
                    f"{self.path}: asked for slab {slab + 1} of {self.slabs}, {self.slab_bytes} bytes, but the file "
                    f"system is full: lower cpu_memory or Ray's object_store_memory, or enlarge it"
                ) from error
            if back:
                header.store(words, header.TABLE + 2 * slab + 1, 0)
            else:
                header.store(words, header.OFFERED, slab + 1)
            return True

    def give_back(self, slab: int, generation: int) -> bool:
        """Owner: forget a slab's blocks, so that its memory can be freed. Refuse grants of this and older generations.

        Returns False if somebody is writing to the slab, if the generation comes from a past epoch, or if it is not
        newer than the slab's generation. The memory stays until `discard`, as readers that have checked the headers may
        still be copying.
        """
        with self._slab_lock:
            words, _ = self._memory
            first, entry = slab * (self.slab_bytes // ALIGN), header.TABLE + 2 * slab
            if not 0 <= slab < self.offered or not 0 <= generation < GENERATIONS:
                return False
            with self._mutex, self._locks.locked_range(first, first + self.slab_bytes // ALIGN) as locked:
                newer = header.load(words, entry) < generation and self.epoch <= epoch_of(generation)
                if not locked or not newer:
                    return False
                header.reformat(words, self._shape, slab, generation, header.GIVEN_BACK)
            return True

    def discard(self, slab: int) -> None:
        """Owner: free the pages of a slab that was given back, unless it was offered again."""
        with self._slab_lock:
            if slab in self.given_back() and not self._page_locks.is_busy(slab):
                self._discard(slab)

    def refilled(self) -> list[int]:
        """Return the given-back slabs that have pages: not yet discarded, or allocated again by a late reader."""
        return [
            slab
            for slab in self.given_back()
            if any(self._has_data(*region) for region in (self._payload(slab), self._headers(slab)))
        ]

    def _has_data(self, start: int, length: int) -> bool:
        try:
            return os.lseek(self._locks.fd, start, os.SEEK_DATA) < start + length
        except OSError:  # there is no data up to the file's end
            return False

    def _discard(self, slab: int) -> None:
        self._populated.discard(slab)
        self._page_locks.unlock(slab)
        for region in (self._payload(slab), self._headers(slab)):
            _advise(self._memory[1], *region, _MADV_REMOVE)
        self._tell_discard()

    def _tell_discard(self) -> None:
        """Owner: after pages were discarded, tell processes that may have page-locked these pages."""
        self._discards += 1
        header.store(self._memory[0], header.DISCARDS, self._discards)

    def _payload(self, slab: int) -> tuple[int, int]:
        """Return the offset of a slab's slots in the file, and their size in bytes."""
        return self._shape[2] + slab * self.slab_bytes, self.slab_bytes

    def _headers(self, slab: int) -> tuple[int, int]:
        """Return the offset of a slab's headers in the file, and their size in bytes."""
        size = self.slab_bytes // ALIGN * 8 * header.HEADER_WORDS
        return 8 * self._shape[1] + slab * size, size

    # ------------------------------------------------------------------ every process prepares its pages

    def populate(self, gpu: str | None = None) -> None:
        """Fill this process's page tables for all slabs that may be used, so that the first copies don't fault.

        gpu: UUID of a GPU that must also reach the slabs.
        """
        slabs = set(range(self.offered)).difference(self.given_back())
        self._populate(self._memory[1], slabs)
        if gpu:
            for slab in slabs.difference(self.given_back()):  # one by one: copies wait for at most one slab
                self.register(gpu, np.array([self.region(slab)[0]]))

    def _populate(self, data: Bytes, slabs: set[int]) -> None:
        """Fill the page tables once per slab. Otherwise copies fault page by page, which takes longer than the copy."""
        for slab in slabs - self._populated:
            _advise(data, *self._payload(slab), _MADV_POPULATE_WRITE)
            self._populated.add(slab)

    def register(self, gpu: str, addresses: Addresses) -> bool:
        """Page-lock the slabs of these slots, so that GPUs can reach them. Returns whether all can be reached now."""
        with self.reachable(gpu, addresses) as reached:
            return reached

    @contextlib.contextmanager
    def reachable(self, gpu: str, addresses: Addresses) -> Iterator[bool]:
        """Page-lock the slabs of these slots, at least while the `with` block runs.

        Yields whether GPUs can reach all these slabs. Yields False at once for a slab that another thread is
        page-locking, and for a slab that CUDA refused to page-lock. If CUDA refused because a CUDA graph was being
        captured, the next call tries again.
        """
        with self._slab_lock:
            (words, data), locks = self._memory, self._page_locks  # `close` may replace `_memory` meanwhile
            slabs = self._slabs_at(addresses, words, data)
            missing = locks.begin(slabs or set())
        try:
            for slab in missing:  # no lock is held here: CUDA takes tens of milliseconds per GiB
                locks.lock(gpu, slab, _version(words, slab))
        finally:
            with self._slab_lock:
                locks.end(missing)
        with self._slab_lock:
            known = self._memory[1] is data and header.load(words, header.DISCARDS) == self._discards
            used = slabs if known and slabs is not None and locks.reach(slabs) else None
            locks.use(used or set())
        try:
            yield used is not None
        finally:
            with self._slab_lock:
                locks.leave(used or set())

    def _slabs_at(self, addresses: Addresses, words: header.Words, data: Bytes) -> set[int] | None:
        """Return the slabs of these slots. None if the slots are not in this mapping, or a new mapping replaced it.

        First unlocks slabs whose pages the owner has discarded.
        """
        if ((addresses < data.ctypes.data) | (addresses >= data.ctypes.data + len(data))).any():
            return None
        discards = header.load(words, header.DISCARDS)
        if discards != self._discards:  # a GPU would keep using pages that the owner discarded
            if not self._page_locks.unlock_changed(partial(_version, words)):
                with self._mutex:
                    if self._memory[1] is data:  # not closed meanwhile
                        self._map(self._locks.fd)  # the next copy finds another mapping
                return None
            self._populated.clear()
            self._discards = discards
        offsets = addresses - (data.ctypes.data + self._shape[2])
        return set(np.unique(offsets // self.slab_bytes).tolist())

    def close(self, unlink: bool = False) -> None:
        """Close the file. Running copies finish, and later calls find no slots. unlink: also remove the file's name."""
        if unlink and self._locks.fd >= 0 and self.has_name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        with self._mutex:
            self._memory = np.zeros(header.TABLE, np.int64), np.zeros(0, np.uint8)  # the last view unmaps the file
        self._locks.close()


def _version(words: header.Words, slab: int) -> int:
    """Return a slab's version, which changes when its pages are discarded, or -1 while the slab is given back."""
    generation = header.load(words, header.TABLE + 2 * slab)  # read first, as the owner writes it last
    return -1 if header.load(words, header.TABLE + 2 * slab + 1) == header.GIVEN_BACK else generation


def _mmap(fd: int, size: int) -> mmap.mmap:
    """Map the file through a new open file description.

    With the file's own description, a forked child that keeps the mapping would also keep the locks.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, size)
    finally:
        os.close(own)


def _advise(data: Bytes, start: int, length: int, advice: int) -> None:
    """Call madvise. Older kernels, and kernels without huge pages, may refuse the advice. Copies are then slower."""
    if start + length <= len(data):
        _madvise(data.ctypes.data + start, length, advice)
