"""Types of the arrays in a directory's state, and how to make them from the keys in a message."""

import numpy as np
from numpy.typing import NDArray

from raykv.protocol.location import KEY_BYTES

KeyArray = NDArray[np.uint64]  # (n, 2): the 16 bytes of each key
RowArray = NDArray[np.int64]  # numbers of rows, or their generations; -1: no row


def key_array(keys: bytes) -> KeyArray:
    """(n, 2) uint64. ValueError for an incomplete key."""
    return np.frombuffer(keys, np.uint64).reshape(-1, 2)


def split_keys(keys: bytes) -> list[bytes]:
    """The 16 bytes of each key. ValueError for an incomplete key."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no keys of {KEY_BYTES}")
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
