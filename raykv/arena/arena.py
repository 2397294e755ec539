"""One node's arena: a file of shared memory with slots for blocks, and with headers that describe the blocks.

The directory grants slots. Clients, stores, transports and tiers of the node write and read the slots here. An arena
checks every location: a location is a miss if the arena does not offer the slot, or if the slot now holds another
block. See `raykv.arena.mapping` for slabs and pages, `raykv.arena.files` for the file, `raykv.arena.slots` for slots
after a lookup, and `raykv.arena.header` for the words of headers.
"""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from raykv.arena import block_copy, files, header, superblock
from raykv.arena.buffers import Rows, address_of
from raykv.arena.files import SHM, ArenaFile
from raykv.arena.gpu import host_copy
from raykv.arena.header import Mask
from raykv.arena.mapping import Addresses, Bytes, Mapping
from raykv.arena.slots import Slots
from raykv.arena.superblock import NO_CLUSTER
from raykv.protocol.location import ALIGN, GENERATIONS, KEY_BYTES, LOCATION, Locations, epoch_of, slot_bytes
from raykv.protocol.stores import FREED, STILL_WRITTEN
from raykv.system.file_locks import AGAIN_S
from raykv.system.jit import compile_all

FORMAT_S = 0.25  # maximum wait while another process formats the slab, which takes microseconds

Fill = Callable[[Mask, Addresses], "list[int]"]  # see Arena.fill


class BlockHeaders(NamedTuple):
    """The headers of n blocks."""

    checksums: NDArray[np.uint64]  # (n,) xxh3_64 of each block when it was written
    positions: NDArray[np.uint32]  # (n,) the blocks' positions in their chains
    there: Mask  # (n,) whether the location holds that block


class PeerBlocks(NamedTuple):
    """The fields of BlockHeaders for n blocks, and the blocks' bytes, for a reader on another node."""

    checksums: NDArray[np.uint64]
    positions: NDArray[np.uint32]
    there: Mask
    runs: list[Bytes]  # unverified bytes of the blocks that are there, in order; adjacent blocks form one array


class Contents(NamedTuple):
    """The blocks in an arena. The `node` of the locations is 0: an arena does not know its node's index."""

    ready: Locations  # (n,) locations of ready blocks
    keys: Bytes  # (n, 16)
    positions: NDArray[np.uint32]  # (n,) the blocks' positions in their chains
    stamps: NDArray[np.uint32]  # (n,) times of the last reads, in seconds since the arena was created
    writing: Locations  # (m,) locations of slots that are being written, or whose writer died


