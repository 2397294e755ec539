"""An arena whose slots are in a GPU's memory, and a function that copies between two arenas of a node.

As in every arena, the headers are in a file of shared memory. The payload of this file is never allocated.
"""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raykv.arena import block_copy, files, header
from raykv.arena.arena import Arena, PeerBlocks
from raykv.arena.buffers import Rows, rows_of
from raykv.arena.checksum import judge
from raykv.arena.gpu import cuda, host_copy
from raykv.arena.gpu.device import Device, Region, device
from raykv.arena.header import Mask
from raykv.arena.mapping import Addresses, Bytes
from raykv.arena.superblock import NO_CLUSTER
from raykv.errors import CapacityError, DeviceError
from raykv.protocol.location import ALIGN, Locations
from raykv.protocol.transfers import ALTERED, FAILED, PULLED

UNKNOWN = 0  # checksum in a header if no checksum was computed
LET_GO_S = 5.0  # maximum time for other processes to unmap a stopping store's memory; clients check every 2.5 s
LET_GO_LOOK_S = 0.02  # time between two checks whether that memory is unmapped


class GpuArena(Arena):
    """An arena whose slots are on a GPU. Get one from `open_new` or `map`.

    No checksums are computed on a GPU. A block that a GPU wrote has no checksum (UNKNOWN) until it is copied to host
    memory. A block from host memory keeps its checksum. GPU memory is freed when the process that allocated it ends, so
    a GpuArena is never adopted.
    """

    gpu: str  # UUID
    _open: Callable[[], Region]
    _ours: bool = False  # whether this process allocated the memory
    _let_go_by = 0.0  # time.monotonic() until which `close` waits for other processes; 0 before `disown`
    _region: Region | None  # None: not opened yet. Guarded by `_mutex`

    @classmethod
    def open_new(
        cls, pool: str, fingerprint: bytes, gpu: Device, slab_bytes: int, slabs: int, cluster: bytes = NO_CLUSTER
    ) -> Self:
        """Create an arena that this process owns and that offers all of its slabs.

        cluster: see `raylets.cluster_id`. Raises CapacityError if the GPU or /dev/shm has no room.
        """
        region = gpu.allocate(slab_bytes * slabs)
        try:
            arena = cls._create_next(pool, fingerprint, slab_bytes, slabs, cluster)
        except BaseException:
            region.close()
            raise
        arena._set_region(gpu.uuid, lambda: region, ours=True)
        arena._base_address(arena._memory[1])  # the region is then freed with the mapping, even without any copy
        header.store(arena._memory[0], header.OFFERED, slabs)
        return arena

    @classmethod
    def _create_next(cls, pool: str, fingerprint: bytes, slab_bytes: int, slabs: int, cluster: bytes) -> Self:
        """Create an arena whose file has all headers allocated. It offers no slab yet."""
        for index in itertools.count():
            path = f"{files.SHM}/raykv-{pool}-{os.getuid()}-gpu-{index}"
            files.remove(path, cluster)  # remove a dead store's file; its GPU memory is already free
            try:
                arena = cls.create(path, fingerprint, slab_bytes, slabs, cluster)
            except FileExistsError:
                continue
            first, length = arena._headers(0)
            try:
                os.posix_fallocate(arena._locks.fd, first, length * slabs)
            except OSError as error:
                arena.close(unlink=True)
                raise CapacityError(
                    f"{path}: {length * slabs} bytes of headers: {error.strerror}; "
                    f"lower gpu_memory, or enlarge {files.SHM}"
                ) from error
            return arena
        raise AssertionError("unreachable")

    @classmethod
    def map(cls, path: str, nonce: bytes, gpu: str, handle: bytes) -> Self:
        """Open the arena of this node's store, in a client. GPU memory is mapped only at the first copy."""
        arena = cls.attach(path, nonce)
        size = arena.slab_bytes * arena.slabs
        arena._set_region(gpu, lambda: device(gpu).open(handle, size), ours=False)
        return arena

    def _set_region(self, gpu: str, open_region: Callable[[], Region], ours: bool) -> None:
        self.gpu, self._open, self._ours, self._region = gpu, open_region, ours, None

    def populate(self, gpu: str | None = None) -> None:
        """Does nothing: GPU memory has no pages to fault in."""

    def _populate(self, data: Bytes, slabs: set[int]) -> None:
        """Does nothing: the file's payload must stay unallocated."""

    @property
    def handle(self) -> bytes:
        """The CUDA IPC handle with which a client maps the memory."""
        return self._open().handle

    def _base_address(self, data: Bytes) -> int:
        if not len(data):
            return 0  # closed: there are no slots
        self._check_store()
        with self._mutex:
            if self._region is None:
                self._region = self._open_region(data)
            return self._region.address - self._shape[2]

    def _open_region(self, data: Bytes) -> Region:
        """Open the memory. After the last copy, `data` is garbage-collected, which closes the memory."""
        try:
            # `share` makes the owner wait, at most LET_GO_S, before the owner frees the memory
            let_go: Callable[[], None] = (lambda: None) if self._ours else self._locks.share()
        except OSError as error:
            raise DeviceError(f"{self.path}: the memory can't be shared: {error}") from error
        try:
            self._check_store()  # again: the owner may have freed the memory before `share`
            region = self._open()
        except BaseException:
            let_go()
            raise
        cuda.when_gone(data, _close, region, let_go)
        return region

    def disown(self) -> None:
        """Owner: show other processes that the memory is lost.

        After the first call, these processes have LET_GO_S to unmap the memory.
        """
        if self._ours and not self._let_go_by:
            self._let_go_by = time.monotonic() + LET_GO_S
            self._locks.disown(ALIGN)

    def close(self, unlink: bool = False) -> None:
        """Like Arena.close. This process's memory is freed once other processes have unmapped it: see `disown`.

        Freeing memory that another process has mapped has undefined effects: see cudaIpcOpenMemHandle.
        """
        self.disown()
        while self._locks.shared_elsewhere() and time.monotonic() < self._let_go_by:
            time.sleep(LET_GO_LOOK_S)
        super().close(unlink)

    @property
    def lost(self) -> bool:
        """Whether the store that allocated the memory is gone."""
        return not self._ours and not self._locks.owned_elsewhere(ALIGN)

    def _check_store(self) -> None:
        if self.lost:
            raise DeviceError(f"{self.path}: its node store is gone, and the GPU memory with it")

    def _altered(self, sums: NDArray[np.uint64], claimed: NDArray[np.uint64]) -> Mask:
        altered: Mask = (sums != claimed) & (claimed != UNKNOWN)
        return altered

    def _copy_out(self, rows: Rows, slots: Addresses, verify: bool) -> list[int] | None:
        copies = block_copy.copies(rows, slots, out=True)
        if rows.device is None:
            host_copy.copy(self.gpu, copies, rows.registered, to_gpu=False)
        else:
            self._check(rows)
            device(self.gpu).copy(copies, rows.after)
        if len(slots):
            self._check_store()  # the store may have ended during the copy
        return block_copy.sums_of(rows) if verify and rows.device is None else None

    def _copy_in(self, rows: Rows, slots: Addresses) -> list[int]:
        copies = block_copy.copies(rows, slots, out=False)
        if rows.device is None:
            host_copy.copy(self.gpu, copies, registered=False, to_gpu=True)
            return block_copy.sums_of(rows)
        self._check(rows)
        device(self.gpu).copy(copies, rows.after)
        return [UNKNOWN] * len(rows)

    def _check(self, rows: Rows) -> None:
        if rows.device != self.gpu:
            raise ValueError(f"memory of {rows.device}, but the pool was attached with device={self.gpu!r}")

    def read_for_peer(self, locations: Locations, keys: Bytes) -> PeerBlocks:
        """Like Arena.read_for_peer. Copies the blocks to host memory, and computes checksums that headers lack."""
        checksums, positions, there = self.read_headers(locations, keys)
        size = int(locations["bytes"][there].max(initial=0))  # other locations may have any `bytes`
        blocks = np.empty((int(there.sum()), size), np.uint8)
        there[there] = arrived = self.read(locations[there], keys[there], blocks, used=False)
        blocks = blocks[arrived]
        computed = np.array(block_copy.sums_of(rows_of([blocks])), np.uint64)
        checksums[there] = np.where(checksums[there] == UNKNOWN, computed, checksums[there])
        return PeerBlocks(checksums, positions, there, [blocks.reshape(-1)])


