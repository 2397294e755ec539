"""One GPU: memory that other processes can open, and copies from and to this memory."""

import functools
import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from raykv.arena.checksum import Copies
from raykv.arena.gpu import cuda
from raykv.arena.gpu.copy_kernel import CopyStream, Way, compile_kernel
from raykv.config import Size, capacity_bytes, parse_size
from raykv.errors import CapacityError, DeviceError
from raykv.system.extras import to_install

BOUNCE_BYTES = 8 << 20  # size of a bounce buffer
HANDLE_BYTES = 64
_GRAIN = 2 << 20  # CUDA exports memory in units of this size: a smaller allocation is exported with its neighbours
_OUT_OF_MEMORY, _PORTABLE = 2, 1  # cudaErrorMemoryAllocation, cudaHostRegisterPortable


def visible() -> list[str]:
    """Return the UUIDs of the GPUs that this process can use, as NVML and vLLM print them: "GPU-8932f937-d72c-...".

    The list is empty without CuPy, driver or GPU. Creates no CUDA context.
    """
    try:
        count = cuda.cupy().cuda.runtime.getDeviceCount()
        return [cuda.uuid(ordinal) for ordinal in range(count)]
    except (ImportError, RuntimeError):  # CUDA's errors are RuntimeErrors
        return []


def uuid_of(given: str | int) -> str:
    """Return a usable GPU's UUID, given its UUID, number, or "cuda:<number>". Raises ValueError if there is none."""
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
        f"without CuPy it is none: {to_install('gpu')}"
    )


@functools.cache
def device(uuid: str) -> "Device":
    """Return the GPU, ready to copy. Raises ValueError if this process can't use it, and DeviceError if it fails."""
    found = visible()
    if uuid not in found:
        raise ValueError(f"GPU {uuid}: {_usable(found)}")
    return Device(uuid, found.index(uuid))