class Arena(Mapping):
    """One node's shared memory. Get one from `create`, `adopt`, `attach` or `open_own`.

    Thread-safe. A location is a miss (False) if the arena does not offer its slot, if the slot now holds another block,
    or if the slot's header was altered. After `close` every location is a miss. Methods raise ValueError for wrong
    shapes, dtypes and lengths, and DeviceError if a GPU fails.
    """

    def __init__(self, file: ArenaFile) -> None:
        """Only the class methods call this."""
        super().__init__(file)
        self.corrupt = 0  # blocks whose bytes did not match their checksum
        self._clock_base = int(file.first_page[header.CLOCK_BASE])
        compile_all("raykv.arena")  # before anybody waits for a kernel or holds a lock

    @classmethod
    def create(cls, path: str, fingerprint: bytes, slab_bytes: int, slabs: int, cluster: bytes = NO_CLUSTER) -> Self:
        """Create an arena that this process owns and that offers no slab yet. See `files.create`."""
        return cls(files.create(path, fingerprint, slab_bytes, slabs, cluster))

    @classmethod
    def adopt(
        cls, path: str, fingerprint: bytes, slab_bytes: int, slabs: int, cluster: bytes = NO_CLUSTER
    ) -> Self | None:
        """Adopt a dead owner's arena, and increment its incarnation. Returns None if there is no such arena."""
        file = files.adopt(path, fingerprint, slab_bytes, slabs, cluster)
        if file is None:
            return None
        arena = cls(file)
        header.store(arena._memory[0], header.INCARNATION, arena.incarnation + 1)
        if arena.offered < arena.slabs:  # the owner may have died between allocating and offering this slab
            arena._discard(arena.offered)
        arena._tell_discard()  # the owner may have died between discarding a slab and telling clients
        return arena

    @classmethod
    def attach(cls, path: str, nonce: bytes) -> Self:
        """Open the arena of this node's store, in a client. Raises ArenaMismatch if the file is another arena's."""
        return cls(files.attach(path, nonce))

    # ------------------------------------------------------------------ blocks

    def read(
        self,
        locations: Locations,
        keys: Bytes,
        rows: Rows | Bytes,
        verify: bool = False,
        used: bool = True,
    ) -> Mask:
        """Copy blocks from slots to rows.

        locations: (n,) LOCATION. keys: (n, 16) uint8. rows: n destinations, or an (n, bytes) uint8 array of them.
        verify: compare each row with its block's checksum. A different row is a miss, and is counted in `corrupt`.
        used: stamp the blocks as read. A directory that adopts the blocks orders them by these stamps.
        Returns (n,) bool: which rows hold their block now. The content of all other rows is undefined.
        Raises DeviceError if a GPU fails. This error says nothing about the blocks.
        """
        slots = self._find(locations, keys)
        rows = slots.checked(rows, writable=True)
        ok, claims = slots.check()
        copied = ok.copy()
        sums = self._copy_out(rows[ok], slots.addresses[ok], verify)
        slots.recheck(ok)
        if sums:
            found = np.zeros(len(ok), np.uint64)
            found[copied] = sums
            wrong = ok & self._altered(found, claims[:, 0].view(np.uint64))
            self._count_corrupt(wrong)
            ok &= ~wrong
        self._stamp(slots, ok & used)
        return ok

    def write(
        self,
        locations: Locations,
        keys: Bytes,
        rows: Rows | Bytes,
        positions: NDArray[Any] | None = None,
        expected: NDArray[np.uint64] | None = None,
    ) -> Mask:
        """Copy blocks into the slots that were granted for them.

        locations, keys: as in `read`. rows: n sources. positions: (n,) positions in the blocks' chains; 0 by default.
        expected: (n,) xxh3_64; a block with another checksum never becomes ready, and is counted in `corrupt`.
        Returns (n,) bool: which blocks are ready now. A block is not written if its grant comes from a past epoch, slab
        format or generation, or if another process is writing to its slot.
        Raises DeviceError if a GPU fails; then nothing is written, and the same grants can be tried again.
        """
        slots = self._find(locations, keys)
        rows = slots.checked(rows, writable=False)

        def fill(which: Mask, addresses: Addresses) -> list[int]:
            return self._copy_in(rows[which], addresses)

        return self._fill(slots, fill, positions, expected)

    def fill(
        self,
        locations: Locations,
        keys: Bytes,
        fill: Fill,
        positions: NDArray[Any] | None = None,
        expected: NDArray[np.uint64] | None = None,
    ) -> Mask:
        """Like `write`, but the function `fill` provides the bytes.

        fill(which, addresses): `which` is an (n,) mask of blocks. `addresses` has an address for each True. `fill` must
        put each block at its address, and return the xxh3_64 of each. The slots stay locked meanwhile, so `fill` may
        take long. If a block does not arrive, `fill` must set its `which` to False. Then its slot can be written again
        with the same grant. If `fill` raises, all slots can be written again.
        """
        return self._fill(self._find(locations, keys), fill, positions, expected)

    def _fill(
        self, slots: Slots, fill: Fill, positions: NDArray[Any] | None, expected: NDArray[np.uint64] | None
    ) -> Mask:
        words, _, records, keys, headers, addresses = slots
        given = np.zeros(len(records), np.int64) if positions is None else np.ascontiguousarray(positions, np.int64)
        for name, array in (("positions", given), ("checksums", expected)):
            if array is not None and array.shape != (len(records),):
                raise ValueError(f"{name} of shape {array.shape} for {len(records)} locations")
        self._format(words, records, headers)
        numbers = self._lock_numbers(headers)
        with self._locks.locked(numbers, FORMAT_S) as mine:
            first = {number: i for i, number in reversed(list(enumerate(numbers))) if number in mine}
            ok = np.zeros(len(records), np.bool_)
            ok[list(first.values())] = True  # of two locations in one slot, only the first is written
            header.begin(words, headers, records, ok)
            sums, begun = np.zeros(len(records), np.uint64), ok.copy()
            try:
                sums[begun] = fill(ok, addresses[begun])
            except BaseException:
                ok[:] = False
                raise
            finally:
                header.undo(words, headers, records, begun & ~ok)  # so that the same grant can be tried again
            if expected is not None:
                wrong = ok & (sums != expected)
                self._count_corrupt(wrong)
                ok &= ~wrong
            header.finish(words, headers, records, keys, sums.view(np.int64), given, self._now(), ok)
        return ok

    def _count_corrupt(self, wrong: Mask) -> None:
        """Count altered blocks. Several threads may count at once."""
        if wrong.any():
            with self._mutex:
                self.corrupt += int(wrong.sum())

    def read_headers(self, locations: Locations, keys: Bytes, used: bool = True) -> BlockHeaders:
        """Return the headers of blocks, and which blocks are there.

        used: stamp the blocks as read, because the caller or a peer will copy the blocks' bytes.
        """
        slots = self._find(locations, keys)
        ok, claims = slots.check()
        slots.recheck(ok)
        self._stamp(slots, ok & used)
        return BlockHeaders(claims[:, 0].astype(np.uint64), claims[:, 1].astype(np.uint32), ok)

    def read_for_peer(self, locations: Locations, keys: Bytes) -> PeerBlocks:
        """Like `read_headers`, and also return the bytes of the blocks that are there. The reader must verify them."""
        headers = self.read_headers(locations, keys)
        return PeerBlocks(*headers, self.views(locations[headers.there]))

    def with_lengths(self, locations: Locations) -> Locations:
        """Return the same locations, but with the blocks' lengths as `bytes` instead of the slots' sizes."""
        words, _, _, _, headers, _ = self._find(locations)
        lengths = words[np.maximum(headers, 0) + header.LENGTH]
        found = locations.copy()
        sound = (headers >= 0) & (lengths > 0) & (lengths <= locations["bytes"])
        found["bytes"] = np.where(sound, lengths, locations["bytes"])
        return found

    def views(self, locations: Locations) -> list[Bytes]:
        """Return the bytes of slots, in place and unverified. Adjacent slots form one array.

        Raises ValueError if the arena does not offer a slot.
        """
        slots = self._find(locations)
        if (slots.headers < 0).any():
            offered = f"{self.offered} slabs of {self.slab_bytes} bytes are offered"
            raise ValueError(f"{self.path}: no slot at {locations[slots.headers < 0][0]}; {offered}")
        starts = slots.addresses - address_of(slots.data)
        stops = starts + locations["bytes"]
        runs = np.split(np.arange(len(locations)), np.flatnonzero(stops[:-1] != starts[1:]) + 1)
        return [slots.data[starts[run[0]] : stops[run[-1]]] for run in runs if len(run)]

    def addresses(self, locations: Locations) -> Addresses:
        """Return (n,) addresses of slots in this process's memory; 0 where the arena offers no such slot."""
        slots = self._find(locations)
        return np.where(slots.headers >= 0, slots.addresses, 0)

    # ------------------------------------------------------------------ the arena's contents

    def inventory(self) -> Contents:
        """Return all ready blocks, and all slots to sweep: slots that are being written, or whose writer died."""
        words, _ = self._memory
        found = [self._inventory_of(words, slab) for slab in range(self.offered)]
        columns = np.concatenate([part[1] for part in found]) if found else np.zeros((0, 7), np.int64)
        locations = np.concatenate([part[0] for part in found]) if found else np.zeros(0, LOCATION)
        ready, writing = columns[:, 0] == header.READY, columns[:, 0] == header.WRITING
        ready &= columns[:, 1] > header.load(words, header.FLOOR)
        keys = np.ascontiguousarray(columns[ready, 2:4]).view(np.uint8).reshape(-1, KEY_BYTES)
        positions, stamps = columns[ready, 5].astype(np.uint32), columns[ready, 6].astype(np.uint32)
        return Contents(locations[ready], keys, positions, stamps, locations[writing])

    def _inventory_of(self, words: header.Words, slab: int) -> tuple[Locations, header.Words]:
        """Return the locations of all slots of a slab, and the columns of `header.collect`."""
        entry, first = header.TABLE + 2 * slab, slab * (self.slab_bytes // ALIGN)
        while True:
            # Read the locks before the headers: the owner has raised the epoch, so writers that lock later are refused.
            busy = self._locks.busy(first, first + self.slab_bytes // ALIGN)
            slab_gen, stride = header.load(words, entry), int(words[entry + 1])
            formatted = 0 < slab_gen < GENERATIONS and stride >= ALIGN and stride % ALIGN == 0
            slots = self.slab_bytes // stride if formatted else 0
            columns = np.zeros((slots, 7), np.int64)
            locked = np.zeros(slots, np.bool_)
            locked[[i - first for i in busy if i - first < slots]] = True
            header.collect(words, self._shape[1] + first * header.HEADER_WORDS, stride, locked, columns)
            if header.load(words, entry) == slab_gen:
                break
        locations = np.zeros(slots, LOCATION)
        locations["slab"], locations["slab_gen"], locations["slot"] = slab, slab_gen if slots else 0, range(slots)
        locations["gen"] = columns[:, 1]
        locations["bytes"] = np.where(columns[:, 0] == header.READY, columns[:, 4], stride)
        return locations, columns

    def sweep(self, locations: Locations) -> NDArray[np.uint8]:
        """Return (n,) outcomes of grants: STILL_WRITTEN, FREED (a late writer will be refused) or FINISHED.

        `identify` names the block in a FINISHED slot.
        """
        words, _, records, _, headers, _ = self._find(locations)
        states = np.where(headers < 0, FREED, STILL_WRITTEN).astype(np.uint8)
        numbers = self._lock_numbers(headers)
        with self._locks.locked(numbers) as mine:
            ok = np.array([number in mine for number in numbers], np.bool_)
            header.reclaim(words, headers, records, ok, states)
        return states

    def identify(self, locations: Locations) -> tuple[Bytes, NDArray[np.uint64]]:
        """Return (n, 16) keys and (n,) generations from the headers of slots."""
        return self._find(locations).identify()

    def holds_other_length(self, locations: Locations, keys: Bytes) -> Mask:
        """Return (n,) bool: which slots hold that block, but with a length other than the location's `bytes`.

        Such a block is intact, but its reader assumes a wrong size. locations: (n,) LOCATION. keys: (n, 16) uint8.
        """
        smallest = locations.copy()
        smallest["bytes"] = ALIGN  # so that the slot is found, whatever the block's size
        slots = self._find(smallest, keys)
        found, generations = slots.identify()
        same = (slots.headers >= 0) & (found == keys).all(axis=1) & (generations == locations["gen"])
        other: Mask = same & (slots.words[np.maximum(slots.headers, 0) + header.LENGTH] != locations["bytes"])
        return other

    # ------------------------------------------------------------------ helpers

    def _find(self, locations: Locations, keys: Bytes | None = None) -> Slots:
        """Look up slots. Raises ValueError for arrays with a wrong dtype or shape."""
        keys = np.zeros((len(locations), KEY_BYTES), np.uint8) if keys is None else keys
        if locations.dtype != LOCATION or locations.ndim != 1:
            raise ValueError(
                f"locations: {locations.dtype} of shape {locations.shape}; give (n,) raykv.protocol.location.LOCATION"
            )
        if keys.dtype != np.uint8 or keys.shape != (len(locations), KEY_BYTES):
            raise ValueError(f"keys: {keys.dtype} of shape {keys.shape}; give ({len(locations)}, {KEY_BYTES}) uint8")
        # Copy locations and keys, as the kernels accept only aligned and contiguous arrays.
        records = np.array(locations, order="C").view(np.int64).reshape(-1, 4)
        words, data = self._memory
        headers, payload = np.zeros((2, len(records)), np.int64)
        header.locate(words, self._shape, records, headers, payload)
        self._populate(data, set((records[headers >= 0, 0] >> 32).tolist()))
        addresses = self._base_address(data) + payload
        return Slots(words, data, records, np.array(keys, order="C").view(np.int64), headers, addresses)

    def _base_address(self, data: Bytes) -> int:
        """Return the address of the file's first byte, to which slots' offsets are added. data: the mapping."""
        return address_of(data)

    def _altered(self, sums: NDArray[np.uint64], claimed: NDArray[np.uint64]) -> Mask:
        altered: Mask = sums != claimed
        return altered

    def _copy_out(self, rows: Rows, slots: Addresses, verify: bool) -> list[int] | None:
        """Copy slots to rows. Returns the xxh3_64 of each block if `verify`, else None."""
        copies = block_copy.copies(rows, slots, out=True)
        if rows.device is None:
            if verify:
                return block_copy.copy_summed(copies)
            block_copy.copy(copies)
            return None
        with self.reachable(rows.device, slots) as registered:
            host_copy.copy(rows.device, copies, registered, True, rows.after)
        return block_copy.sums(slots, rows.bytes) if verify else None

    def _copy_in(self, rows: Rows, slots: Addresses) -> list[int]:
        """Copy rows to slots. Returns the xxh3_64 of the bytes that are then in the slots."""
        copies, gpu = block_copy.copies(rows, slots, out=False), rows.device
        if gpu is None:
            return block_copy.copy_summed(copies)
        with self.reachable(gpu, slots) as registered:

            def fetch(which: slice) -> None:
                host_copy.copy(gpu, copies[which], registered, False, rows.after)

            return block_copy.sums_behind(fetch, slots, rows.bytes)

    def _lock_numbers(self, headers: header.Words) -> list[int]:
        """Return the numbers of the slots' locks; negative where there is no such slot."""
        return ((headers - self._shape[1]) // header.HEADER_WORDS).tolist()  # type: ignore[no-any-return]

    def _stamp(self, slots: Slots, ok: Mask) -> None:
        header.stamp(slots.words, slots.headers, self._now(), ok)

    def _now(self) -> int:
        return max(0, int(time.time()) - self._clock_base) & 0xFFFFFFFF  # 32 bits, as in `inventory`

    def _format(self, words: header.Words, records: header.Words, headers: header.Words) -> None:
        """Format slabs as their grants say, unless another process has done so."""
        if header.formatted(words, headers, records):
            return
        sound = records[(headers >= 0) & (records[:, 2] <= records[:, 3])]  # a grant is never older than its format
        for slab, slab_gen, size, epoch in {(r[0] >> 32, r[2], r[1] >> 32, epoch_of(r[3])) for r in sound.tolist()}:
            if header.load(words, header.TABLE + 2 * slab) < slab_gen:
                self._reformat(words, slab, slab_gen, slot_bytes(size), epoch)

    def _reformat(self, words: header.Words, slab: int, slab_gen: int, stride: int, epoch: int) -> None:
        first, end = slab * (self.slab_bytes // ALIGN), time.monotonic() + FORMAT_S
        while True:
            with self._locks.locked_range(first, first + self.slab_bytes // ALIGN) as locked:
                if header.load(words, header.TABLE + 2 * slab) >= slab_gen:
                    return
                if locked:
                    if header.load(words, header.EPOCH) <= epoch:
                        header.reformat(words, self._shape, slab, slab_gen, stride)
                    return
            if time.monotonic() > end:
                return
            time.sleep(AGAIN_S)


def open_own(
    pool: str,
    fingerprint: bytes,
    slab_bytes: int,
    slabs: int,
    room_check: Callable[[int], None],
    limit: int | None = None,
    cluster: bytes = NO_CLUSTER,
) -> Arena:
    """Open a node store's arena. Adopts an arena that a dead store of this user and pool left behind, or creates one.

    room_check: called with the size of a new arena that offers `limit` slabs (default: all); raises if the node has too
    little memory (`raykv.system.free_memory.check`). cluster: see `raylets.cluster_id`.
    """
    for index in itertools.count():
        path = f"{SHM}/raykv-{pool}-{os.getuid()}-{index}"
        arena = Arena.adopt(path, fingerprint, slab_bytes, slabs, cluster)
        if arena is not None:
            return arena
        if os.path.lexists(path):  # taken by a living store, another user, or another Ray cluster
            continue
        room_check(superblock.layout(slab_bytes, slabs if limit is None else limit).size)
        try:
            return Arena.create(path, fingerprint, slab_bytes, slabs, cluster)
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
