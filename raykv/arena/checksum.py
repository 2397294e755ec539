"""Kernels that copy whole blocks, and compute their checksums, without the GIL.

While blocks are copied, other threads of the engine hold the GIL. Taking the GIL again between two pieces of a block
would cost as much as copying 100 KiB. `raykv.arena.block_copy` spreads blocks over threads. `raykv.arena.xxh3` copies
and sums blocks whose parts are whole stripes of XXH3. For other blocks, kernels call memcpy and the xxhash library by
their addresses.
"""

import ctypes
import importlib
from collections.abc import Iterable

import numpy as np
from numba import types
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from raykv.arena import xxh3
from raykv.protocol.transfers import ALTERED, FAILED, PULLED
from raykv.system.intrinsics import address, call, fence, prefetch
from raykv.system.jit import kernel

Copies = NDArray[np.int64]  # (n, 3): target address, source address, bytes
PAGE = 4096
TILE = 64 << 10  # bytes that stay in a core's cache between copy and checksum
COPIES = types.Array(types.int64, 2, "C", readonly=True)  # types of kernel arguments
BLOCKS = types.Array(types.int64, 3, "C", readonly=True)
FUNCTIONS = types.Array(types.int64, 1, "C")


def _address(library: ctypes.CDLL, *names: str) -> int:
    """Return the address of the first function in `names` that the library has. Raises ImportError if it has none."""
    if found := address(library, *names):
        return found
    raise ImportError(f"{library._name} has no {names[0]}: install the wheel of xxhash from PyPI (pip install xxhash)")


def _functions() -> NDArray[np.int64]:
    """Return the addresses of memcpy, and of the streaming functions of XXH3 in python-xxhash's library."""
    xxhash = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    names = [
        ["XXH3_createState"],
        ["XXH3_64bits_reset"],
        ["XXH3_64bits_update_dispatch", "XXH3_64bits_update"],  # on x86: picks the processor's vector instructions
        ["XXH3_64bits_digest"],
        ["XXH3_freeState"],
    ]
    return np.array([_address(ctypes.CDLL(None), "memcpy"), *(_address(xxhash, *n) for n in names)], np.int64)


_FUNCTIONS = _functions()
_MEMCPY, _CREATE, _RESET, _UPDATE, _DIGEST, _FREE = range(6)


@kernel
def _memcpy(target: int, source: int, length: int, function: int) -> None:
    """Copy page by page, and prefetch the start of later pages: the processor's prefetch stops at a page's end."""
    for done in range(0, length, PAGE):
        for line in range(0, 512, 64):
            prefetch(source + done + 2 * PAGE + line)
        prefetch(target + done + 2 * PAGE)
        call(function, target + done, source + done, min(PAGE, length - done))


@kernel
def _stream(target: int, source: int, length: int, function: int) -> None:
    """Like `_memcpy`, but bypasses the caches. memcpy copies the bytes before the first and after the last full row."""
    head = min(-target % xxh3.STRIPE, length)
    done = head + (length - head) // xxh3.ROW * xxh3.ROW
    call(function, target, source, head)
    xxh3.stream_rows(target + head, source + head, (done - head) // xxh3.ROW)
    call(function, target + done, source + done, length - done)


@kernel(COPIES, types.boolean, FUNCTIONS)
def _copy(table: Copies, stream: bool, functions: NDArray[np.int64]) -> None:
    for i in range(len(table)):
        target, source, length = table[i, 0], table[i, 1], table[i, 2]
        if stream:
            _stream(target, source, length, functions[_MEMCPY])
        else:
            _memcpy(target, source, length, functions[_MEMCPY])
    if stream:
        fence()


@kernel(BLOCKS, types.boolean, types.int64, FUNCTIONS)
def _copy_stripes(table: Copies, stream: bool, secret: int, sums: NDArray[np.int64]) -> None:
    for block in range(len(table)):
        sums[block] = xxh3.copy_block(table[block], stream, secret)
    if stream:
        fence()


@kernel(BLOCKS, types.int64, FUNCTIONS, FUNCTIONS)
def _copy_tiles(table: Copies, tile: int, functions: NDArray[np.int64], sums: NDArray[np.int64]) -> None:
    state = call(functions[_CREATE], 0, 0, 0)
    for block in range(len(table)):
        call(functions[_RESET], state, 0, 0)
        for part in range(table.shape[1]):
            target, source, length = table[block, part, 0], table[block, part, 1], table[block, part, 2]
            for done in range(0, length, tile):
                size = min(tile, length - done)
                if target != source:
                    _memcpy(target + done, source + done, size, functions[_MEMCPY])
                call(functions[_UPDATE], state, target + done, size)
        sums[block] = call(functions[_DIGEST], state, 0, 0)
    call(functions[_FREE], state, 0, 0)


def copy(table: Copies, stream: bool = False) -> None:
    """Do the copies. Nobody may change or free the memory before this returns. stream: bypass the caches."""
    _copy(table, stream, _FUNCTIONS)


def copy_summed(table: Copies, stream: bool = False) -> list[int]:
    """Like `copy`. Returns the xxh3_64 of each block's bytes in order.

    table: (blocks, parts, 3); part i has the same length in all blocks. Where source and target are equal, only the
    checksum is computed. stream: bypass the caches.
    """
    sums = np.empty(len(table), np.int64)
    if _in_stripes(table):
        _copy_stripes(table, stream, xxh3.SECRET.ctypes.data, sums)
    else:
        _copy_tiles(table, TILE, _FUNCTIONS, sums)
    return sums.view(np.uint64).tolist()  # type: ignore[no-any-return]


def _in_stripes(table: Copies) -> bool:
    lengths = table[0, :, 2] if len(table) else np.zeros(0, np.int64)
    return bool(lengths.sum() >= xxh3.SHORTEST and not (lengths % xxh3.STRIPE).any())


def judge(
    written: NDArray[np.bool_], payloads: Iterable[NDArray[np.uint8]], sums: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    """Return the verdicts of n blocks that have arrived.

    written: (n,) result of Arena.write. payloads: bytes of the blocks. sums: (n,) expected xxh3_64. A block that was
    not written is ALTERED if its bytes have a different checksum, else FAILED.
    """
    return np.array(
        [
            PULLED if done else FAILED if xxh3_64_intdigest(payload.data) == total else ALTERED
            for done, payload, total in zip(written, payloads, sums.tolist(), strict=True)
        ],
        np.uint8,
    )
