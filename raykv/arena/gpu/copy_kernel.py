"""Does a whole table of copies on a GPU, in one kernel launch or by the GPU's copy engines.

cudaMemcpyAsync takes microseconds for each piece, and a block may have a piece for every layer. A kernel can read and
write both page-locked host memory and GPU memory. But a kernel takes multiprocessors from the engine. So across PCIe
the kernel gets just enough thread blocks to fill the link. Long pieces are copied by cudaMemcpyAsync, which uses no
multiprocessor.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from raykv.arena.checksum import Copies
from raykv.arena.gpu import cuda

THREADS = 512
UNIT = THREADS * 16 * 4  # bytes that a thread block moves at once: every thread has four loads of 16 bytes in flight
Way = Literal["within", "to_host", "to_gpu"]  # direction of a copy: within GPU memory, or across PCIe
# BLOCKS: maximum number of thread blocks of a launch. IN_FLIGHT: maximum bytes in flight in a launch. Too many thread
# blocks delay the engine. On an H100, 64 thread blocks that copy to the host make decode steps ten times slower.
BLOCKS: dict[Way, int] = {"within": 64, "to_host": 8, "to_gpu": 32}
IN_FLIGHT: dict[Way, int] = {"to_host": 2 * UNIT, "to_gpu": 6 * UNIT}
LONG = 512 << 10  # across PCIe, pieces of this mean length or longer are copied by cudaMemcpyAsync
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
    """Return (n, 3) copies in the kernel's form (n, 4), whose last column counts the units up to each copy's end."""
    return np.column_stack([table, np.cumsum(-(-table[:, 2] // UNIT))])


def compile_kernel(module: Any) -> Any:
    """Compile the kernel for the current device of CuPy (`module`)."""
    made = module.RawKernel(SOURCE, "raykv_copy", (f"-DUNIT={UNIT}LL", f"-DTHREADS={THREADS}"))
    made.compile()
    return made


def blocks_of(table: Copies, way: Way) -> int:
    """Return the number of thread blocks for these copies. Each thread block has at most a unit in flight."""
    if way == "within":
        return BLOCKS[way]
    length = min(UNIT, max(1, int(table[:, 2].mean())))
    return max(1, min(BLOCKS[way], IN_FLIGHT[way] // length))


class CopyStream:
    """A CUDA stream, and memory for sending tables of copies to the GPU. Only one thread at a time may use it."""

    def __init__(self, module: Any, kernel: Any) -> None:
        """module: CuPy, whose current device is the GPU. The caller translates CUDA's errors, here and in `copy`."""
        self._cupy, self._kernel = module, kernel
        self._stream = module.cuda.Stream(non_blocking=True)  # does not wait for the legacy default stream
        self._allocate(1 << 16)

    def _allocate(self, size: int) -> None:
        # allocate the table first: if this fails, `_host` must stay small, as `_launch` checks only the size of `_host`
        self._table = self._cupy.cuda.Memory(size)
        self._host = cuda.page_locked(self._cupy, size)

    def copy(self, table: Copies, after: Sequence[Any], way: Way) -> None:
        """Do (n, 3) copies after the CUDA events `after`. Waits until they are done."""
        runtime = self._cupy.cuda.runtime
        for event in after:  # only the GPU waits: this thread prepares the copies meanwhile
            runtime.streamWaitEvent(self._stream.ptr, event.ptr)
        try:
            if way != "within" and int(table[:, 2].sum()) >= LONG * len(table):
                for to, of, length in table.tolist():
                    runtime.memcpyAsync(to, of, length, runtime.memcpyDefault, self._stream.ptr)
            else:
                self._launch(with_units(table), blocks_of(table, way))
        finally:
            self._stream.synchronize()  # also after an error, as the caller then releases its locks

    def _launch(self, pieces: Copies, blocks: int) -> None:
        if pieces.nbytes > len(self._host):
            self._allocate(2 * pieces.nbytes)
        runtime, host = self._cupy.cuda.runtime, self._host[: pieces.nbytes]
        host[:] = pieces.view(np.uint8).ravel()
        kind = runtime.memcpyHostToDevice
        runtime.memcpyAsync(self._table.ptr, host.ctypes.data, host.nbytes, kind, self._stream.ptr)
        with self._stream:
            grid = min(blocks, int(pieces[-1, 3]))
            self._kernel((grid,), (THREADS,), (np.int64(self._table.ptr), np.int64(len(pieces))))
