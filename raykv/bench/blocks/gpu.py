"""`raykv bench gpu`: copies of a GPU tier, each beside the same copy by hand: a loop of cudaMemcpyAsync."""

import os
import statistics
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.arena import block_copy
from raykv.arena.arena import Arena
from raykv.arena.buffers import Rows, rows_of
from raykv.arena.files import SHM
from raykv.arena.gpu import cuda, device
from raykv.arena.gpu_arena import GpuArena, copy_between
from raykv.bench.timing import seconds_of
from raykv.config import MIB
from raykv.protocol.location import COUNTER_BITS, KEY_BYTES, LOCATION, Locations
from raykv.protocol.transfers import PULLED
from raykv.transports import nccl_pair

BLOCK_BYTES, BLOCKS = 2 * MIB, 64  # 128 MiB per copy
LAYER_BYTES = 32 << 10
SLAB, SLABS = 64 * MIB, 4
WARM, PAIRS = 3, 12
FIRST = 1 << COUNTER_BITS | 1


def run() -> dict[str, Any]:
    """Return median GB/s (1e9 bytes). `<what>_of_hand`: time of the copy by hand, divided by the time of raykv's copy.

    Blocks are scattered at the source and at the target. Both raykv and the copy by hand hash blocks in host memory;
    the copy by hand does so after all copies. `pages_...`: raykv copies an engine's pages of LAYER_BYTES, and the copy
    by hand copies whole blocks. Raises ValueError if this process can use no GPU.
    """
    gpu = device.device(device.uuid_of(0))
    fast = GpuArena.open_new("bench-gpu", bytes(16), gpu, SLAB, SLABS)
    memory = Arena.create(f"{SHM}/raykv-bench-gpu-{os.getpid()}", bytes(16), SLAB, SLABS)
    try:
        while memory.offer_next():
            pass
        memory.populate(gpu.uuid)
        figures = _in_process(gpu.uuid, fast, memory)
        with get_context("spawn").Pool(1) as other:
            figures |= other.apply(_over_ipc, (fast.path, fast.nonce, gpu.uuid, fast.handle))
        if not nccl_pair.why_not():
            figures |= _nccl_to_self(gpu.uuid, fast)
        return {"gpu": gpu.uuid, **figures, "pairs": float(PAIRS)}
    finally:
        fast.close(unlink=True)
        memory.close(unlink=True)


