"""One node's shared-memory file: slabs of slots that describe themselves."""

import ctypes
import errno
import itertools
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from raykv.arena import block_copy, header, superblock
from raykv.arena.buffers import Rows, rows_of
from raykv.arena.gpu import host_copy
from raykv.arena.gpu.device import device
from raykv.errors import ArenaMismatch, CapacityError
from raykv.protocol import ALIGN, KEY_BYTES, LOCATION, epoch_of, slot_bytes
from raykv.system.file_locks import Locks, lock
from raykv.system.jit import compile_all

SHM = "/dev/shm"
_MADV_REMOVE, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 9, 14, 23
_madvise = ctypes.CDLL(None).madvise  # mmap.madvise keeps the GIL, for as long as a slab takes to fault in
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
Bring = Callable[[NDArray[np.bool_], NDArray[np.int64]], "list[int]"]  # see Arena.fill


class Inventory(NamedTuple):
    """What lies in an arena. `node` of a place is 0: an arena does not know its own."""

    blocks: NDArray[np.void]  # (n,) LOCATION of ready blocks
    keys: NDArray[np.uint8]  # (n, 16)
    positions: NDArray[np.uint32]  # (n,) in their chains
    stamps: NDArray[np.uint32]  # (n,) last read, seconds since the arena was created
    busy: NDArray[np.void]  # (m,) LOCATION of slots being written, or whose writer died


