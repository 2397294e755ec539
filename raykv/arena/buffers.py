"""Rows: callers' memory that blocks are copied from or to. The memory is checked before any byte is copied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.arena.gpu import cuda


@dataclass(frozen=True)
class Rows:
    """Memory that n blocks are copied from or to. Holds addresses, since n objects would be slow.

    Each block has one or more parts. addresses: (n, parts) int64. lengths: (parts,) int64, bytes. memory: a reference
    that keeps the addresses valid. device: UUID of the GPU with these addresses; None: host memory. after: CUDA events
    that end once earlier reads and writes of the memory are done. registered: whether this is host memory that GPUs can
    reach.
    """

    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    memory: object
    writable: bool
    device: str | None = None
    after: tuple[Any, ...] = ()
    registered: bool = False

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, which: slice | NDArray[Any]) -> "Rows":
        rest = self.lengths, self.memory, self.writable, self.device, self.after, self.registered
        return Rows(self.addresses[which], *rest)  # takes a third of the time of `dataclasses.replace`

    @property
    def bytes(self) -> int:
        """The number of bytes of one row."""
        return int(self.lengths.sum())


def address_of(array: NDArray[Any]) -> int:
    """Return the address of an array's first byte. `array.ctypes.data` takes five times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


def count(of: NDArray[np.uint8], start: int) -> int:
    """Return the number of keys from `start` to the end. Raises ValueError if `start` is out of range."""
    if not 0 <= start <= len(of):
        raise ValueError(f"start={start}, but there are {len(of)} keys")
    return len(of) - start


def dense(name: str, given: Any, rows: int, block_bytes: int, exact: bool = False) -> Rows:
    """Return the first `rows` rows of a contiguous (n, block_bytes) uint8 array.

    Raises ValueError unless n >= rows, or n == rows if `exact`.
    """
    array = _view(name, given)
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
    found = rows_of([given], name)
    return found if len(found) == rows else found[:rows]


def paged(given: Any, block_ids: Sequence[int], rows: int, block_bytes: int, writable: bool = False) -> Rows:
    """Return rows of paged memory. Part p of row i is the row block_ids[i] of array p.

    Raises ValueError if the arrays or `block_ids` don't fit.
    """
    if len(block_ids) != rows:
        raise ValueError(f"{len(block_ids)} block_ids for {rows} blocks")
    pages = rows_of(given if isinstance(given, (list, tuple)) else [given], "paged")
    if writable and not pages.writable:
        raise ValueError("paged memory is read-only")
    if pages.bytes != block_bytes:
        raise ValueError(f"a row of paged memory has {pages.bytes} bytes in all, a block of the cache {block_bytes}")
    ids = np.asarray(block_ids)
    if rows and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise ValueError(f"block_ids: {ids.dtype} of shape {ids.shape}: give one integer a block")
    if rows and (ids.min() < 0 or ids.max() >= len(pages)):
        raise ValueError(f"block_ids from {ids.min()} to {ids.max()}, but there are {len(pages)} pages")
    if writable and rows:
        _check_distinct(ids.astype(np.int64))
    return pages[ids.astype(np.int64)]


def _check_distinct(ids: NDArray[np.int64]) -> None:
    """Raise ValueError if several blocks would be written to the same page."""
    times = np.bincount(ids)
    if times.max() > 1:
        raise ValueError(f"block_ids name page {times.argmax()} {times.max()} times: give each block a page of its own")


