"""One GPU: room in its memory, which other processes can open, and copies from and to it."""

import functools
import logging
import os
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from raykv.arena.checksum import Copies
from raykv.arena.gpu import cuda
from raykv.arena.gpu.copy_kernel import Courier, kernel, numbered
from raykv.config import capacity_bytes
from raykv.errors import CapacityError, DeviceError

BOUNCE_BYTES = 8 << 20
HANDLE_BYTES = 64
_GRAIN = 2 << 20  # CUDA exports memory in grains of this size: with no smaller one, nothing else goes along
_OUT_OF_MEMORY, _PORTABLE = 2, 1  # cudaErrorMemoryAllocation, cudaHostRegisterPortable
log = logging.getLogger("raykv")

_pinned: dict[tuple[int, int], bool] = {}  # ranges of this process's memory, and whether CUDA took them
_mutex = threading.RLock()  # what is collected meanwhile may be unpinned by the thread that holds it


def visible() -> list[str]:
    """UUIDs of the GPUs that this process can use, as NVML and vLLM print them: "GPU-8932f937-d72c-...".

    Empty where there is no CuPy, driver or GPU. Creates no CUDA context.
    """
    try:
        count = cuda.cupy().cuda.runtime.getDeviceCount()
        return [cuda.uuid(ordinal) for ordinal in range(count)]
    except (ImportError, RuntimeError):  # CUDA's errors are RuntimeErrors
        return []


def uuid_of(given: str | int) -> str:
    """UUID of a GPU that this process can use, by that, its number, or "cuda:<number>". ValueError if there is none."""
    found, text = visible(), str(given).removeprefix("cuda").removeprefix(":") or "0"
    if text in found:
        return text
    if text.isdecimal() and int(text) < len(found):
        return found[int(text)]
    raise ValueError(f"device={given!r}: {_usable(found)}")


def _usable(found: list[str]) -> str:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return (
        f"this process can use {', '.join(found) or 'no GPU'} (CUDA_VISIBLE_DEVICES: {seen}); "
        f"without CuPy it is none: pip install 'raykv[gpu]'"
    )


@functools.cache
def device(uuid: str) -> "Device":
    """The GPU, ready to copy. ValueError if this process cannot use it; DeviceError if it fails."""
    found = visible()
    if uuid not in found:
        raise ValueError(f"GPU {uuid}: {_usable(found)}")
    return Device(uuid, found.index(uuid))


class Region:
    """Bytes of a GPU's memory, until `close`. Get one from `Device.allocate` or `Device.open`."""

    def __init__(self, address: int, size: int, handle: bytes, release: Callable[[int], None]) -> None:
        """release: how the address is given back. handle: what another process opens the region by."""
        self.address, self.size, self.handle = address, size, handle
        self._release: Callable[[int], None] | None = release

    def close(self) -> None:
        """Give the memory back, or let go of another process's; nobody may copy there by now. Once is enough."""
        release, self._release = self._release, None
        if release is not None:
            release(self.address)


