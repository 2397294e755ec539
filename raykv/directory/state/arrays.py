"""Arrays that the directory's objects hand each other, and how keys in a message become one."""

import numpy as np
from numpy.typing import NDArray

from raykv.protocol.location import KEY_BYTES

KeyArray = NDArray[np.uint64]  # (n, 2): the 16 bytes of each key
RowArray = NDArray[np.int64]  # numbers of rows (-1: none), or their generations
LocationArray = NDArray[np.void]  # protocol.LOCATION


def key_array(keys: bytes) -> KeyArray:
    """ValueError for a part of a key."""
    return np.frombuffer(keys, np.uint64).reshape(-1, 2)


def split_keys(keys: bytes) -> list[bytes]:
    """ValueError for a part of a key."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no keys of {KEY_BYTES}")
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
