"""Computes SHA-256 of many short pieces in one call, by libcrypto, or by hashlib if there is no libcrypto.

hashlib takes 600 ns to make and finish an object. A processor with SHA instructions hashes a block in 100 ns.
"""

import ctypes
import functools
import hashlib
import importlib

import numpy as np
from numba import types
from numpy.typing import NDArray

from raykv.system.intrinsics import address, call
from raykv.system.jit import compile_all, kernel

DIGEST_BYTES = 32
CONTEXT_BYTES = 256  # more than the 112 bytes of a SHA256_CTX
LIBRARY = "libcrypto.so.3"  # the system's libcrypto, for a Python with a built-in one

Bytes = NDArray[np.uint8]
Ends = NDArray[np.int64]
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)  # types of the kernel's arguments
_WRITABLE = types.Array(types.uint8, 1, "C")
_WORDS = types.Array(types.int64, 1, "C", readonly=True)


def _functions() -> NDArray[np.int64] | None:
    """Return the addresses of libcrypto's functions. None if there is no libcrypto."""
    # SHA256() is not used: since OpenSSL 3, each call of it looks up an implementation
    names = ("SHA256_Init", "SHA256_Update", "SHA256_Final")
    for path in (getattr(importlib.import_module("_hashlib"), "__file__", None), LIBRARY):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if all(found := [address(library, name) for name in names]):
            return np.array(found, np.int64)
    return None


_FUNCTIONS = _functions()
_INIT, _UPDATE, _FINAL = range(3)


@kernel(_WRITABLE, _BYTES, _BYTES, _WORDS, types.boolean, _WRITABLE, _WORDS)
def _digest(
    out: Bytes, first: Bytes, data: Bytes, ends: Ends, chained: bool, context: Bytes, functions: NDArray[np.int64]
) -> None:
    parent, state, target, source = first.ctypes.data, context.ctypes.data, out.ctypes.data, data.ctypes.data
    begin = 0
    for i in range(len(ends)):
        call(functions[_INIT], state, 0, 0)
        call(functions[_UPDATE], state, parent, DIGEST_BYTES)
        call(functions[_UPDATE], state, source + begin, ends[i] - begin)
        call(functions[_FINAL], target, state, 0)
        begin = ends[i]
        if chained:
            parent = target
        target += DIGEST_BYTES


@functools.cache
def load() -> None:
    """Load the kernel (4 ms), or compile it (0.3 s, once per user and machine), so that `digests` need not do it."""
    if _FUNCTIONS is not None:
        compile_all("raykv.system")


def digests(parent: bytes, data: Bytes, ends: Ends, chained: bool) -> Bytes:
    """Return SHA-256 of (parent, piece) for every piece: (n, 32) uint8. chained: each digest is the next parent.

    parent: 32 bytes. data: 1-D uint8, contiguous, all pieces in sequence. ends: (n,) int64, the end of each piece in
    `data`.
    """
    if _FUNCTIONS is None:
        return by_hashlib(parent, data, ends, chained)
    load()
    out = np.empty((len(ends), DIGEST_BYTES), np.uint8)
    first = np.frombuffer(parent, np.uint8)
    _digest(out.reshape(-1), first, data, ends, chained, np.empty(CONTEXT_BYTES, np.uint8), _FUNCTIONS)
    return out


def by_hashlib(parent: bytes, data: Bytes, ends: Ends, chained: bool) -> Bytes:
    """Like `digests`, but runs on any Python."""
    begin, joined, found = 0, data.tobytes(), []
    for end in ends.tolist():
        digest = hashlib.sha256(parent + joined[begin:end]).digest()
        found.append(digest)
        begin, parent = end, digest if chained else parent
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, DIGEST_BYTES)