def _in_process(gpu: str, fast: GpuArena, memory: Arena) -> dict[str, float]:
    rows, turns = _engine(), _Turns()
    figures = _store_and_load("", gpu, fast, rows, turns)
    figures |= _store_and_load("memory_", gpu, memory, rows, turns)
    figures |= _store_and_load("pages_memory_", gpu, memory, _engine(BLOCK_BYTES // LAYER_BYTES), turns)

    def cross(source: Arena, target: Arena) -> Callable[[], None]:
        at, to = turns.locations(), turns.locations()
        assert source.write(at, turns.keys, rows).all()

        def move() -> None:
            to["gen"] += 1
            assert (copy_between(source, at, turns.keys, target, to) == PULLED).all()

        return move

    def by_hand(source: Arena, target: Arena) -> Callable[[], None]:
        return lambda: _hand(gpu, _table(target.addresses(turns.locations()), source.addresses(turns.locations())))

    copied = by_hand(fast, memory)

    def down_by_hand() -> None:
        copied()
        block_copy.sums(memory.addresses(turns.locations()), BLOCK_BYTES)

    figures |= _pairs("down", cross(fast, memory), down_by_hand)
    figures |= _pairs("up", cross(memory, fast), by_hand(memory, fast))
    return figures


def _over_ipc(path: str, nonce: bytes, gpu: str, handle: bytes) -> dict[str, float]:
    """Measure the same copies in another process, as an engine makes them."""
    arena = GpuArena.map(path, nonce, gpu, handle)
    try:
        return _store_and_load("ipc_", gpu, arena, _engine(), _Turns(1 << 20))
    finally:
        arena.close()


def _nccl_to_self(gpu: str, fast: GpuArena) -> dict[str, float]:
    """Measure NCCL with one rank that sends to itself."""
    from cupy.cuda import nccl

    turns, stream = _Turns(), cuda.cupy().cuda.Stream(non_blocking=True)
    one = nccl.NcclCommunicator(1, nccl_pair.new_unique(), 0)
    of, to = fast.addresses(turns.locations()), fast.addresses(turns.locations(into=1))

    def move() -> None:
        nccl.groupStart()
        for source, target in zip(of.tolist(), to.tolist(), strict=True):
            one.send(source, BLOCK_BYTES, nccl.NCCL_UINT8, 0, stream.ptr)
            one.recv(target, BLOCK_BYTES, nccl.NCCL_UINT8, 0, stream.ptr)
        nccl.groupEnd()
        stream.synchronize()

    return _pairs("nccl_self", move, lambda: _hand(gpu, _table(to, of)))


def _store_and_load(name: str, gpu: str, arena: Arena, rows: Rows, turns: "_Turns") -> dict[str, float]:
    at = turns.locations()
    slots, keys = arena.addresses(at), turns.keys

    def store() -> None:
        at["gen"] += 1
        assert arena.write(at, keys, rows).all()

    def load() -> None:
        assert arena.read(at, keys, rows).all()

    blocks = _engine()
    into = _table(slots, blocks.addresses[:, 0])

    def by_hand() -> None:
        _hand(gpu, into)
        if not isinstance(arena, GpuArena):  # blocks in a GPU's memory are not hashed
            block_copy.sums(slots, BLOCK_BYTES)

    return {
        **_pairs(f"{name}store", store, by_hand),
        **_pairs(f"{name}load", load, lambda: _hand(gpu, into[:, [1, 0, 2]])),
    }


class _Turns:
    """Locations of the same scattered slots, with a newer generation each time."""

    def __init__(self, first: int = 0) -> None:
        self._gen = FIRST + first
        self.keys = np.arange(BLOCKS * KEY_BYTES, dtype=np.int64).astype(np.uint8).reshape(BLOCKS, KEY_BYTES)
        self._order = np.random.default_rng(0).permutation(2 * BLOCKS).reshape(2, BLOCKS)

    def locations(self, into: int = 0) -> Locations:
        """into: 0 or 1; selects one of two disjoint sets of slots."""
        self._gen += 1 << 10
        at = np.zeros(BLOCKS, LOCATION)
        at["slab"], at["slot"] = np.divmod(self._order[into], SLAB // BLOCK_BYTES)
        at["bytes"], at["slab_gen"], at["gen"] = BLOCK_BYTES, FIRST, self._gen
        return at


def _engine(layers: int = 1) -> Rows:
    """Scattered pages of a GPU, by layer."""
    cupy = cuda.cupy()
    pages = [cupy.zeros((2 * BLOCKS, BLOCK_BYTES // layers), cupy.uint8) for _ in range(layers)]
    return rows_of(pages)[np.random.default_rng(1).permutation(2 * BLOCKS)[:BLOCKS]]


def _table(to: NDArray[np.int64], of: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([to, of, np.full_like(of, BLOCK_BYTES)], axis=1)


def _hand(gpu: str, table: NDArray[np.int64]) -> None:
    """Make the copies of a table one after another, by cudaMemcpyAsync on a stream."""
    cupy = cuda.cupy()
    runtime = cupy.cuda.runtime
    stream = _streams.setdefault(gpu, cupy.cuda.Stream(non_blocking=True))
    for to, of, length in table.reshape(-1, 3).tolist():
        runtime.memcpyAsync(to, of, length, runtime.memcpyDefault, stream.ptr)
    stream.synchronize()


_streams: dict[str, Any] = {}


def _pairs(name: str, ours: Callable[[], None], by_hand: Callable[[], None]) -> dict[str, float]:
    seconds: list[tuple[float, float]] = []
    for turn in range(WARM + PAIRS):
        both = seconds_of(ours), seconds_of(by_hand)
        if turn >= WARM:
            seconds.append(both)
    mine, floor = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {
        f"{name}_gbps": BLOCKS * BLOCK_BYTES / mine / 1e9,
        f"{name}_hand_gbps": BLOCKS * BLOCK_BYTES / floor / 1e9,
        f"{name}_of_hand": statistics.median(hand / own for own, hand in seconds),
    }
