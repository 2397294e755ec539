"""A message as bytes."""

from typing import Any

import msgpack

# the longest: an array gets its memory before its parts are there. A dict has nodes, by their index
LIMITS = {"max_array_len": 1 << 12, "max_map_len": 1 << 16, "max_ext_len": 0}


def packed(message: Any) -> bytes:
    """A message as it crosses a socket: of None, bool, int, str, bytes, tuples and dicts. Else raises TypeError."""
    data: bytes = msgpack.packb(message)
    return data


def unpacked(data: bytes) -> Any:
    """The message, of tuples, that `packed` made into bytes. Raises ValueError if it is none."""
    try:
        return msgpack.unpackb(data, use_list=False, strict_map_key=False, **LIMITS)
    except (msgpack.UnpackException, TypeError) as error:  # TypeError: a key of a dict that can't be hashed
        raise ValueError(f"{len(data)} bytes are no message: {error!r}") from error
