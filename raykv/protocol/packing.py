"""Turns a message into bytes and back."""

from typing import Any

import msgpack

# Lengths are limited, as msgpack allocates an array before it reads the elements. A dict has an entry for each node
LIMITS = {"max_array_len": 1 << 12, "max_map_len": 1 << 16, "max_ext_len": 0}


def packed(message: Any) -> bytes:
    """Return the bytes of a message: None, bool, int, str, bytes, tuples and dicts. TypeError for other types."""
    data: bytes = msgpack.packb(message)
    return data


def unpacked(data: bytes) -> Any:
    """Return the message that `packed` turned into bytes; sequences are tuples. ValueError for other bytes."""
    try:
        return msgpack.unpackb(data, use_list=False, strict_map_key=False, **LIMITS)
    except (msgpack.UnpackException, TypeError) as error:  # TypeError: a dict key that can't be hashed
        raise ValueError(f"{len(data)} bytes are no message: {error!r}") from error
