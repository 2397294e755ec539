"""What callers hand over, checked before a byte moves: keys, and the rows of memory that blocks come from or go to."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.place import KEY_BYTES

Row = NDArray[np.uint8] | list[NDArray[np.uint8]]
Rows = NDArray[np.uint8] | list[Row]


def keys(given: Any) -> NDArray[np.uint8]:
    """(n, 16) uint8, contiguous."""
    array = _numpy("keys", given)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != KEY_BYTES:
        raise ValueError(
            f"keys: {array.dtype} of shape {array.shape}, not uint8 of (n, {KEY_BYTES}): get them from cache.keys()"
        )
    return np.ascontiguousarray(array)


def count(of: NDArray[np.uint8], start: int) -> int:
    """How many keys there are from `start` on."""
    if not 0 <= start <= len(of):
        raise ValueError(f"start={start}, but there are {len(of)} keys")
    return len(of) - start


def dense(name: str, given: Any, rows: int, block_bytes: int, exact: bool = False) -> NDArray[np.uint8]:
    """(rows, block_bytes) uint8, contiguous; of more rows the first, unless they must be `exact`."""
    array = _numpy(name, given)
    fits = array.dtype == np.uint8 and array.ndim == 2 and array.shape[1] == block_bytes
    if not fits or len(array) < rows or (exact and len(array) > rows):
        raise ValueError(
            f"{name}: {array.dtype} of shape {array.shape}, but the cache wants uint8 of ({rows}, {block_bytes}): "
            f"blocks times block_bytes (view other dtypes as uint8)"
        )
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} of shape {array.shape} is not contiguous (strides {array.strides})")
    if name == "out" and not array.flags.writeable:
        raise ValueError(f"{name} is read-only")
    return array[:rows]


def paged(given: Any, block_ids: Sequence[int], rows: int, block_bytes: int, writable: bool = False) -> list[Row]:
    """Rows made of row block_ids[i] of each array of paged memory."""
    several = isinstance(given, (list, tuple))
    arrays = [_numpy("paged", part) for part in (given if several else [given])]
    if len(block_ids) != rows:
        raise ValueError(f"{len(block_ids)} block_ids for {rows} blocks")
    for array in arrays:
        if array.dtype != np.uint8 or array.ndim != 2 or (array.shape[1] and array.strides[1] != 1):
            raise ValueError(
                f"paged: {array.dtype} of shape {array.shape}, strides {array.strides}: give (pages, bytes of a page) "
                f"uint8 whose rows are contiguous"
            )
        if writable and not array.flags.writeable:
            raise ValueError("paged memory is read-only")
    total = sum(array.shape[1] for array in arrays)
    if total != block_bytes:
        raise ValueError(f"a row of paged memory has {total} bytes in all, a block of the cache {block_bytes}")
    ids = np.asarray(block_ids)
    if rows and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise ValueError(f"block_ids: {ids.dtype} of shape {ids.shape}: give one integer a block")
    pages = min((len(array) for array in arrays), default=0)
    if rows and (ids.min() < 0 or ids.max() >= pages):
        raise ValueError(f"block_ids from {ids.min()} to {ids.max()}, but there are {pages} pages")
    return [[array[i] for array in arrays] for i in ids.tolist()]


def _numpy(name: str, given: Any) -> NDArray[Any]:
    """The array itself, never a copy: bytes must move from and to the caller's memory."""
    if isinstance(given, np.ndarray):
        return given
    if hasattr(given, "numpy") and getattr(given, "device", None) is not None:
        if given.device.type != "cpu":
            raise ValueError(f"{name} is on {given.device}: only CPU memory is supported; copy it with .cpu()")
        try:
            array: NDArray[Any] = given.detach().numpy()
        except TypeError as error:
            raise ValueError(f"{name}: {given.dtype}, but blocks are uint8: .view(torch.uint8) it") from error
        return array
    raise ValueError(f"{name} is a {type(given).__name__}: give a numpy array or a torch tensor")
