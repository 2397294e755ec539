"""How much an engine on a GPU slows down while raykv copies over PCIe: matrix products with and without a copy.

    pip install -e '.[gpu]' torch
    python benchmarks/gpu/busy.py

The benchmark needs one GPU with 2 GiB free, and takes 20 s. "64 thread blocks" is the copy kernel with its width
for copies within GPU memory. "DMA" is one cudaMemcpyAsync of all bytes. The matrix products are in bf16:
8192 x 8192 x 8192 for a prefill, and 32 x 8192 x 8192 for a decode step.
"""

import mmap
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from raykv.arena.checksum import Copies
from raykv.arena.gpu import cuda
from raykv.arena.gpu.copy_kernel import CopyStream, Way, with_units
from raykv.arena.gpu.device import device, uuid_of

SIZE = 256 << 20
PIECES = (4 << 10, 16 << 10, 64 << 10, 2 << 20)
PRODUCTS = {"prefill": (8192, 8192, 8192, 8), "decode": (32, 8192, 8192, 150)}
TURNS = 5


def main() -> None:
    gpu = device(uuid_of(0))
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    memory[::4096] = 1
    gpu.register(memory.ctypes.data, SIZE)
    near = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    addresses: dict[Way, tuple[int, int]] = {
        "to_gpu": (near.data_ptr(), memory.ctypes.data),
        "to_host": (memory.ctypes.data, near.data_ptr()),
    }
    alone = {name: _milliseconds(*shape) for name, shape in PRODUCTS.items()}
    table = Table("way", "pieces of", "by", "GB/s beside it", *(f"{name} takes" for name in PRODUCTS))
    for way, (to, of) in addresses.items():
        for length in PIECES:
            pieces = _scattered(to, of, length)
            for name, copy in _copiers(gpu, pieces, way).items():
                rate, taken = _beside(gpu.ordinal, copy)
                slower = (f"{taken[product] / alone[product]:.2f} x" for product in PRODUCTS)
                table.add_row(way, f"{length >> 10} KiB", name, f"{rate:.1f}", *slower)
    Console().print(torch.cuda.get_device_name(), alone, table)
    gpu.unregister(memory.ctypes.data)


def _scattered(to: int, of: int, length: int) -> Copies:
    rng = np.random.default_rng(0)
    targets, sources = (rng.permutation(SIZE // length) * length for _ in range(2))
    return np.stack([to + targets, of + sources, np.full_like(targets, length)], axis=1)


def _copiers(gpu: Any, pieces: Copies, way: Way) -> dict[str, Callable[[CopyStream], None]]:
    """Return copy functions by name. Each copies all bytes, and waits for the end of the copy."""
    whole = np.array([[pieces[:, 0].min(), pieces[:, 1].min(), SIZE]])

    def wide(stream: CopyStream) -> None:
        stream._launch(with_units(pieces), 64)
        stream._stream.synchronize()

    return {
        "raykv": lambda stream: stream.copy(pieces, (), way),
        "64 thread blocks": wide,
        "DMA": lambda stream: stream.copy(whole, (), way),
    }


def _beside(ordinal: int, copy: Callable[[CopyStream], None]) -> tuple[float, dict[str, float]]:
    """Copy while matrix products run. Returns (GB/s of the copy, milliseconds of each product)."""
    stop, done = threading.Event(), []

    def run() -> None:
        with cuda.on(ordinal) as cupy:
            stream, begin = CopyStream(cupy, device(uuid_of(ordinal))._kernel), time.perf_counter()
            while not stop.is_set():
                copy(stream)
                done.append(time.perf_counter() - begin)

    thread = threading.Thread(target=run)
    thread.start()
    taken = {name: _milliseconds(*shape) for name, shape in PRODUCTS.items()}
    stop.set()
    thread.join()
    return len(done) * SIZE / done[-1] / 1e9, taken


def _milliseconds(m: int, k: int, n: int, times: int) -> float:
    """Return the milliseconds of one product: the median of TURNS turns."""
    left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    taken: list[float] = []
    for _ in range(TURNS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(times):
            left @ right
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) / times)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