class Arena:
    """One node's shared-memory file. Get one from `create`, `adopt` or `attach`.

    Thread-safe. A place that the arena does not offer, whose block is another by now, or whose header was altered is a
    miss (False), never an exception; wrong shapes, dtypes and lengths are ValueErrors, and what a GPU fails is a
    DeviceError. After `close` all is a miss.
    """

    def __init__(self, path: str, fd: int, first_page: NDArray[np.int64]) -> None:
        """For the class methods. Takes over `fd`, which holds the owner's lock if this is the owner."""
        self.path = path
        self.corrupt = 0  # blocks whose bytes did not match their checksum
        self.nonce = superblock.nonce_of(first_page)
        self.slab_bytes, self.slabs = int(first_page[header.SLAB_BYTES]), int(first_page[header.SLABS])
        self._clock_base = int(first_page[header.CLOCK_BASE])
        first, payload, size = superblock.layout(self.slab_bytes, self.slabs)
        self._shape = (self.slab_bytes, first // 8, payload)
        self._inode = _inode(os.fstat(fd))
        self._size = size
        self._map(fd)
        self._locks = Locks(fd, first, 8 * header.HEADER_WORDS)
        self._mutex = threading.Lock()
        self._resizer = threading.Lock()  # held for as long as a slab takes to fault in
        compile_all("raykv.arena")  # before anybody waits for a kernel or holds a lock

    def _map(self, fd: int) -> None:
        data = np.frombuffer(_mapping(fd, self._size), np.uint8)
        self._memory = data[: self._shape[2]].view(np.int64), data
        self._populated: set[int] = set()
        self._pins: dict[int, tuple[str, bool]] = {}  # by slab, the GPU that asked, for all, and whether it is pinned
        self._discards = header.load(self._memory[0], header.DISCARDS)
        host_copy.when_gone(data, host_copy.unpin, data.ctypes.data + self._shape[2], self.slab_bytes, self._pins)

    @classmethod
    def create(cls, path: str, fingerprint: bytes, slab_bytes: int, slabs: int) -> Self:
        """A new arena, owned, with nothing offered yet: `slabs` times `slab_bytes` (a multiple of 256 KiB).

        FileExistsError if there is such a file. It appears under its name whole and locked, or not at all.
        """
        words = superblock.fresh(fingerprint, slab_bytes, slabs)
        fd = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            lock(fd, 0, ALIGN)
            first, _, size = superblock.layout(slab_bytes, slabs)
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, first)  # what every client writes to, in whatever slab it is
            os.pwrite(fd, words.tobytes(), 0)
            os.link(f"/proc/self/fd/{fd}", path, dst_dir_fd=fd, follow_symlinks=True)  # a dir_fd makes it linkat
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, words)

    @classmethod
    def adopt(cls, path: str, fingerprint: bytes, slab_bytes: int, slabs: int) -> Self | None:
        """The arena a dead owner left behind, now owned, with a higher incarnation.

        None if there is none, if its owner lives or is another user (the file is left alone), or if it does not fit
        what is asked (it is unlinked, which its clients survive).
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or not lock(fd, 0, ALIGN):
                os.close(fd)
                return None
            if _inode(os.stat(path)) != _inode(info):  # someone unlinked it before we had the lock
                os.close(fd)
                return None
            words = superblock.read(fd)
            if words is None or not superblock.fits(words, fingerprint, slab_bytes, slabs):
                os.unlink(path)
                os.close(fd)
                return None
            arena = cls(path, fd, words)
        except FileNotFoundError:
            os.close(fd)
            return None
        header.store(arena._memory[0], header.INCARNATION, arena.incarnation + 1)
        if arena.offered < arena.slabs:  # its owner may have died between allocating it and offering it
            arena._discard(arena.offered)
        return arena

    @classmethod
    def attach(cls, path: str, nonce: bytes) -> Self:
        """The arena that this node's store serves, which is told by its nonce. ArenaMismatch if this is not it."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaMismatch(_mismatch(path, f"cannot be opened ({error.strerror})")) from error
        words = superblock.read(fd)
        if words is None or superblock.nonce_of(words) != nonce:
            os.close(fd)
            raise ArenaMismatch(_mismatch(path, "is another file than the one that this node's store serves"))
        return cls(path, fd, words)

    @property
    def offered(self) -> int:
        """How many slabs may be used, with those that were given back since."""
        return header.load(self._memory[0], header.OFFERED)

    @property
    def available(self) -> int:
        """How many slabs may be used."""
        return self.offered - len(self.given_back())

    def given_back(self) -> list[int]:
        """Slabs that were offered once, and whose memory was, or is to be, given back."""
        words, _ = self._memory
        strides = words[header.TABLE + 1 :][: 2 * header.load(words, header.OFFERED) : 2]
        found: list[int] = np.flatnonzero(strides == header.GIVEN_BACK).tolist()
        return found

    @property
    def epoch(self) -> int:
        """The newest directory epoch that this arena has heard of; grants of an older one are refused."""
        return header.load(self._memory[0], header.EPOCH)

    @property
    def incarnation(self) -> int:
        """How often the arena was taken up by an owner."""
        return header.load(self._memory[0], header.INCARNATION)

    def raise_epoch(self, epoch: int) -> bool:
        """Owner: from now on refuse grants older than `epoch`. False if the arena has heard of a newer one."""
        with self._mutex:
            if epoch < self.epoch:
                return False
            header.store(self._memory[0], header.EPOCH, epoch)
            return True

    def raise_floor(self, generation: int) -> None:
        """Owner: `inventory` leaves out blocks up to a generation from now on; they were cleared."""
        with self._mutex:
            words, _ = self._memory
            header.store(words, header.FLOOR, max(generation, header.load(words, header.FLOOR)))

    def offer_next(self) -> bool:
        """Owner: allocate, fault in and offer one more slab, of those given back first.

        False if all are. CapacityError if there is no room.
        """
        with self._resizer:
            words, data = self._memory
            back = self.given_back()
            slab = back[0] if back else self.offered
            if slab >= self.slabs or self._locks.fd < 0:
                return False
            _advise(data, *self._payload(slab), _MADV_HUGEPAGE)
            self._populate(data, {slab})  # before it is allocated: only a fault is given huge pages
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
        """Owner: forget a slab's blocks, for its memory to go. Grants up to a generation are refused from then on.

        False if somebody writes there, or the generation is not newer than the slab's, or of a past epoch. The memory
        is there until `discard`: whoever reads there yet, and has seen headers that are gone by now, may need it.
        """
        with self._resizer:
            words, _ = self._memory
            first, entry = slab * (self.slab_bytes // ALIGN), header.TABLE + 2 * slab
            if not 0 <= slab < self.offered:
                return False
            with self._mutex, self._locks.whole(first, first + self.slab_bytes // ALIGN) as mine:
                newer = header.load(words, entry) < generation and self.epoch <= epoch_of(generation)
                if not mine or not newer:
                    return False
                header.reformat(words, self._shape, slab, generation, header.GIVEN_BACK)
            return True

    def discard(self, slab: int) -> None:
        """Owner: give the memory of a slab that was given back to the machine, unless it was offered again."""
        with self._resizer:
            if slab in self.given_back():
                self._discard(slab)

    def refilled(self) -> list[int]:
        """Slabs that were given back and have memory: not discarded yet, or read too late."""
        return [
            slab
            for slab in self.given_back()
            if any(self._has_data(*region) for region in (self._payload(slab), self._headers(slab)))
        ]

    def _has_data(self, start: int, length: int) -> bool:
        try:
            return os.lseek(self._locks.fd, start, os.SEEK_DATA) < start + length
        except OSError:  # nothing up to the file's end
            return False

    def _discard(self, slab: int) -> None:
        self._populated.discard(slab)
        if slab in self._pins:
            host_copy.unpin(self.region(0)[0], self.slab_bytes, {slab: self._pins.pop(slab)})
        self._discards += 1
        header.store(self._memory[0], header.DISCARDS, self._discards)
        for region in (self._payload(slab), self._headers(slab)):
            _advise(self._memory[1], *region, _MADV_REMOVE)

    def _payload(self, slab: int) -> tuple[int, int]:
        """Where a slab's slots are in the file, and how many bytes."""
        return self._shape[2] + slab * self.slab_bytes, self.slab_bytes

    def _headers(self, slab: int) -> tuple[int, int]:
        size = self.slab_bytes // ALIGN * 8 * header.HEADER_WORDS
        return 8 * self._shape[1] + slab * size, size

    def populate(self, gpu: str | None = None) -> None:
        """Fill this process's page tables for all that is offered, which the first copies would wait for otherwise.

        gpu: which is to reach it, too.
        """
        slabs = set(range(self.offered)).difference(self.given_back())
        self._populate(self._memory[1], slabs)
        if gpu:
            self.pinned(gpu, np.array([self.region(slab)[0] for slab in slabs]))

    def read(
        self,
        locations: NDArray[np.void],
        keys: NDArray[np.uint8],
        rows: Rows | NDArray[np.uint8],
        verify: bool = False,
        used: bool = True,
    ) -> NDArray[np.bool_]:
        """Copy blocks out; (n,) which of the rows now hold their block.

        places: (n,) LOCATION. keys: (n, 16) uint8. rows: n destinations, or an (n, bytes) uint8 array of them. An
        invalid row's content is undefined. `verify`: a row whose bytes do not match the block's checksum is invalid
        too, and counted in `corrupt`. used: for somebody who needs them, which is a reason to keep them. DeviceError
        where a GPU fails: that tells nothing of the blocks.
        """
        spots, names = _arguments(locations, keys)
        rows = _fitting(rows, spots, writable=True)
        words, data = self._memory
        at, slots = self._locate(words, data, spots)
        ok, claims = np.zeros(len(spots), np.bool_), np.zeros((len(spots), 2), np.int64)
        header.check(words, at, spots, names, claims, ok)
        found = claims[:, 0].astype(np.uint64)
        if sums := self._copy_out(rows[ok], slots[ok], verify):
            found[ok] = sums
        header.recheck(words, at, spots, names, ok)
        wrong = ok & self._altered(found, claims[:, 0].view(np.uint64))
        self.corrupt += int(wrong.sum())
        ok &= ~wrong
        header.stamp(words, at, self._now(), ok & used)
        return ok

    def write(
        self,
        locations: NDArray[np.void],
        keys: NDArray[np.uint8],
        rows: Rows | NDArray[np.uint8],
        positions: NDArray[Any] | None = None,
        expected: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.bool_]:
        """Copy blocks into the slots that were granted for them; (n,) which are ready now.

        As `read`, with sources for destinations. `positions`: (n,) of the blocks in their chains; by default 0. A block
        is not written if its grant is of a past epoch, slab format or generation, or if someone writes there.
        `expected`: (n,) xxh3_64; a block with another one never becomes ready, and is counted in `corrupt`.
        DeviceError where a GPU fails: nothing is written then, and the same grants are good for another try.
        """
        spots, names = _arguments(locations, keys)
        rows = _fitting(rows, spots, writable=False)

        def fill(which: NDArray[np.bool_], slots: NDArray[np.int64]) -> list[int]:
            return self._copy_in(rows[which], slots)

        return self._fill(spots, names, fill, positions, expected)

    def fill(
        self,
        locations: NDArray[np.void],
        keys: NDArray[np.uint8],
        fill: Bring,
        positions: NDArray[Any] | None = None,
        expected: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.bool_]:
        """As `write`, of bytes that come by other means than a copy.

        bring(which, addresses): put the blocks of a (n,) mask there, one for each address, and return their xxh3_64. It
        may take its time: the slots are locked. Those that it clears in the mask did not come: they are as good as
        never written to, as all are if it raises.
        """
        return self._fill(*_arguments(locations, keys), fill, positions, expected)

    def _fill(
        self,
        spots: header.Words,
        names: header.Words,
        fill: Bring,
        positions: NDArray[Any] | None,
        expected: NDArray[np.uint64] | None,
    ) -> NDArray[np.bool_]:
        words, data = self._memory
        at, slots = self._locate(words, data, spots)
        self._format(words, spots, at)
        numbers = self._numbers(at)
        with self._locks.hold(numbers) as mine:
            first = {number: i for i, number in reversed(list(enumerate(numbers))) if number in mine}
            ok = np.zeros(len(spots), np.bool_)
            ok[list(first.values())] = True  # of two places in one slot, only the first is written
            header.begin(words, at, spots, ok)
            sums, begun = np.zeros(len(spots), np.uint64), ok.copy()
            try:
                sums[begun] = fill(ok, slots[begun])
            except BaseException:
                ok[:] = False
                raise
            finally:
                header.undo(words, at, spots, begun & ~ok)  # for another try with the same grant
            if expected is not None:
                self.corrupt += int((ok & (sums != expected)).sum())
                ok &= sums == expected
            where = np.zeros(len(spots), np.int64) if positions is None else np.ascontiguousarray(positions, np.int64)
            header.finish(words, at, spots, names, sums.view(np.int64), where, self._now(), ok)
        return ok

    def with_lengths(self, locations: NDArray[np.void]) -> NDArray[np.void]:
        """The places, whose `bytes` are their slots', with what their headers say that a block has."""
        words, data = self._memory
        spots, _ = _arguments(locations, np.zeros((len(locations), KEY_BYTES), np.uint8))
        at, _ = self._locate(words, data, spots)
        lengths = words[np.maximum(at, 0) + header.LENGTH]
        measured = locations.copy()
        measured["bytes"] = np.where(
            (at >= 0) & (lengths > 0) & (lengths <= locations["bytes"]), lengths, locations["bytes"]
        )
        return measured

    def read_for_peer(
        self, locations: NDArray[np.void], keys: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.bool_], list[NDArray[np.uint8]]]:
        """As `read_headers`, and the bytes of the blocks that are there. The reader must verify them."""
        sums, positions, ok = self.read_headers(locations, keys)
        return sums, positions, ok, self.views(locations[ok])

    def read_headers(
        self, locations: NDArray[np.void], keys: NDArray[np.uint8], used: bool = True
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.bool_]]:
        """(n,) xxh3_64 that each block had when written, (n,) positions, and which of the places hold that block.

        used: who asks is about to read them, for another node.
        """
        words, data = self._memory
        spots, names = _arguments(locations, keys)
        at, _ = self._locate(words, data, spots)
        ok, claims = np.zeros(len(spots), np.bool_), np.zeros((len(spots), 2), np.int64)
        header.check(words, at, spots, names, claims, ok)
        header.recheck(words, at, spots, names, ok)
        header.stamp(words, at, self._now(), ok & used)
        return claims[:, 0].astype(np.uint64), claims[:, 1].astype(np.uint32), ok

    def views(self, locations: NDArray[np.void]) -> list[NDArray[np.uint8]]:
        """The bytes of slots, in place and unchecked; those of neighbours as one array.

        ValueError if the arena offers no such slot.
        """
        words, data = self._memory
        spots, _ = _arguments(locations, np.zeros((len(locations), KEY_BYTES), np.uint8))
        at, _ = self._locate(words, data, spots)
        if (at < 0).any():
            offered = f"{self.offered} slabs of {self.slab_bytes} bytes are offered"
            raise ValueError(f"{self.path}: no slot at {locations[at < 0][0]}; {offered}")
        sizes = locations["bytes"].astype(np.int64)
        strides = -(-sizes // ALIGN) * ALIGN
        starts = self._shape[2] + locations["slab"].astype(np.int64) * self.slab_bytes + locations["slot"] * strides
        stops = starts + sizes
        runs = np.split(np.arange(len(locations)), np.flatnonzero(stops[:-1] != starts[1:]) + 1)
        return [data[starts[run[0]] : stops[run[-1]]] for run in runs if len(run)]

    def addresses(self, locations: NDArray[np.void]) -> NDArray[np.int64]:
        """(n,) where slots are in this process's memory; 0 where the arena offers no such slot."""
        words, data = self._memory
        spots, _ = _arguments(locations, np.zeros((len(locations), KEY_BYTES), np.uint8))
        at, slots = self._locate(words, data, spots)
        return np.where(at >= 0, slots, 0)

    def pinned(self, gpu: str, slots: NDArray[np.int64]) -> bool:
        """Have GPUs reach the slabs of these addresses of slots. Whether they can."""
        with self._resizer:
            words, data = self._memory
            if ((slots < data.ctypes.data) | (slots >= data.ctypes.data + len(data))).any():
                return False  # of a mapping that is no longer ours: closed, or replaced by another thread
            if header.load(words, header.DISCARDS) != self._discards:
                # GPUs would go on with pages that the owner gave back: the next copy finds another mapping
                self._map_again(data)
                return False
            first = data.ctypes.data + self._shape[2]
            slabs = np.unique((slots - first) // self.slab_bytes).tolist()
            for slab in slabs:
                if slab not in self._pins:
                    self._pins[slab] = gpu, device(gpu).pin(first + slab * self.slab_bytes, self.slab_bytes)
            return all(self._pins[slab][1] for slab in slabs)

    def _map_again(self, data: block_copy.Bytes) -> None:
        with self._mutex:
            if self._memory[1] is data:  # not closed meanwhile
                self._map(self._locks.fd)

    def region(self, slab: int) -> tuple[int, int]:
        """Where a slab is in this process's memory, and its bytes."""
        start, length = self._payload(slab)
        return self._memory[1].ctypes.data + start, length

    def inventory(self) -> Inventory:
        """Every ready block, and every slot that is being written or was when its writer died: to be swept."""
        words, _ = self._memory
        found = [self._inventory_of(words, slab) for slab in range(header.load(words, header.OFFERED))]
        columns = np.concatenate([part[1] for part in found]) if found else np.zeros((0, 7), np.int64)
        locations = np.concatenate([part[0] for part in found]) if found else np.zeros(0, LOCATION)
        ready, busy = columns[:, 0] == header.READY, columns[:, 0] == header.WRITING
        ready &= columns[:, 1] > header.load(words, header.FLOOR)
        keys = np.ascontiguousarray(columns[ready, 2:4]).view(np.uint8).reshape(-1, KEY_BYTES)
        positions, stamps = columns[ready, 5].astype(np.uint32), columns[ready, 6].astype(np.uint32)
        return Inventory(locations[ready], keys, positions, stamps, locations[busy])

    def _inventory_of(self, words: header.Words, slab: int) -> tuple[NDArray[np.void], header.Words]:
        entry, first = header.TABLE + 2 * slab, slab * (self.slab_bytes // ALIGN)
        while True:
            # Locks come first: who takes one after this sees the epoch that was raised before it, and is refused.
            busy = self._locks.busy(first, first + self.slab_bytes // ALIGN)
            slab_gen, stride = header.load(words, entry), int(words[entry + 1])
            slots = self.slab_bytes // stride if slab_gen > 0 and stride >= ALIGN else 0
            columns = np.zeros((slots, 7), np.int64)
            locked = np.zeros(slots, np.bool_)
            locked[[i - first for i in busy if i - first < slots]] = True
            header.collect(words, self._shape[1] + first * header.HEADER_WORDS, stride, locked, columns)
            if header.load(words, entry) == slab_gen:
                break
        locations = np.zeros(slots, LOCATION)
        locations["slab"], locations["slab_gen"], locations["slot"], locations["gen"] = (
            slab,
            slab_gen,
            range(slots),
            columns[:, 1],
        )
        locations["bytes"] = np.where(columns[:, 0] == header.READY, columns[:, 4], stride)
        return locations, columns

    def sweep(self, locations: NDArray[np.void]) -> NDArray[np.uint8]:
        """(n,) what became of grants: 0 still being written, 1 free now (a late writer is refused), 2 ready.

        `identify` tells what is ready.
        """
        words, data = self._memory
        spots, _ = _arguments(locations, np.zeros((len(locations), KEY_BYTES), np.uint8))
        at, _ = self._locate(words, data, spots)
        states = (at < 0).astype(np.uint8)
        numbers = self._numbers(at)
        with self._locks.hold(numbers) as mine:
            ok = np.array([number in mine for number in numbers], np.bool_)
            header.reclaim(words, at, spots, ok, states)
        return states

    def identify(self, locations: NDArray[np.void]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """(n, 16) keys and (n,) generations that the headers of slots say."""
        words, data = self._memory
        spots, _ = _arguments(locations, np.zeros((len(locations), KEY_BYTES), np.uint8))
        at, _ = self._locate(words, data, spots)
        out = np.zeros((len(locations), 3), np.int64)
        header.identify(words, at, out)
        return np.ascontiguousarray(out[:, 1:]).view(np.uint8), out[:, 0].astype(np.uint64)

    def holds_other_length(self, locations: NDArray[np.void], keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """(n,) which slots hold exactly that block, of another length than the location's `bytes`.

        Such a block was not altered: the reader is wrong about its size. locations: (n,) LOCATION. keys: (n, 16) uint8.
        """
        words, data = self._memory
        slots = locations.copy()
        slots["bytes"] = ALIGN  # where a header is does not depend on it, whether the slab has such a slot does
        found, generations = self.identify(slots)
        at, _ = self._locate(words, data, _arguments(slots, keys)[0])
        same = (at >= 0) & (found == keys).all(axis=1) & (generations == locations["gen"])
        other: NDArray[np.bool_] = same & (words[np.maximum(at, 0) + header.LENGTH] != locations["bytes"])
        return other

    def close(self, unlink: bool = False) -> None:
        """Let go of the file: copies under way are finished, all else is a miss. `unlink`: remove its name too."""
        if unlink:
            try:
                if _inode(os.stat(self.path)) == self._inode:
                    os.unlink(self.path)
            except FileNotFoundError:
                pass
        with self._mutex:
            self._memory = np.zeros(header.TABLE, np.int64), np.zeros(0, np.uint8)  # unmapped with the last view
        self._locks.close()

    def _locate(
        self, words: header.Words, data: block_copy.Bytes, spots: header.Words
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(n,) first words of the headers, -1 where there is no such slot, and (n,) addresses of the slots."""
        at, payload = np.zeros((2, len(spots)), np.int64)
        header.locate(words, self._shape, spots, at, payload)
        self._populate(data, set((spots[at >= 0, 0] >> 32).tolist()))
        return at, self._start(data) + payload

    def _start(self, data: block_copy.Bytes) -> int:
        """Where the file's first byte is, in the addresses of its payload."""
        return data.ctypes.data

    def _altered(self, sums: NDArray[np.uint64], claimed: NDArray[np.uint64]) -> NDArray[np.bool_]:
        altered: NDArray[np.bool_] = sums != claimed
        return altered

    def _copy_out(self, rows: Rows, slots: NDArray[np.int64], verify: bool) -> list[int] | None:
        """Copy slots to rows; their xxh3_64 where they are to be verified."""
        copies = block_copy.copies(rows, slots, out=True)
        if rows.device is None:
            if verify:
                return block_copy.copy_summed(copies)
            block_copy.copy(copies)
            return None
        host_copy.copy(rows.device, copies, self.pinned(rows.device, slots), True, rows.stream)
        return block_copy.sums(slots, rows.bytes) if verify else None

    def _copy_in(self, rows: Rows, slots: NDArray[np.int64]) -> list[int]:
        """Copy rows to slots; xxh3_64 of what is there then."""
        copies = block_copy.copies(rows, slots, out=False)
        if rows.device is None:
            return block_copy.copy_summed(copies)
        host_copy.copy(rows.device, copies, self.pinned(rows.device, slots), False, rows.stream)
        return block_copy.sums(slots, rows.bytes)

    def _populate(self, data: block_copy.Bytes, slabs: set[int]) -> None:
        """Fill this process's page tables, once a slab: a fault a page costs more than the copy of it."""
        for slab in slabs - self._populated:
            _advise(data, *self._payload(slab), _MADV_POPULATE_WRITE)
            self._populated.add(slab)

    def _numbers(self, at: NDArray[np.int64]) -> list[int]:
        """Numbers of the slots' locks; negative where there is no such slot."""
        return ((at - self._shape[1]) // header.HEADER_WORDS).tolist()  # type: ignore[no-any-return]

    def _now(self) -> int:
        return max(0, int(time.time()) - self._clock_base)

    def _format(self, words: header.Words, spots: header.Words, at: NDArray[np.int64]) -> None:
        """Give slabs the format that grants were made for, where nobody has yet."""
        if header.formatted(words, at, spots):
            return
        for slab, slab_gen, size, epoch in {
            (s[0] >> 32, s[2], s[1] >> 32, epoch_of(s[3])) for s in spots[at >= 0].tolist()
        }:
            if header.load(words, header.TABLE + 2 * slab) < slab_gen:
                self._reformat(words, slab, slab_gen, slot_bytes(size), epoch)

    def _reformat(self, words: header.Words, slab: int, slab_gen: int, stride: int, epoch: int) -> None:
        first = slab * (self.slab_bytes // ALIGN)
        for _ in range(5):  # another writer of this format may be at it, and does not take long
            with self._locks.whole(first, first + self.slab_bytes // ALIGN) as mine:
                if header.load(words, header.TABLE + 2 * slab) >= slab_gen:
                    return
                if mine:
                    if header.load(words, header.EPOCH) <= epoch:
                        header.reformat(words, self._shape, slab, slab_gen, stride)
                    return
            time.sleep(0.001)


def open_own(
    pool: str,
    fingerprint: bytes,
    slab_bytes: int,
    slabs: int,
    room_check: Callable[[int], None],
    folder: str = SHM,
    limit: int | None = None,
) -> Arena:
    """The arena of a node store: one that a dead store of this user and pool left behind, else a new one.

    `room_check` is asked for the bytes of a new one (`raykv.system.free_memory.check`) of which `limit` slabs are to be
    offered, by default all, and may raise.
    """
    for index in itertools.count():
        path = f"{folder}/raykv-{pool}-{os.getuid()}-{index}"
        arena = Arena.adopt(path, fingerprint, slab_bytes, slabs)
        if arena is not None:
            return arena
        if os.path.lexists(path):  # a living store's, or another user's
            continue
        room_check(superblock.layout(slab_bytes, slabs if limit is None else limit)[2])
        try:
            return Arena.create(path, fingerprint, slab_bytes, slabs)
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def left_behind(pool: str, folder: str = SHM) -> list[str]:
    """Paths of this user's arenas of a pool that are in no living store's hands."""
    ours = re.compile(rf"raykv-{pool}-{os.getuid()}-(gpu-)?\d+")
    paths = [entry.path for entry in os.scandir(folder) if ours.fullmatch(entry.name)]
    return [path for path in paths if not _owned(path)]


def remove_left_behind(pool: str) -> int:
    """Remove this user's arenas of a pool that are in no living store's hands. Returns how many there were."""
    return sum(remove(path) for path in left_behind(pool))


def remove(path: str) -> bool:
    """Remove an arena that is in no living store's hands. Returns whether it was.

    Under its owner's lock: by now another store may have taken it up, or have a new one of that name.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        unowned = lock(fd, 0, ALIGN) and _inode(os.stat(path)) == _inode(os.fstat(fd))
        if unowned:
            os.unlink(path)
        return unowned
    except FileNotFoundError:  # another store that stops was faster
        return False
    finally:
        os.close(fd)


def _owned(path: str) -> bool:
    """Whether an arena is in a living store's hands, or another user's."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        return not lock(fd, 0, ALIGN)
    finally:
        os.close(fd)


def _mapping(fd: int, size: int) -> mmap.mmap:
    """The file, mapped through a description of its own: a mapping that a forked child keeps must not keep locks."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, size)
    finally:
        os.close(own)


def _inode(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _advise(data: block_copy.Bytes, start: int, length: int, advice: int) -> None:
    """madvise, refused or not: an older kernel, or no huge pages, is only slower."""
    if start + length <= len(data):
        _madvise(data.ctypes.data + start, length, advice)


def _mismatch(path: str, what: str) -> str:
    return (
        f"{path} {what}. This process must see its node store's shared memory: mount the Ray pod's "
        f"{os.path.dirname(path)} into this container (an emptyDir with medium: Memory) and run as the same user"
    )


def _arguments(locations: NDArray[np.void], keys: NDArray[np.uint8]) -> tuple[header.Words, header.Words]:
    """(n, 4) and (n, 2) copies for the kernels: aligned and writable always, so that none is compiled anew."""
    if locations.dtype != LOCATION or locations.ndim != 1:
        raise ValueError(f"places: {locations.dtype} of shape {locations.shape}; give (n,) raykv.protocol.LOCATION")
    if keys.dtype != np.uint8 or keys.shape != (len(locations), KEY_BYTES):
        raise ValueError(f"keys: {keys.dtype} of shape {keys.shape}; give ({len(locations)}, {KEY_BYTES}) uint8")
    spots, names = np.array(locations, order="C"), np.array(keys, order="C")
    return spots.view(np.int64).reshape(-1, 4), names.view(np.int64)


def _fitting(given: Rows | NDArray[np.uint8], spots: header.Words, writable: bool) -> Rows:
    """As Rows; ValueError unless there is one of the right size for every place."""
    rows = rows_of([given]) if isinstance(given, np.ndarray) else given
    if len(rows) != len(spots):
        raise ValueError(f"{len(rows)} rows for {len(spots)} places")
    sizes = spots[:, 1] >> 32
    if (sizes != rows.bytes).any():
        raise ValueError(f"rows of {rows.bytes} bytes, but a place of {sizes[sizes != rows.bytes][0]}")
    if writable and not rows.writable:
        raise ValueError("the rows are read-only: nothing can be read into them")
    return rows
