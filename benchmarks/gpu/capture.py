"""Whether raykv may allocate, copy and page-lock while an engine captures a CUDA graph in another thread.

    python benchmarks/gpu/capture.py

The script needs torch with CUDA. It returns 1 if a call of raykv or the capture fails, or if the graph's result is
wrong. vLLM captures graphs at its start and later. One of vLLM's own threads used to page-lock memory, which broke
captures (vLLM's issue 46933).
"""

import mmap
import sys
import threading

import numpy as np
import torch

from raykv.arena.gpu.copy_kernel import Way
from raykv.arena.gpu.device import Device, device, uuid_of

SIZE = 64 << 20


def main() -> int:
    gpu, x = device(uuid_of(0)), torch.randn(512, 512, device="cuda")
    wanted = (x @ x) @ x
    torch.cuda.synchronize()
    began, errors, graph = threading.Event(), list[str](), torch.cuda.CUDAGraph()

    def other() -> None:
        began.wait()
        try:
            _all_that_calls_cuda(gpu)
        except Exception as error:
            errors.append(f"raykv: {error}")

    thread = threading.Thread(target=other)
    thread.start()
    try:
        with torch.cuda.graph(graph):
            y = x @ x
            began.set()
            thread.join()
            z = y @ x
        graph.replay()
        torch.cuda.synchronize()
        if not torch.allclose(z, wanted):
            errors.append("the graph's result is wrong")
    except RuntimeError as error:
        errors.append(f"the capture: {error}")
        began.set()
        thread.join()
    print("\n".join(errors) or "raykv and the capture: both went on")
    return 1 if errors else 0


def _all_that_calls_cuda(gpu: Device) -> None:
    """Page-lock memory, allocate memory, copy both ways by the kernel and by DMA, and free all memory."""
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    memory[::4096] = 1
    gpu.register(memory.ctypes.data, SIZE)
    region = gpu.allocate(SIZE)
    ways: dict[Way, tuple[int, int]] = {
        "to_gpu": (region.address, memory.ctypes.data),
        "to_host": (memory.ctypes.data, region.address),
    }
    for way, (to, of) in ways.items():
        for length in (4 << 10, SIZE):
            gpu.copy(np.array([[to, of, length]]), (), way)
    region.close()
    gpu.unregister(memory.ctypes.data)


if __name__ == "__main__":
    sys.exit(main())
