"""How a thread copies on a GPU: a whole table of copies in one kernel launch, on a stream of the thread's own.

cudaMemcpyAsync takes microseconds a piece, and a block has a piece for every layer. A kernel reads and writes
page-locked host memory and the GPU's own alike, by the same addresses.
"""

from typing import Any

import numpy as np

from raykv.arena.checksum import Copies
from raykv.arena.gpu import cuda

THREADS = 512
UNIT = THREADS * 16 * 4  # bytes that a thread block moves at once: every thread has four loads of 16 bytes in flight
BLOCKS = 64  # thread blocks of a launch, at most: an engine computes beside this
SOURCE = r"""
static __device__ void move(char* to, const char* from, long long bytes)
{
    long long done = 0;
    if ((((unsigned long long)to | (unsigned long long)from) & 15) == 0) {
        uint4* out = (uint4*)to;
        const uint4* in = (const uint4*)from;
        const long long words = bytes / 16, step = blockDim.x;
        long long i = threadIdx.x;
        for (; i + 3 * step < words; i += 4 * step) {  // all loads before the first store, which might alias them
            const uint4 a = __ldcs(in + i), b = __ldcs(in + i + step);
            const uint4 c = __ldcs(in + i + 2 * step), d = __ldcs(in + i + 3 * step);
            __stcs(out + i, a);
            __stcs(out + i + step, b);
            __stcs(out + i + 2 * step, c);
            __stcs(out + i + 3 * step, d);
        }
        for (; i < words; i += step)
            __stcs(out + i, __ldcs(in + i));
        done = words * 16;
    }
    for (long long i = done + threadIdx.x; i < bytes; i += blockDim.x)
        to[i] = from[i];
}

// pieces: (count, 4): address to, address from, bytes, and how many units there are up to the end of the piece.
// Every thread block does an equal run of the units.
extern "C" __global__ void __launch_bounds__(THREADS) raykv_copy(const long long* pieces, long long count)
{
    const long long total = pieces[4 * count - 1];
    const long long stop = total * (blockIdx.x + 1) / gridDim.x;
    long long unit = total * blockIdx.x / gridDim.x;
    long long low = 0, high = count - 1;
    while (low < high) {  // the first piece that ends after `unit`
        const long long middle = (low + high) / 2;
        if (pieces[4 * middle + 3] > unit)
            high = middle;
        else
            low = middle + 1;
    }
    for (; unit < stop; ++low) {
        const long long *piece = pieces + 4 * low, length = piece[2], end = piece[3];
        const long long first = end - (length + UNIT - 1) / UNIT;
        const long long start = (unit - first) * UNIT;
        const long long rest = stop < end ? (stop - first) * UNIT : length;
        move((char*)piece[0] + start, (const char*)piece[1] + start, rest - start);
        unit = end;
    }
}
"""


def with_units(table: Copies) -> Copies:
    """(n, 3) copies as the kernel takes them, (n, 4): with each, the number of units up to its end."""
    return np.column_stack([table, np.cumsum(-(-table[:, 2] // UNIT))])


def compile_kernel(module: Any) -> Any:
    """The kernel, compiled for the current device of CuPy (`module`)."""
    made = module.RawKernel(SOURCE, "raykv_copy", (f"-DUNIT={UNIT}LL", f"-DTHREADS={THREADS}"))
    made.compile()
    return made


class CopyStream:
    """A CUDA stream, and the memory that takes tables of copies to the GPU. For one thread."""

    def __init__(self, module: Any, kernel: Any) -> None:
        """module: CuPy, whose current device is the GPU. The caller translates CUDA's errors, here and in `copy`."""
        self._cupy, self._kernel = module, kernel
        self._stream = module.cuda.Stream(non_blocking=True)  # does not wait for the legacy default stream
        self._event = module.cuda.Event(disable_timing=True)
        self._allocate(1 << 16)

    def _allocate(self, size: int) -> None:
        self._table = self._cupy.cuda.Memory(
            size
        )  # first, since `copy` goes by `_host`: if this fails, neither is replaced
        self._host = cuda.page_locked(self._cupy, size)

    def copy(self, pieces: Copies, after: int | None) -> None:
        """Do copies, `with_units`, of at least one unit, after what is queued on stream `after`. Waits until done."""
        if pieces.nbytes > len(self._host):
            self._allocate(2 * pieces.nbytes)
        runtime, host = self._cupy.cuda.runtime, self._host[: pieces.nbytes]
        host[:] = pieces.view(np.uint8).ravel()
        if after is not None:
            runtime.eventRecord(self._event.ptr, after)
            runtime.streamWaitEvent(self._stream.ptr, self._event.ptr)
        kind = runtime.memcpyHostToDevice
        try:
            runtime.memcpyAsync(self._table.ptr, host.ctypes.data, host.nbytes, kind, self._stream.ptr)
            with self._stream:
                blocks = min(BLOCKS, int(pieces[-1, 3]))
                self._kernel((blocks,), (THREADS,), (np.int64(self._table.ptr), np.int64(len(pieces))))
        finally:
            self._stream.synchronize()  # whatever happens, nothing is moving when the caller drops its locks
