"""CUDA through CuPy, which is imported only if a caller has GPU memory."""

import contextlib
import ctypes
import functools
import os
import sys
import uuid as uuids
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from raykv.errors import DeviceError
from raykv.system.extras import to_install

LEGACY = 1  # handle of CUDA's default stream
P = ParamSpec("P")
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
CAPTURED = (900, 901)  # cudaErrorStreamCaptureUnsupported, ...Invalidated: a CUDA graph is being captured


def cupy() -> Any:
    """Return the module CuPy. If CuPy is missing, raises an ImportError that says how to install it."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"GPU memory needs CuPy: {to_install('gpu')} (or copy with .cpu())") from error
    return cupy


@contextlib.contextmanager
def translated(who: str) -> Iterator[Any]:
    """Yield CuPy. In the `with` block, CUDA's errors become DeviceErrors, whose text begins with `who`."""
    module = cupy()
    try:
        yield module
    except (module.cuda.runtime.CUDARuntimeError, module.cuda.driver.CUDADriverError) as error:
        told = DeviceError(f"{who}: {error}")
        told.status = error.status
        raise told from error


@contextlib.contextmanager
def on(ordinal: int) -> Iterator[Any]:
    """Like `translated`. In the `with` block this thread uses that GPU, even while other threads capture CUDA graphs.

    Afterwards the thread's earlier state is restored. CuPy's Device would afterwards select GPU 0 in a thread that
    used no GPU before. A context on GPU 0 takes half a GiB.
    """
    with translated(uuid(ordinal)) as module:
        driver, context = module.cuda.driver, _context(ordinal)
        before, mode = driver.ctxGetCurrent(), _exchange_capture_mode(_RELAXED)
        try:
            driver.ctxSetCurrent(context)
            yield module
        finally:
            driver.ctxSetCurrent(before)
            _exchange_capture_mode(mode)


@functools.cache
def _context(ordinal: int) -> int:
    """Return the handle of the GPU's primary context, which all users of the GPU in this process share."""
    with ThreadPoolExecutor(1) as thread:  # in a new thread, as `setDevice` changes the GPU of its thread
        return thread.submit(_make_context, ordinal).result()


def _make_context(ordinal: int) -> int:
    _exchange_capture_mode(_RELAXED)
    cupy().cuda.runtime.setDevice(ordinal)
    context: int = cupy().cuda.driver.ctxGetCurrent()
    return context


def _exchange_capture_mode(mode: int) -> int:
    """Set how this thread's calls treat captures of CUDA graphs in other threads. Returns the earlier mode.

    In CUDA's default mode an allocation, free or page-lock here would fail, and would end a capture in another thread.
    """
    word = ctypes.c_int(mode)
    _libcuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(word))
    return word.value


@functools.cache
def _libcuda() -> ctypes.CDLL:
    """Return the driver's library, for functions that CuPy lacks."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def uuid(ordinal: int) -> str:
    """Return the UUID of the GPU with this number in this process, as NVML prints it. Creates no CUDA context."""
    raw: bytes = cupy().cuda.runtime.getDeviceProperties(ordinal)["uuid"]
    if len(raw) < 16:  # CuPy treats the UUID as a C string, and cuts it at a zero
        buffer = (ctypes.c_ubyte * 16)()
        if status := _libcuda().cuDeviceGetUuid_v2(buffer, ordinal):
            raise DeviceError(f"GPU {ordinal}: the driver does not tell its UUID: CUresult {status}")
        raw = bytes(buffer)
    return f"GPU-{uuids.UUID(bytes=raw[:16])}"


def ordinal_at(address: int) -> int:
    """Return the number, in this process, of the GPU with this address. Raises ValueError if it is no GPU's address."""
    with translated("pointerGetAttributes") as module:
        runtime = module.cuda.runtime
        found = runtime.pointerGetAttributes(address)
        if found.type not in (runtime.memoryTypeDevice, runtime.memoryTypeManaged):
            raise ValueError(f"the memory at {address:#x} is no GPU's")
        ordinal: int = found.device
        return ordinal


def stream_of(array: Any) -> int | None:
    """Return the handle of the stream that uses an array on a GPU, or None if copies need not wait for a stream.

    For a torch tensor, this is the thread's current stream on the tensor's GPU, as torch's interface names no stream.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.cuda.current_stream(array.device).cuda_stream or LEGACY
    stream: int | None = array.__cuda_array_interface__.get("stream", LEGACY)
    return stream


class Event:
    """A CUDA event, destroyed on its own GPU.

    CuPy's own Event is destroyed in the thread that drops it. If this thread has no GPU, it gets a context on GPU 0.
    """

    def __init__(self, module: Any, ordinal: int) -> None:
        """module: CuPy, whose current device is the GPU with the number `ordinal`."""
        runtime = module.cuda.runtime
        self.ptr: int = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        when_gone(self, _destroy_event, ordinal, self.ptr)


def _destroy_event(ordinal: int, event: int) -> None:
    with on(ordinal) as module:
        module.cuda.runtime.eventDestroy(event)


def events_after(ordinal: int, streams: set[int | None]) -> tuple[Event, ...]:
    """Record CUDA events that end when these streams have finished their current work. Ignores None."""
    handles = streams - {None}
    if not handles:
        return ()
    with on(ordinal) as module:
        events = tuple(Event(module, ordinal) for _ in handles)
        for event, handle in zip(events, handles, strict=True):
            module.cuda.runtime.eventRecord(event.ptr, handle)
    return events


def when_gone(owner: object, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `function` when `owner` is garbage-collected, but not at the interpreter's exit or in a forked child."""
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            with contextlib.suppress(DeviceError):  # a lost GPU has nothing left to free
                function(*args, **kwargs)

    weakref.finalize(owner, call).atexit = False


def page_locked(module: Any, size: int) -> NDArray[np.uint8]:
    """Return (size,) uint8 of host memory that GPUs can reach, from CuPy's pool.

    When the last reference is dropped, the memory returns to the pool.
    """
    return np.frombuffer(module.cuda.alloc_pinned_memory(size), np.uint8, size)
