"""CUDA's driver on host memory: contexts, and what threads may do while others capture CUDA graphs.

A context is there once its GPU was the current one of some thread: `contexts` are the numbers of such GPUs.
"""

import contextlib
import ctypes
import threading

CUDADriverError = type("CUDADriverError", (RuntimeError,), {})
GLOBAL, RELAXED = 0, 2
_HANDLES = 1 << 16

contexts = set()
capturing = 0  # how many threads are
_local = threading.local()


def ctxGetCurrent():
    return getattr(_local, "context", 0)


def ctxSetCurrent(context):
    _local.context = context


def current():
    """The GPU of this thread's calls: without a context of its own it is GPU 0, which has one from now on."""
    if not ctxGetCurrent():
        make_current(0)
    return ctxGetCurrent() - _HANDLES


def make_current(device):
    contexts.add(device)
    ctxSetCurrent(_HANDLES + device)


def cuThreadExchangeStreamCaptureMode(mode):
    before, _local.mode = getattr(_local, "mode", GLOBAL), ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0]
    ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0] = before
    return 0


def cuDeviceGetUuid_v2(uuid, device):
    return 101  # of a GPU whose UUID has no zero nobody asks


@contextlib.contextmanager
def capture():
    """Some thread captures a CUDA graph meanwhile."""
    global capturing
    capturing += 1
    yield
    capturing -= 1


def forbids():
    """Whether a capture forbids this thread to allocate, to free and to page-lock."""
    return capturing and getattr(_local, "mode", GLOBAL) != RELAXED
