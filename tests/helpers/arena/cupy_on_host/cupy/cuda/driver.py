"""CUDA's driver on host memory: contexts, and which calls a thread may make while others capture CUDA graphs.

A GPU gets a context when a thread first makes the GPU current. `contexts`: numbers of the GPUs that have a context.
"""

import contextlib
import ctypes
import threading

CUDADriverError = type("CUDADriverError", (RuntimeError,), {"status": 0})
GLOBAL, RELAXED = 0, 2
_HANDLES = 1 << 16

contexts = set()
capturing = 0  # how many threads capture a CUDA graph now
_local = threading.local()


def ctxGetCurrent():
    return getattr(_local, "context", 0)


def ctxSetCurrent(context):
    _local.context = context


def current():
    """The GPU of this thread's calls. A thread without a context gets one of GPU 0."""
    if not ctxGetCurrent():
        make_current(0)
    return ctxGetCurrent() - _HANDLES


def make_current(device):
    if device not in contexts:
        contexts.add(device)
        made(device)
    ctxSetCurrent(_HANDLES + device)


def made(device):
    """Called when a GPU gets a context. `runtime` has memory taken."""


def cuThreadExchangeStreamCaptureMode(mode):
    before, _local.mode = getattr(_local, "mode", GLOBAL), ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0]
    ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0] = before
    return 0


def cuDevicePrimaryCtxGetState(device, flags, active):
    ctypes.cast(active, ctypes.POINTER(ctypes.c_int))[0] = device in contexts
    return 0


def cuDeviceGetUuid_v2(uuid, device):
    return 101  # raykv only asks here if a GPU's UUID has a zero


@contextlib.contextmanager
def capture():
    """Another thread captures a CUDA graph while the `with` block runs."""
    global capturing
    capturing += 1
    yield
    capturing -= 1


def forbids():
    """Whether a capture forbids this thread to allocate, free and page-lock."""
    return capturing and getattr(_local, "mode", GLOBAL) != RELAXED
