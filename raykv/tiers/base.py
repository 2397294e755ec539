"""The interface of an external tier, the URL that opens it, and helpers of tiers: names of blocks, records, batches.

A tier stores records under keys, and knows nothing of pools. A record is a head, which describes a block, and the
block's bytes as its body. `raykv.tiers.guarded` writes and checks the heads, and shields callers from a slow or broken
tier. The directory decides which blocks are stored and deleted.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable
from urllib.parse import SplitResult

from raykv.protocol.location import KEY_BYTES

HEAD_BYTES = 64
MARKER = bytes(KEY_BYTES)  # a key that no block has: `put_many` and `get_many` take this key, `scan` leaves it out
BATCH = 4096  # blocks of a scan
FOLDERS = tuple(f"{i:02x}" for i in range(256))  # folders in paths of `path_of`
_PATH = re.compile(r"(?:.*/)?([0-9a-f]{2})/(\1[0-9a-f]{30})")


class Block(NamedTuple):
    """A block to store."""

    key: bytes  # KEY_BYTES
    head: bytes  # HEAD_BYTES of the caller, stored and returned with the body
    body: memoryview  # contiguous bytes in the caller's memory, valid during the call


class Tier(Protocol):
    """Blocks by key, outside nodes' memory. `register_tier` takes a function that makes tiers.

    Thread-safe. A key always means the same bytes, so storing a block again is harmless. If a call fails for a block,
    the answer has False or None at its place. OSError, or a library's own error, means that the whole tier has failed.
    """

    shared: bool  # whether all nodes see the same blocks

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks. Returns for each block whether the tier has the block now; False: there is no room for it."""

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        """Read the body of each block into its `out` (contiguous, writable, as long as the body), and return the heads.

        None instead of a head: the block is absent, cut short, or not as long as its `out`. The content of that `out`
        is undefined.
        """

    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Delete blocks. Absent keys do no harm."""

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        """Batches of (key, bytes of its body) of all blocks, oldest first as far as the tier knows."""

    def close(self) -> None:
        """Close files and connections. No other call follows."""


@runtime_checkable
class ReadsHeads(Tier, Protocol):
    """A tier that can read heads without bodies. A head tells a block from other things that have a block's name."""

    def get_heads(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The first HEAD_BYTES under each key, or fewer if the record is shorter. None: there is no record."""


@dataclass(frozen=True)
class TierUrl:
    """A parsed `external=` URL, and the pool whose blocks lie there. Its repr holds no password."""

    scheme: str
    text: str  # for messages: without user, password and query
    parts: SplitResult = field(repr=False)  # with user, password and query
    capacity: int  # bytes
    shared: bool | None = None  # None: the tier decides
    params: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # other parameters, for registered tiers
    pool: str = "default"


def path_of(key: bytes) -> str:
    """Path of a block: `ab/abcd...`. The folder's name is the key's first two hex digits, the file's name all 32."""
    name = key.hex()
    return f"{name[:2]}/{name}"


def key_of(path: str) -> bytes | None:
    """Key of the block with this path, in any folder. None: no block has such a path."""
    match = _PATH.fullmatch(path)
    return bytes.fromhex(match[2]) if match else None


def pieces(bodies: Sequence[memoryview], most: int) -> Iterator[slice]:
    """Slices of a long batch: each slice has one body, or several bodies of at most `most` bytes together."""
    start = size = 0
    for i, body in enumerate(bodies):
        if i > start and size + body.nbytes > most:
            yield slice(start, i)
            start, size = i, 0
        size += body.nbytes
    if start < len(bodies):
        yield slice(start, len(bodies))


def batches(blocks: list[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
    """All blocks of a tier, in batches as `scan` gives them."""
    for at in range(0, len(blocks), BATCH):
        yield blocks[at : at + BATCH]


def unpacked(record: bytes | None, out: memoryview) -> bytes | None:
    """Copy a record's body into `out`, and return its head.

    None if there is no record, or if its body is not as long as `out`.
    """
    if record is None or len(record) != HEAD_BYTES + out.nbytes:
        return None
    out[:] = memoryview(record)[HEAD_BYTES:]
    return record[:HEAD_BYTES]
