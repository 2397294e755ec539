"""CUDA by way of CuPy, which is imported only where somebody has GPU memory."""

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

LEGACY, PER_THREAD = 1, 2  # handles of CUDA's default streams


def cupy() -> Any:
    """The module; ImportError that says how to get it."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError("GPU memory needs CuPy: pip install 'raykv[gpu]' (or copy with .cpu())") from error
    return cupy


@contextlib.contextmanager
def reported(who: str) -> Iterator[Any]:
    """CuPy; what CUDA fails meanwhile is a DeviceError."""
    module = cupy()
    try:
        yield module
    except (module.cuda.runtime.CUDARuntimeError, module.cuda.driver.CUDADriverError) as error:
        raise DeviceError(f"{who}: {error}") from error


@contextlib.contextmanager
def on(ordinal: int) -> Iterator[Any]:
    """As `reported`; this thread's calls go to that GPU meanwhile."""
    with reported(uuid(ordinal)) as module, module.cuda.Device(ordinal):
        yield module


@functools.cache
def uuid(ordinal: int) -> str:
    """Of the GPU that has this number in this process, as NVML prints it. Creates no CUDA context."""
    raw: bytes = cupy().cuda.runtime.getDeviceProperties(ordinal)["uuid"]
    if len(raw) < 16:  # CuPy takes it for a C string, which ends at a zero
        buffer = (ctypes.c_ubyte * 16)()
        ctypes.CDLL("libcuda.so.1").cuDeviceGetUuid_v2(buffer, ordinal)
        raw = bytes(buffer)
    return f"GPU-{uuids.UUID(bytes=raw[:16])}"


def ordinal_at(address: int) -> int:
    """Number in this process of the GPU whose memory this is; ValueError if it is no GPU's."""
    with reported("pointerGetAttributes") as module:
        runtime = module.cuda.runtime
        found = runtime.pointerGetAttributes(address)
        if found.type not in (runtime.memoryTypeDevice, runtime.memoryTypeManaged):
            raise ValueError(f"the memory at {address:#x} is no GPU's")
        ordinal: int = found.device
        return ordinal


def stream_of(array: Any) -> int | None:
    """Handle of the stream that writes and reads an array on a GPU; None if nothing need be waited for.

    A torch tensor's is this thread's current one of its device: version 2 of the interface, which torch has, says none.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.cuda.current_stream(array.device).cuda_stream or LEGACY
    stream: int | None = array.__cuda_array_interface__.get("stream", LEGACY)
    return stream


def settled(ordinal: int, streams: set[int | None]) -> int | None:
    """The one stream that a copy must come after, or None: others are waited for here.

    Those are more than one, and a per-thread default stream, whose handle means another one in another thread.
    """
    handles = {stream for stream in streams if stream is not None}
    if len(handles) == 1 and PER_THREAD not in handles:
        return handles.pop()
    with on(ordinal) as module:
        for stream in handles:
            module.cuda.runtime.streamSynchronize(stream)
    return None


def pinned(module: Any, size: int) -> NDArray[np.uint8]:
    """(size,) uint8 of host memory that GPUs reach, from CuPy's pool, where it goes back when it is let go."""
    return np.frombuffer(module.cuda.alloc_pinned_memory(size), np.uint8, size)
