"""Slots in a GPU's memory. Their headers are in a file of shared memory as an arena's are; its payload is a hole."""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raykv.arena import block_copy, header
from raykv.arena.arena import SHM, Arena, remove
from raykv.arena.buffers import Rows, rows_of
from raykv.arena.checksum import judge
from raykv.arena.gpu import host_copy
from raykv.arena.gpu.device import Device, Region, device
from raykv.errors import CapacityError, DeviceError
from raykv.protocol import ALIGN, ALTERED, FAILED, PULLED

UNKNOWN = 0  # for a checksum: nobody has computed it
Addresses = NDArray[np.int64]


class GpuArena(Arena):
    """An arena whose slots are on a GPU. Get one from `open_new` or `map`.

    No checksum is computed there: what a GPU wrote has none (UNKNOWN) until it comes into host memory, and what came
    from there keeps its own. The memory goes with the process that allocated it, so that no arena is taken up again.
    """

    gpu: str  # UUID
    _open: Callable[[], Region]
    _ours: bool  # this process allocated the memory
    _region: Region | None

    @classmethod
    def open_new(cls, pool: str, fingerprint: bytes, gpu: Device, slab_bytes: int, slabs: int) -> Self:
        """All of its slabs are offered at once. CapacityError where the GPU has no room, or /dev/shm for headers."""
        region = gpu.allocate(slab_bytes * slabs)
        try:
            arena = cls._create_next(pool, fingerprint, slab_bytes, slabs)
        except BaseException:
            region.close()
            raise
        arena._of(gpu.uuid, lambda: region, ours=True)
        arena._start(arena._memory[1])  # the region goes with the arena, even if nothing is ever copied
        header.store(arena._memory[0], header.OFFERED, slabs)
        return arena

    @classmethod
    def _create_next(cls, pool: str, fingerprint: bytes, slab_bytes: int, slabs: int) -> Self:
        """With all of its headers, and nothing offered yet."""
        for index in itertools.count():
            path = f"{SHM}/raykv-{pool}-{os.getuid()}-gpu-{index}"
            remove(path)  # of a store that is dead, and its memory with it
            try:
                arena = cls.create(path, fingerprint, slab_bytes, slabs)
            except FileExistsError:
                continue
            first, length = arena._headers(0)
            try:
                os.posix_fallocate(arena._locks.fd, first, length * slabs)
            except OSError as error:
                arena.close(unlink=True)
                raise CapacityError(
                    f"{path}: {length * slabs} bytes of headers: {error.strerror}; lower gpu_memory, or enlarge {SHM}"
                ) from error
            return arena
        raise AssertionError("unreachable")

    @classmethod
    def map(cls, path: str, nonce: bytes, gpu: str, handle: bytes) -> Self:
        """That of this node's store. Its memory is mapped when something is copied: not every client does."""
        arena = cls.attach(path, nonce)
        size = arena.slab_bytes * arena.slabs
        arena._of(gpu, lambda: device(gpu).open(handle, size), ours=False)
        return arena

    def _of(self, gpu: str, open_region: Callable[[], Region], ours: bool) -> None:
        self.gpu, self._open, self._ours, self._region = gpu, open_region, ours, None

    def populate(self, gpu: str | None = None) -> None:
        """Its memory is there."""

    def _populate(self, data: block_copy.Bytes, slabs: set[int]) -> None:
        """Nothing is ever in the file's payload, nor should memory be."""

    @property
    def handle(self) -> bytes:
        """What a client maps the memory by."""
        return self._open().handle

    def _start(self, data: block_copy.Bytes) -> int:
        if not len(data):
            return 0  # closed: it has no slots
        self._check_store()
        with self._mutex:
            if self._region is None:
                self._region = self._open()
                host_copy.when_gone(data, self._region.close)  # once the last copy is done
            return self._region.address - self._shape[2]

    def _check_store(self) -> None:
        if not self._ours and not self._locks.owned_elsewhere(ALIGN):
            raise DeviceError(f"{self.path}: its store is gone, and the memory with it")

    def _altered(self, sums: NDArray[np.uint64], claimed: NDArray[np.uint64]) -> NDArray[np.bool_]:
        altered: NDArray[np.bool_] = (sums != claimed) & (claimed != UNKNOWN)
        return altered

    def _copy_out(self, rows: Rows, slots: Addresses, verify: bool) -> list[int] | None:
        copies = block_copy.copies(rows, slots, out=True)
        if rows.device is None:
            host_copy.copy(self.gpu, copies, rows.pinned, to_gpu=False, after=None)
        else:
            self._check(rows)
            device(self.gpu).copy(copies, rows.stream)
        if len(slots):
            self._check_store()  # what is gone by now may have gone in the middle
        return block_copy.sums_of(rows) if verify and rows.device is None else None

    def _copy_in(self, rows: Rows, slots: Addresses) -> list[int]:
        copies = block_copy.copies(rows, slots, out=False)
        if rows.device is None:
            host_copy.copy(self.gpu, copies, pinned=False, to_gpu=True, after=None)
            return block_copy.sums_of(rows)
        self._check(rows)
        device(self.gpu).copy(copies, rows.stream)
        return [UNKNOWN] * len(rows)

    def _check(self, rows: Rows) -> None:
        if rows.device != self.gpu:
            raise ValueError(f"memory of {rows.device}, but the pool was attached with device={self.gpu!r}")

    def read_for_peer(
        self, locations: NDArray[np.void], keys: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.bool_], list[block_copy.Bytes]]:
        sums, positions, there = self.read_headers(locations, keys)
        blocks = np.empty((int(there.sum()), int(locations["bytes"].max(initial=0))), np.uint8)
        there[there] = came = self.read(locations[there], keys[there], blocks, used=False)
        blocks = blocks[came]
        found = np.array(block_copy.sums_of(rows_of([blocks])), np.uint64)
        sums[there] = np.where(sums[there] == UNKNOWN, found, sums[there])
        return sums, positions, there, [blocks.reshape(-1)]


