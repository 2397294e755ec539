"""What callers hand over, checked before a byte moves: keys, and the rows of memory that blocks come from or go to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.place import KEY_BYTES


@dataclass(frozen=True)
class Rows:
    """Where n blocks come from or go to, each in `len(lengths)` parts: addresses instead of n objects.

    addresses: (n, parts) int64. lengths: (parts,) int64, bytes. memory: what keeps the addresses good.
    """

    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    memory: object
    writable: bool

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, which: slice | NDArray[Any]) -> "Rows":
        return Rows(self.addresses[which], self.lengths, self.memory, self.writable)

    @property
    def bytes(self) -> int:
        """Of one row."""
        return int(self.lengths.sum())


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


def dense(name: str, given: Any, rows: int, block_bytes: int, exact: bool = False) -> Rows:
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
    return rows_of([array])[:rows]


def paged(given: Any, block_ids: Sequence[int], rows: int, block_bytes: int, writable: bool = False) -> Rows:
    """Rows made of row block_ids[i] of each array of paged memory."""
    several = isinstance(given, (list, tuple))
    arrays = [_numpy("paged", part) for part in (given if several else [given])]
    if len(block_ids) != rows:
        raise ValueError(f"{len(block_ids)} block_ids for {rows} blocks")
    pages = rows_of(arrays)
    if writable and not pages.writable:
        raise ValueError("paged memory is read-only")
    if pages.bytes != block_bytes:
        raise ValueError(f"a row of paged memory has {pages.bytes} bytes in all, a block of the cache {block_bytes}")
    ids = np.asarray(block_ids)
    if rows and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise ValueError(f"block_ids: {ids.dtype} of shape {ids.shape}: give one integer a block")
    if rows and (ids.min() < 0 or ids.max() >= len(pages)):
        raise ValueError(f"block_ids from {ids.min()} to {ids.max()}, but there are {len(pages)} pages")
    return pages[ids.astype(np.int64)]


def rows_of(arrays: Sequence[NDArray[np.uint8]]) -> Rows:
    """Rows whose parts are the rows of each array. ValueError unless those are uint8 and contiguous."""
    for array in arrays:
        if array.dtype != np.uint8 or array.ndim != 2 or (array.size and array.shape[1] > 1 and array.strides[1] != 1):
            shape = f"{array.dtype} of shape {array.shape}, strides {array.strides}"
            raise ValueError(f"memory: {shape}: give (n, bytes) uint8 whose rows are contiguous")
    n = min((len(array) for array in arrays), default=0)
    addresses = np.empty((n, len(arrays)), np.int64)
    for part, array in enumerate(arrays):
        addresses[:, part] = array.ctypes.data + np.arange(n) * array.strides[0]
    lengths = np.array([array.shape[1] for array in arrays], np.int64)
    return Rows(addresses, lengths, arrays, all(array.flags.writeable for array in arrays))


def rows_within(arrays: Sequence[NDArray[np.uint8]], row_bytes: int) -> Rows:
    """Rows of `row_bytes` that lie one after another in each of the arrays."""
    addresses = [array.ctypes.data + np.arange(array.size // row_bytes) * row_bytes for array in arrays]
    column = np.concatenate([np.zeros(0, np.int64), *addresses])
    return Rows(column[:, None], np.array([row_bytes]), arrays, all(array.flags.writeable for array in arrays))


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