def rows_of(arrays: Sequence[Any], name: str = "memory") -> Rows:
    """Return Rows whose parts are the rows of each array: numpy, torch, or anything with `__cuda_array_interface__`.

    Raises ValueError unless the arrays are (n, bytes) uint8 with contiguous rows, all on one GPU or all in host memory.
    Raises ImportError if they are on a GPU and CuPy is not installed.
    """
    views = [_view(name, array) for array in arrays]
    for view in views:
        if view.dtype != np.uint8 or view.ndim != 2 or (view.size and view.shape[1] > 1 and view.strides[1] != 1):
            shape = f"{view.dtype} of shape {view.shape}, strides {view.strides}"
            raise ValueError(f"{name}: {shape}: give (n, bytes) uint8 whose rows are contiguous")
    n = min((len(view) for view in views), default=0)
    addresses = np.empty((n, len(views)), np.int64)
    for part, view in enumerate(views):
        addresses[:, part] = address_of(view) + np.arange(n) * view.strides[0]
    lengths = np.array([view.shape[1] for view in views], np.int64)
    writable = all(view.flags.writeable for view in views)
    return Rows(addresses, lengths, list(arrays), writable, *_origin(name, arrays, views))


def _origin(name: str, arrays: Sequence[Any], views: list[NDArray[Any]]) -> tuple[str | None, tuple[Any, ...]]:
    """Return the device and events for Rows. Raises ValueError if the arrays are on several devices."""
    filled = [(array, view) for array, view in zip(arrays, views, strict=True) if view.size]
    ordinals = {
        cuda.ordinal_at(view.ctypes.data) if isinstance(view.base, _Description) else None for _, view in filled
    }
    if len(ordinals) > 1:
        devices = sorted("host memory" if ordinal is None else cuda.uuid(ordinal) for ordinal in ordinals)
        raise ValueError(f"{name} is on {' and '.join(devices)}: all of its arrays must be on one device")
    ordinal = next(iter(ordinals), None)
    if ordinal is None:
        return None, ()
    return cuda.uuid(ordinal), cuda.events_after(ordinal, {cuda.stream_of(array) for array, _ in filled})


def rows_within(arrays: Sequence[NDArray[np.uint8]], row_bytes: int) -> Rows:
    """Cut each array into rows of `row_bytes` bytes. Returns the rows of all arrays, in order.

    Raises ValueError unless the arrays are contiguous uint8 and consist of whole rows: another process may have sent
    the arrays.
    """
    for array in arrays:
        if array.dtype != np.uint8 or not array.flags.c_contiguous or array.size % row_bytes:
            raise ValueError(f"{array.dtype} of shape {array.shape}: give contiguous uint8, rows of {row_bytes} bytes")
    addresses = [array.ctypes.data + np.arange(array.size // row_bytes) * row_bytes for array in arrays]
    column = np.concatenate([np.zeros(0, np.int64), *addresses])
    return Rows(column[:, None], np.array([row_bytes]), arrays, all(array.flags.writeable for array in arrays))


class _Description:
    """GPU memory. numpy takes the memory's shape and address from this object. numpy must not read the memory."""

    def __init__(self, interface: dict[str, Any]) -> None:
        names = ("shape", "typestr", "data", "strides")
        self.__array_interface__ = {"version": 3, **{name: interface.get(name) for name in names}}


def _view(name: str, given: Any) -> NDArray[Any]:
    """Like `_numpy`. For GPU memory, return an array that only describes the memory."""
    is_cuda = getattr(given, "is_cuda", True)  # the `hasattr` below is slow for torch's CPU tensors
    if is_cuda and hasattr(given, "__cuda_array_interface__"):
        return np.asarray(_Description(given.__cuda_array_interface__))
    return _numpy(name, given)


def _numpy(name: str, given: Any) -> NDArray[Any]:
    """Return an array over the caller's own memory, never over a copy of it."""
    if isinstance(given, np.ndarray):
        return given
    if hasattr(given, "numpy") and getattr(given, "device", None) is not None:
        if given.device.type != "cpu":
            raise ValueError(f"{name}: on {given.device}, where raykv cannot reach: copy it with .cpu()")
        try:
            array: NDArray[Any] = given.detach().numpy()
        except TypeError as error:
            raise ValueError(f"{name}: {given.dtype}, but blocks are uint8: .view(torch.uint8) it") from error
        return array
    raise ValueError(f"{name} is a {type(given).__name__}: give a numpy array or a torch tensor")
