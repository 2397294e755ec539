"""CUDA through CuPy, which is imported only where somebody has GPU memory."""

import contextlib
import ctypes
import functools
import sys
import uuid as uuids
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.errors import DeviceError
from raykv.system.extras import to_install

LEGACY, PER_THREAD = 1, 2  # handles of CUDA's default streams


def cupy() -> Any:
    """The module; ImportError that says how to get it."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"GPU memory needs CuPy: {to_install('gpu')} (or copy with .cpu())") from error
    return cupy


@contextlib.contextmanager
def translated(who: str) -> Iterator[Any]:
    """Gives CuPy. CUDA's errors meanwhile are DeviceErrors, whose text begins with `who`."""
    module = cupy()
    try:
        yield module
    except (module.cuda.runtime.CUDARuntimeError, module.cuda.driver.CUDADriverError) as error:
        raise DeviceError(f"{who}: {error}") from error


@contextlib.contextmanager
def on(ordinal: int) -> Iterator[Any]:
    """As `translated`; this thread's calls go to that GPU meanwhile."""
    with translated(uuid(ordinal)) as module, module.cuda.Device(ordinal):
        yield module


@functools.cache
def uuid(ordinal: int) -> str:
    """UUID of the GPU that has this number in this process, as NVML prints it. Creates no CUDA context."""
    raw: bytes = cupy().cuda.runtime.getDeviceProperties(ordinal)["uuid"]
    if len(raw) < 16:  # CuPy takes it for a C string, which ends at a zero
        buffer = (ctypes.c_ubyte * 16)()
        ctypes.CDLL("libcuda.so.1").cuDeviceGetUuid_v2(buffer, ordinal)
        raw = bytes(buffer)
    return f"GPU-{uuids.UUID(bytes=raw[:16])}"


def ordinal_at(address: int) -> int:
    """Number in this process of the GPU that has this address; ValueError if no GPU has."""
    with translated("pointerGetAttributes") as module:
        runtime = module.cuda.runtime
        found = runtime.pointerGetAttributes(address)
        if found.type not in (runtime.memoryTypeDevice, runtime.memoryTypeManaged):
            raise ValueError(f"the memory at {address:#x} is no GPU's")
        ordinal: int = found.device
        return ordinal


def stream_of(array: Any) -> int | None:
    """Handle of the stream that writes and reads an array on a GPU; None: no copy need wait.

    A torch tensor's stream is this thread's current one of its device: torch's interface (version 2) names none.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.cuda.current_stream(array.device).cuda_stream or LEGACY
    stream: int | None = array.__cuda_array_interface__.get("stream", LEGACY)
    return stream


def stream_to_follow(ordinal: int, streams: set[int | None]) -> int | None:
    """The stream that a copy must be queued after. None: no copy need wait.

    Waits here for the work of several streams, and of a per-thread default stream: its handle means another stream in
    another thread.
    """
    handles = {stream for stream in streams if stream is not None}
    if len(handles) == 1 and PER_THREAD not in handles:
        return handles.pop()
    with on(ordinal) as module:
        for stream in handles:
            module.cuda.runtime.streamSynchronize(stream)
    return None


def page_locked(module: Any, size: int) -> NDArray[np.uint8]:
    """(size,) uint8 of host memory that GPUs reach, from CuPy's pool. It goes back there with its last reference."""
    return np.frombuffer(module.cuda.alloc_pinned_memory(size), np.uint8, size)
