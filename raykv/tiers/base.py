"""The interface of an external tier, the URL that opens it, and helpers of tiers: names of blocks, records, batches.

A tier stores records under keys, and knows nothing about pools. A record consists of a head, which describes a block,
and of a body, the block's bytes. `raykv.tiers.guarded` writes and checks the heads, and shields callers from a slow or
broken tier. The directory decides which blocks are stored and deleted.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable
from urllib.parse import SplitResult

from raykv.protocol.location import KEY_BYTES

HEAD_BYTES = 64
MARKER = bytes(KEY_BYTES)  # a key that no block has: `put_many` and `get_many` take this key, `scan` leaves it out
BATCH = 4096  # maximum number of blocks in a batch of `scan`
FOLDERS = tuple(f"{i:02x}" for i in range(256))  # folders in the paths that `path_of` returns
_PATH = re.compile(r"(?:.*/)?([0-9a-f]{2})/(\1[0-9a-f]{30})")


class Block(NamedTuple):
    """A block to store."""

    key: bytes  # KEY_BYTES
    head: bytes  # HEAD_BYTES that the caller chooses, stored and returned with the body
    body: memoryview  # contiguous bytes in the caller's memory, valid during the call


class Tier(Protocol):
    """Stores blocks by key, outside the nodes' memory. `register_tier` takes a function that makes tiers.

    Thread-safe. A key always means the same bytes, so storing a block again is harmless. If a call fails for a block,
    the answer has False or None at that block's place. OSError, or a library's own error, means that the whole tier has
    failed.
    """

    shared: bool  # whether all nodes see the same blocks

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks. Returns for each block whether the tier has it now; False means that there was no room."""

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        """Read the body of each block into its `out` (contiguous, writable, as long as the body), and return the heads.

        None instead of a head means that the block is absent, cut short, or not as long as its `out`. Then the content
        of that `out` is undefined.
        """

    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Delete blocks. Absent keys are ignored."""

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        """Yield all blocks in batches of (key, bytes of the body), oldest first as far as the tier knows their ages."""

    def close(self) -> None:
        """Close files and connections. No calls may follow."""


@runtime_checkable
class ReadsHeads(Tier, Protocol):
    """A tier that can read heads without bodies. A head shows whether a record is a block of raykv."""

    def get_heads(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the first HEAD_BYTES under each key, fewer if the record is shorter, or None if there is no record."""


@dataclass(frozen=True)
class TierUrl:
    """A parsed `external=` URL, and the pool whose blocks are stored there. The repr contains no password."""

    scheme: str
    text: str  # for messages: without user, password and query
    parts: SplitResult = field(repr=False)  # with user, password and query
    capacity: int  # bytes
    shared: bool | None = None  # None: the tier decides
    params: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # other parameters, for registered tiers
    pool: str = "default"


def path_of(key: bytes) -> str:
    """Return the path of a block, `ab/abcd...`, where `ab` are the first two of the key's 32 hex digits."""
    name = key.hex()
    return f"{name[:2]}/{name}"


def key_of(path: str) -> bytes | None:
    """Return the key of the block with this path, in any folder, or None if no block can have this path."""
    match = _PATH.fullmatch(path)
    return bytes.fromhex(match[2]) if match else None


def pieces(bodies: Sequence[memoryview], most: int) -> Iterator[slice]:
    """Yield slices of a long batch. Each slice has one body, or several bodies with at most `most` bytes in total."""
    start = size = 0
    for i, body in enumerate(bodies):
        if i > start and size + body.nbytes > most:
            yield slice(start, i)
            start, size = i, 0
        size += body.nbytes
    if start < len(bodies):
        yield slice(start, len(bodies))


def batches(blocks: list[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
    """Yield all blocks of a tier in batches, as `scan` does."""
    for at in range(0, len(blocks), BATCH):
        yield blocks[at : at + BATCH]


def unpacked(record: bytes | None, out: memoryview) -> bytes | None:
    """Copy a record's body into `out`, and return its head.

    Returns None if there is no record, or if its body is not as long as `out`.
    """
    if record is None or len(record) != HEAD_BYTES + out.nbytes:
        return None
    out[:] = memoryview(record)[HEAD_BYTES:]
    return record[:HEAD_BYTES]
