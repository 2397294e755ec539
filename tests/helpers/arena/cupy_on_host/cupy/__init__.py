"""A stand-in for the parts of CuPy that raykv uses, on host memory. Tests put the folder above this on sys.path.

A stream does its work only when somebody waits for the stream. An access to an address that a GPU could not reach loses
the GPU. Other processes open a GPU's memory by 64-byte handles. Loading libcuda.so.1 returns `driver`.
CUPY_ON_HOST_WITHOUT_HEADERS: a file; no kernel is compiled while it exists.
"""

import ctypes
import os

import numpy as np

from cupy import cuda
from cupy.cuda import driver, runtime

uint8 = np.uint8
_load = ctypes.CDLL
ctypes.CDLL = lambda name, *more, **options: driver if name == "libcuda.so.1" else _load(name, *more, **options)


class ndarray:
    """A C-contiguous array on the current device."""

    def __init__(self, shape, dtype=np.float64):
        self.shape = tuple(np.atleast_1d(shape).tolist())
        self.dtype = np.dtype(dtype)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.data = cuda.Memory(max(1, self.nbytes))

    @property
    def __cuda_array_interface__(self):
        stream = cuda.get_current_stream().ptr or runtime.streamLegacy
        about = {"shape": self.shape, "typestr": self.dtype.str, "strides": None, "version": 3}
        return {**about, "data": (self.data.ptr, False), "stream": stream}

    def get(self):
        found = np.empty(self.shape, self.dtype)
        runtime.streamSynchronize(cuda.get_current_stream().ptr)
        ctypes.memmove(found.ctypes.data, self.data.ptr, self.nbytes)
        return found


def zeros(shape, dtype=np.float64):
    return ndarray(shape, dtype)


def asarray(given):
    given = np.ascontiguousarray(given)
    made = ndarray(given.shape, given.dtype)
    ctypes.memmove(made.data.ptr, given.ctypes.data, given.nbytes)
    return made


class RawKernel:
    """Does in Python what raykv's copy kernel does, a unit at a time. The kernel's source is not used."""

    def __init__(self, code, name, options=()):
        assert name == "raykv_copy" and "raykv_copy" in code
        defined = dict(option.removeprefix("-D").split("=") for option in options)
        self._unit, self._threads = int(defined["UNIT"].removesuffix("LL")), int(defined["THREADS"])

    def compile(self):
        runtime.check()
        if os.path.exists(os.environ.get("CUPY_ON_HOST_WITHOUT_HEADERS", "")):
            raise RuntimeError("Failed to find CUDA headers")

    def __call__(self, grid, block, args):
        table, count = args
        assert isinstance(table, np.int64) and isinstance(count, np.int64), "the kernel takes two words of 8 bytes"
        assert block == (self._threads,) and len(grid) == 1 and grid[0] > 0
        device = runtime.getDevice()
        runtime.enqueue(cuda.get_current_stream().ptr, lambda: self._run(device, int(table), int(count), grid[0]))

    def _run(self, device, table, count, blocks):
        runtime.reach(device, table, 32 * count)
        words = (ctypes.c_int64 * (4 * count)).from_address(table)
        pieces = np.array(words).reshape(count, 4)
        total = int(pieces[-1, 3])
        for block in range(blocks):
            for unit in range(total * block // blocks, total * (block + 1) // blocks):
                to, of, length, end = pieces[np.searchsorted(pieces[:, 3], unit, side="right")].tolist()
                at = (unit - (end - -(-length // self._unit))) * self._unit
                runtime.move(device, to + at, of + at, min(self._unit, length - at))