def copy_between(
    source: Arena,
    at: NDArray[np.void],
    keys: NDArray[np.uint8],
    target: Arena,
    to: NDArray[np.void],
    used: bool = True,
) -> NDArray[np.uint8]:
    """Copy blocks between two arenas of one node store, of which at least one is a GPU's; verdicts as of a pull.

    All are of one size. used: see Arena.read. DeviceError where a GPU fails.
    """
    verdicts, size = np.full(len(at), ALTERED, np.uint8), int(at["bytes"].max(initial=0))
    if isinstance(source, GpuArena) and isinstance(target, GpuArena):  # one may not reach the other
        sums, positions, there, runs = source.read_for_peer(at, keys)
        blocks, sums = runs[0].reshape(-1, size), sums[there]
        written = target.write(to[there], keys[there], blocks, positions[there], sums)
        verdicts[there] = judge(written, blocks, sums)
        return verdicts
    sums, positions, there = source.read_headers(at, keys, used)
    at, keys, expected = at[there], keys[there], sums[there]
    altered = np.zeros(len(at), np.bool_)

    def fill(which: NDArray[np.bool_], slots: Addresses) -> list[int]:
        rows = _slots_of(target, slots, size, source)
        came = source.read(at[which], keys[which], rows, used=False)
        said = expected[which]
        found = said if rows.device else np.array(block_copy.sums(slots, size), np.uint64)
        expected[which] = np.where(said == UNKNOWN, found, said)
        altered[which] = came & (found != expected[which])
        which[which] = came
        return found.tolist()  # type: ignore[no-any-return]

    written = target.fill(to[there], keys, fill, positions[there], expected)
    verdicts[there] = np.where(written, PULLED, np.where(altered, ALTERED, FAILED))
    return verdicts


def _slots_of(arena: Arena, slots: Addresses, size: int, other: Arena) -> Rows:
    """Slots as rows, for what is to come from another arena, of which one is a GPU's."""
    rows = Rows(slots[:, None], np.array([size]), arena, writable=True)
    if isinstance(arena, GpuArena):
        return replace(rows, device=arena.gpu)
    assert isinstance(other, GpuArena)
    return replace(rows, pinned=arena.pinned(other.gpu, slots))