class Region:
    """A range of a GPU's memory, valid until `close`. Get one from `Device.allocate` or `Device.open`."""

    def __init__(self, address: int, size: int, handle: bytes, release: Callable[[int], None]) -> None:
        """release: frees or unmaps the address. handle: lets another process open the region."""
        self.address, self.size, self.handle = address, size, handle
        self._release: Callable[[int], None] | None = release

    def close(self) -> None:
        """Free the memory, or unmap it if it is another process's. No copies may follow. A second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release(self.address)


class Device:
    """A GPU of this machine. Get one from `device(uuid)`. Thread-safe. Errors of CUDA become DeviceErrors."""

    def __init__(self, uuid: str, ordinal: int) -> None:
        """Only `device` calls this. ordinal: the GPU's number in this process."""
        self.uuid, self.ordinal = uuid, ordinal
        self._idle: list[CopyStream] = []  # streams that no copy uses now
        try:
            with cuda.on(ordinal) as cupy:
                self._kernel = compile_kernel(cupy)  # before anybody waits for it
        except DeviceError:
            raise
        except Exception as error:  # CuPy raises various errors: no NVRTC, no headers of CUDA
            raise DeviceError(f"{uuid}: the copy kernel can't be compiled: {error}. {to_install('gpu')}") from error

    def capacity(self, gpu_memory: Size, beside: int = 0) -> int:
        """Return the size of a region in bytes. gpu_memory: a fraction of the GPU's memory, or bytes: see `parse_size`.

        beside: bytes that NCCL will take in addition. Raises CapacityError if the sum does not fit into the GPU's free
        memory, and ValueError for an invalid size.
        """
        size = parse_size("gpu_memory", gpu_memory)
        free, total = self._memory()
        asked = capacity_bytes(size, total)
        if asked + beside > free:
            nccl = f", {beside >> 20} MiB of it for NCCL" if beside else ""
            raise CapacityError(self._refusal(asked + beside, free, total, nccl))
        return asked

    def allocate(self, size: int) -> Region:
        """Allocate a region that this process owns. Raises CapacityError if the GPU has no room for it."""
        if size <= 0:
            raise ValueError(f"size={size}: a region has at least a byte")
        with cuda.on(self.ordinal) as cupy:
            runtime = cupy.cuda.runtime
            try:
                address = runtime.malloc(-(-size // _GRAIN) * _GRAIN)  # not from CuPy's pool, which has no handles
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
        """Open another process's region by its handle and size. The process that allocated a region can't open it."""
        if len(handle) != HANDLE_BYTES or size <= 0:
            raise ValueError(
                f"a handle of {len(handle)} bytes, size={size}: give a Region's handle (64 bytes) and size"
            )
        with cuda.on(self.ordinal) as cupy:
            return Region(cupy.cuda.runtime.ipcOpenMemHandle(handle), size, handle, self._release)

    def copy(self, table: Copies, after: Sequence[cuda.Event] = (), way: Way = "within") -> None:
        """Do the copies, and wait until they are done. The GIL is free meanwhile.

        table: (pieces, 3) or (blocks, parts, 3) int64: target address, source address, length. Each address must be in
        this GPU's memory or in page-locked memory. Any other address makes CUDA fail permanently in this process.
        Copies must not overlap.
        after: events that must end first. way: "within" GPU memory, or "to_host" or "to_gpu" across PCIe.
        """
        if table.dtype != np.int64 or table.ndim not in (2, 3) or table.shape[-1] != 3:
            raise ValueError(f"copies: {table.dtype} of shape {table.shape}: give (pieces, 3) int64")
        if (table < 0).any():
            raise ValueError(f"copies: {table[(table < 0).any(-1)][0].tolist()} has a negative address or length")
        if not table[..., 2].any():
            return
        with cuda.on(self.ordinal) as cupy:
            try:
                stream = self._idle.pop()
            except IndexError:
                stream = CopyStream(cupy, self._kernel)
            try:
                stream.copy(table.reshape(-1, 3), after, way)
            finally:
                self._idle.append(stream)

    def register(self, address: int, length: int) -> None:
        """Page-lock a range of this process's memory, so that GPUs can reach it. Raises DeviceError if CUDA refuses.

        Ranges must not overlap. GPUs can reach only the pages that the range has during this call. So call `unregister`
        before these pages are unmapped, or discarded from the mapped file.
        """
        if length <= 0:
            raise ValueError(f"length={length}: there is nothing to register")
        with cuda.on(self.ordinal) as cupy:
            cupy.cuda.runtime.hostRegister(address, length, _PORTABLE)

    def unregister(self, address: int) -> None:
        """Undo the `register` of the range that begins at this address. Call this before the range is freed."""
        with cuda.on(self.ordinal) as cupy:
            cupy.cuda.runtime.hostUnregister(address)

    def bounce_buffer(self) -> NDArray[np.uint8]:
        """Return a page-locked buffer of BOUNCE_BYTES for copies from or to pageable memory. Drop it after use."""
        with cuda.on(self.ordinal) as cupy:
            return cuda.page_locked(cupy, BOUNCE_BYTES)

    def _memory(self) -> tuple[int, int]:
        """Return (free bytes, total bytes) of the GPU's memory."""
        with cuda.on(self.ordinal) as cupy:
            free, total = cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)

    def _refusal(self, asked: int, free: int, total: int, nccl: str = "") -> str:
        return (
            f"{self.uuid}: asked for {asked >> 20} MiB ({asked} bytes) of GPU memory{nccl}, {free >> 20} of "
            f"{total >> 20} MiB are free: lower gpu_memory, or leave more to raykv where an engine has taken the rest "
            f"(vLLM: a lower gpu_memory_utilization)"
        )

    def _free(self, address: int) -> None:
        with cuda.on(self.ordinal) as cupy:
            cupy.cuda.runtime.free(address)

    def _release(self, address: int) -> None:
        with cuda.on(self.ordinal) as cupy:
            cupy.cuda.runtime.ipcCloseMemHandle(address)