def _close(region: Region, let_go: Callable[[], None]) -> None:
    try:
        region.close()
    finally:
        let_go()


def copy_between(
    source: Arena,
    source_locations: Locations,
    keys: Bytes,
    target: Arena,
    target_locations: Locations,
    used: bool = True,
) -> NDArray[np.uint8]:
    """Copy blocks of one size between two arenas of a node store. Usually one of the two arenas is a GPU's.

    used: as in Arena.read. Returns (n,) verdicts FAILED, PULLED or ALTERED. Raises DeviceError if a GPU fails, and
    ValueError unless each source block has one target slot of the same size.
    """
    verdicts = np.full(len(source_locations), ALTERED, np.uint8)
    size = int(source_locations["bytes"].max(initial=0))
    if len(target_locations) != len(verdicts) or any(
        (side["bytes"] != size).any() for side in (source_locations, target_locations)
    ):
        raise ValueError(f"{len(verdicts)} blocks of {size} bytes for {len(target_locations)} slots: sizes differ")
    if isinstance(source, GpuArena) and isinstance(target, GpuArena):  # via host memory: GPUs may lack peer access
        checksums, positions, there, runs = source.read_for_peer(source_locations, keys)
        blocks, checksums = runs[0].reshape(-1, size), checksums[there]
        written = target.write(target_locations[there], keys[there], blocks, positions[there], checksums)
        verdicts[there] = judge(written, blocks, checksums)
        return verdicts
    checksums, positions, there = source.read_headers(source_locations, keys, used)
    source_locations, keys, expected = source_locations[there], keys[there], checksums[there]
    altered = np.zeros(len(keys), np.bool_)

    def fill(which: Mask, addresses: Addresses) -> list[int]:
        rows = _slots_as_rows(target, addresses, size, source)
        arrived = source.read(source_locations[which], keys[which], rows, used=False)
        claimed = expected[which]
        computed = claimed if rows.device else np.array(block_copy.sums(addresses, size), np.uint64)
        expected[which] = np.where(claimed == UNKNOWN, computed, claimed)
        altered[which] = arrived & (computed != expected[which])
        which[which] = arrived
        return computed.tolist()  # type: ignore[no-any-return]

    written = target.fill(target_locations[there], keys, fill, positions[there], expected)
    verdicts[there] = np.where(written, PULLED, np.where(altered, ALTERED, FAILED))
    return verdicts


def _slots_as_rows(arena: Arena, addresses: Addresses, size: int, other: Arena) -> Rows:
    """Return slots of `arena` as rows into which blocks of `other` are read."""
    rows = Rows(addresses[:, None], np.array([size]), arena, writable=True)
    if isinstance(arena, GpuArena):
        return replace(rows, device=arena.gpu)
    if isinstance(other, GpuArena):
        # these slots are write-locked, so their slab is not given back meanwhile
        return replace(rows, registered=arena.register(other.gpu, addresses))
    return rows  # both arenas are in host memory: no correct caller asks for this
