"""Prints `raykv bench gpu` as a table, and the speed of NCCL between two processes.

    python benchmarks/gpu/copies.py

Returns 1 if a copy has less than 0.75 times the speed of cudaMemcpyAsync. The margin of a quarter allows for locks and
headers, which cost about as much as a copy within the GPU.
"""

import os
import sys
import time
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
from rich.console import Console
from rich.table import Table

from raykv.arena import block_copy
from raykv.arena.buffers import rows_of
from raykv.arena.gpu import cuda, device, host_copy
from raykv.arena.gpu_arena import GpuArena
from raykv.bench.blocks import gpu
from raykv.bench.blocks.gpu import BLOCK_BYTES, BLOCKS
from raykv.transports import nccl_pair

ENOUGH = 0.75
CONNECT_S = 60.0
SENT = 7


def nccl_gbps() -> float:
    """Copy by NCCL between two processes on one GPU, only as a check: NCCL sees two hosts and uses sockets."""
    os.environ.update(NCCL_HOSTID="reader", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    uuid = device.uuid_of(0)
    fast = GpuArena.open_new("bench-gpu", bytes(16), device.device(uuid), gpu.SLAB, gpu.SLABS)
    try:
        return _between_two(uuid, fast)
    finally:
        fast.close(unlink=True)


def _between_two(uuid: str, fast: GpuArena) -> float:
    turns, unique, context = gpu._Turns(), nccl_pair.new_unique(), get_context("spawn")
    pipe, theirs = context.Pipe()
    sender = context.Process(target=_send, args=(theirs, unique), daemon=True)
    sender.start()
    try:
        reader, to = nccl_pair.Pair(0, unique, nccl_pair.READER), fast.addresses(turns.locations(into=1))
        reader.ready.result(CONNECT_S)

        def move() -> None:
            pipe.send("send")
            reader.do(partial(reader.move, to, BLOCK_BYTES, time.monotonic() + CONNECT_S)).result(CONNECT_S)

        by_hand = gpu._table(to, fast.addresses(turns.locations()))
        figures = gpu._pairs("nccl_two", move, lambda: gpu._hand(uuid, by_hand))
        move()  # overwrites the last copy by hand
        got = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        host_copy.copy(uuid, block_copy.copies(rows_of([got]), to, out=True), registered=False, to_gpu=False)
        assert (got == SENT).all(), "bytes are not what was sent"
        return figures["nccl_two_gbps"]
    finally:
        sender.kill()
        sender.join()


def _send(pipe: Connection, unique: bytes) -> None:
    os.environ["NCCL_HOSTID"] = "sender"
    pages = cuda.cupy().asarray(np.full((BLOCKS, BLOCK_BYTES), SENT, np.uint8))
    of, sender = rows_of([pages]).addresses[:, 0], nccl_pair.Pair(0, unique, nccl_pair.SENDER)
    while pipe.recv():
        sender.do(partial(sender.move, of, BLOCK_BYTES, time.monotonic() + CONNECT_S)).result(CONNECT_S)


def main() -> int:
    figures = gpu.run()
    table = Table("copy", "GB/s", "by hand", "of it", title=str(figures["gpu"]))
    names = [name.removesuffix("_of_hand") for name in figures if name.endswith("_of_hand")]
    for name in names:
        table.add_row(name, *(f"{figures[f'{name}_{what}']:.2f}" for what in ("gbps", "hand_gbps", "of_hand")))
    Console().print(table)
    slow = [name for name in names if figures[f"{name}_of_hand"] < ENOUGH]
    Console().print(f"NCCL between two processes: {'not installed' if nccl_pair.why_not() else nccl_gbps()} GB/s")
    Console().print(f"under {ENOUGH} of by hand: {', '.join(slow) or 'none'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
