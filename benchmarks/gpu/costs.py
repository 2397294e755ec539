"""Costs of raykv on a GPU besides copies: MiB of a process's context and of an NCCL pair, seconds to page-lock a GiB.

    python benchmarks/gpu/costs.py

The benchmark needs one GPU with 3 GiB free. With two GPUs, it also tells whether an engine on the second GPU creates a
context on the first, and returns 1 if so. The NCCL pair connects two processes on the first GPU by sockets.
"""

import ctypes
import mmap
import os
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from rich.console import Console

from raykv.arena.gpu.device import Device, device, visible
from raykv.transports import nccl_pair

MIB, GIB = 1 << 20, 1 << 30
CONNECT_S = 60.0
HUGE_PAGES, NO_HUGE_PAGES = 14, 15  # MADV_HUGEPAGE, MADV_NOHUGEPAGE
SMI = ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current", "--format=csv"]
spawn = get_context("spawn")


def main() -> int:
    console, gpus = Console(), visible()
    gpu = device(gpus[0])
    console.print(_smi(), f"{len(gpus)} GPUs, {_free(gpu) / GIB:.1f} GiB free on the first", sep="\n")
    console.print(f"a process's context: {_context(gpu) / MIB:.0f} MiB")
    for huge in (True, False):
        seconds, taken = _page_lock(gpu, huge)
        kind = "huge pages" if huge else "pages of 4 KiB"
        console.print(f"page-locking {kind}: {seconds:.3f} s a GiB, {taken / MIB:.0f} MiB of the GPU")
    if why := nccl_pair.why_not():
        console.print(f"NCCL: {why}")
    else:
        seconds, taken = _pair(gpu)
        console.print(f"an NCCL pair: {seconds:.2f} s to connect, {taken / MIB:.0f} MiB of both processes")
    if len(gpus) < 2:
        return 0
    active = _in_a_process(_copy_on_the_second)
    console.print(f"contexts of an engine on the second GPU: {active}")
    return 1 if active[0] else 0


def _smi() -> str:
    try:
        return subprocess.run(SMI, capture_output=True, text=True, check=True).stdout.strip()
    except OSError as error:
        return f"nvidia-smi: {error}"


def _free(gpu: Device) -> int:
    return gpu._memory()[0]


def _context(gpu: Device) -> int:
    """Bytes of GPU memory that a process takes before its first copy."""
    before = _free(gpu)
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=_stay, args=(theirs, gpu.uuid), daemon=True)
    process.start()
    theirs.close()
    pipe.recv()
    taken = before - _free(gpu)
    process.kill()
    process.join()
    return taken


def _stay(pipe: Connection, gpu: str) -> None:
    device(gpu)
    pipe.send("ready")
    pipe.recv()


def _page_lock(gpu: Device, huge: bool) -> tuple[float, int]:
    """Page-lock a GiB of shared memory. Returns (seconds, bytes of GPU memory) that this takes."""
    memory = np.frombuffer(mmap.mmap(-1, GIB), np.uint8)
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(GIB), HUGE_PAGES if huge else NO_HUGE_PAGES)
    memory[::4096] = 1
    before, begin = _free(gpu), time.perf_counter()
    gpu.register(memory.ctypes.data, GIB)
    seconds = time.perf_counter() - begin
    taken = before - _free(gpu)
    gpu.unregister(memory.ctypes.data)
    return seconds, taken


def _pair(gpu: Device) -> tuple[float, int]:
    os.environ.update(NCCL_HOSTID="reader", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    unique = nccl_pair.new_unique()
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=_send, args=(theirs, unique), daemon=True)
    process.start()
    theirs.close()  # so that `recv` fails if the process ends
    pipe.recv()  # sent once the process has its context
    before, begin = _free(gpu), time.perf_counter()
    pipe.send("connect")
    reader = nccl_pair.Pair(gpu.ordinal, unique, nccl_pair.READER)
    try:
        reader.ready.result(CONNECT_S)
        seconds, taken = time.perf_counter() - begin, before - _free(gpu)
    finally:
        process.kill()
        process.join()
    return seconds, taken


def _send(pipe: Connection, unique: bytes) -> None:
    os.environ["NCCL_HOSTID"] = "sender"
    device(visible()[0])
    pipe.send("ready")
    pipe.recv()
    sender = nccl_pair.Pair(0, unique, nccl_pair.SENDER)
    sender.ready.result(CONNECT_S)
    pipe.recv()


def _in_a_process(function: Any) -> Any:
    with spawn.Pool(1) as pool:
        return pool.apply(function)


def _copy_on_the_second() -> list[bool]:
    """Copy on the second GPU, as an engine does. Returns, for each GPU, whether this process has a context on it."""
    from cupy.cuda import runtime

    runtime.setDevice(1)
    gpu = device(visible()[1])
    bounce = gpu.bounce_buffer()
    gpu.copy(np.array([[bounce.ctypes.data, bounce.ctypes.data + 4096, 4096]]))
    return [_is_active(ordinal) for ordinal in range(2)]


def _is_active(ordinal: int) -> bool:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(ordinal, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


if __name__ == "__main__":
    sys.exit(main())
