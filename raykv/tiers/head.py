"""The head of a record in an external tier.

The head says which block the record's body is, and to which content of the tier the block belongs.
"""

import struct
from typing import NamedTuple

from raykv.tiers.base import HEAD_BYTES

FORMAT = struct.Struct("<8s8s16sQII")  # MAGIC, and the fields of a Head
MAGIC = b"raykv\0t1"  # its last character is the format's version


class Head(NamedTuple):
    """The head of a block, or of a tier's marker."""

    content: bytes  # name of the tier's content, CONTENT_BYTES
    key: bytes  # KEY_BYTES; in a marker, the fingerprint of pool and secret
    checksum: int  # xxh3_64 of the body
    length: int  # bytes of the body
    position: int  # the block's position in its chain

    def packed(self) -> bytes:
        """Return the head as HEAD_BYTES bytes for the tier."""
        return FORMAT.pack(MAGIC, *self).ljust(HEAD_BYTES, b"\0")


NO_HEAD = Head(b"", b"", 0, 0, 0)  # equals no head that raykv writes


def head_of(answer: bytes | None) -> Head:
    """Return the head in a tier's answer, or NO_HEAD if the answer contains no head in this FORMAT."""
    if not isinstance(answer, bytes) or len(answer) < FORMAT.size or not answer.startswith(MAGIC):
        return NO_HEAD
    return Head(*FORMAT.unpack_from(answer)[1:])