class Device:
    """A GPU of this machine. Get one from `device(uuid)`. Thread-safe. What CUDA fails is a DeviceError."""

    def __init__(self, uuid: str, ordinal: int) -> None:
        """For `device`. ordinal: its number in this process."""
        self.uuid, self.ordinal = uuid, ordinal
        self._couriers = threading.local()
        with cuda.on(ordinal) as cupy:
            self._kernel = kernel(cupy)  # before anybody waits for it

    def capacity(self, gpu_memory: float | int) -> int:
        """Bytes of a region: a fraction of the GPU's memory (float in (0, 1]) or bytes (int).

        CapacityError if less is free. ValueError for anything else.
        """
        fraction = isinstance(gpu_memory, float) and 0 < gpu_memory <= 1
        size = isinstance(gpu_memory, int) and not isinstance(gpu_memory, bool) and gpu_memory > 0
        if not fraction and not size:
            raise ValueError(f"gpu_memory={gpu_memory!r}: give a fraction in (0, 1] (float) or bytes (int)")
        free, total = self._memory()
        asked = capacity_bytes(gpu_memory, total)
        if asked > free:
            raise CapacityError(self._refusal(asked, free, total))
        return asked

    def allocate(self, size: int) -> Region:
        """A new region of this process. CapacityError if the GPU has no room for it."""
        if size <= 0:
            raise ValueError(f"size={size}: a region has at least a byte")
        with cuda.on(self.ordinal) as cupy:
            runtime = cupy.cuda.runtime
            try:
                address = runtime.malloc(-(-size // _GRAIN) * _GRAIN)  # not of CuPy's pool, which has no handles
            except runtime.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                raise CapacityError(self._refusal(size, *self._memory())) from error
            try:
                return Region(address, size, runtime.ipcGetMemHandle(address), self._free)
            except BaseException:
                runtime.free(address)
                raise

    def open(self, handle: bytes, size: int) -> Region:
        """Another process's region, by its handle and size; this process must not be the one that allocated it."""
        if len(handle) != HANDLE_BYTES or size <= 0:
            raise ValueError(
                f"a handle of {len(handle)} bytes, size={size}: give a Region's handle (64 bytes) and size"
            )
        with cuda.on(self.ordinal) as cupy:
            return Region(cupy.cuda.runtime.ipcOpenMemHandle(handle), size, handle, self._release)

    def copy(self, table: Copies, after: int | None = None) -> None:
        """Do the copies, in one launch, and wait until they are done. The GIL is free meanwhile.

        table: (pieces, 3) or (blocks, parts, 3) int64: addresses to and from, and length. Each is of this GPU's memory
        or pinned; an address that is neither takes the whole process's GPU down. Copies must not overlap.
        after: handle of a CUDA stream of this GPU: what it has been given to do by now is done first.
        """
        if table.dtype != np.int64 or table.ndim not in (2, 3) or table.shape[-1] != 3:
            raise ValueError(f"copies: {table.dtype} of shape {table.shape}: give (pieces, 3) int64")
        if (table < 0).any():
            raise ValueError(f"copies: {table[(table < 0).any(-1)][0].tolist()} has a negative address or length")
        pieces = numbered(table.reshape(-1, 3))
        if not len(pieces) or not pieces[-1, 3]:
            return
        with cuda.on(self.ordinal) as cupy:
            if not hasattr(self._couriers, "mine"):
                self._couriers.mine = Courier(cupy, self._kernel)
            self._couriers.mine.copy(pieces, after)

    def pin(self, address: int, length: int) -> bool:
        """Let GPUs reach a range of this process's memory until `unpin`. Whether they can.

        CUDA is asked once for the same range; that it refused is logged, and remembered. Ranges must not overlap. GPUs
        see the pages that are there now: `unpin` before they are unmapped, or discarded from the file that is mapped.
        """
        if length <= 0:
            raise ValueError(f"length={length}: there is nothing to pin")
        with _mutex:
            if (address, length) not in _pinned:
                _pinned[address, length] = self._register(address, length)
            return _pinned[address, length]

    def _register(self, address: int, length: int) -> bool:
        try:
            with cuda.on(self.ordinal) as cupy:
                cupy.cuda.runtime.hostRegister(address, length, _PORTABLE)  # for every GPU that this process uses
        except DeviceError as error:
            log.warning("%d bytes of host memory cannot be pinned, copies take a way round: %s", length, error)
            return False
        return True

    def unpin(self, address: int, length: int) -> None:
        """Undo `pin`, before the memory goes; of a range that is not pinned, nothing."""
        with _mutex:
            if _pinned.pop((address, length), False):
                with cuda.on(self.ordinal) as cupy:
                    cupy.cuda.runtime.hostUnregister(address)

    def bounce(self) -> NDArray[np.uint8]:
        """(BOUNCE_BYTES,) uint8, pinned, for bytes on their way from or to memory that is not. Let it go after use."""
        with cuda.on(self.ordinal) as cupy:
            return cuda.pinned(cupy, BOUNCE_BYTES)

    def _memory(self) -> tuple[int, int]:
        """Bytes free, and in all."""
        with cuda.on(self.ordinal) as cupy:
            free, total = cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)

    def _refusal(self, asked: int, free: int, total: int) -> str:
        return (
            f"{self.uuid}: asked for {asked >> 20} MiB ({asked} bytes) of GPU memory, {free >> 20} of {total >> 20} "
            f"MiB are free: lower gpu_memory, or leave more to raykv where an engine has taken the rest (vLLM: a lower "
            f"gpu_memory_utilization)"
        )

    def _free(self, address: int) -> None:
        with cuda.on(self.ordinal) as cupy:
            cupy.cuda.runtime.free(address)

    def _release(self, address: int) -> None:
        with cuda.on(self.ordinal) as cupy:
            cupy.cuda.runtime.ipcCloseMemHandle(address)
