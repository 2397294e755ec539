"""What a tier is, and what it is opened with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult

from raykv.protocol import KEY_BYTES

HEAD_BYTES = 64
MARKER = bytes(KEY_BYTES)  # a key that is no block's: put, get and exists take it, `scan` leaves it out


class Block(NamedTuple):
    """What `put_many` is given."""

    key: bytes  # KEY_BYTES
    head: bytes  # HEAD_BYTES, the caller's own: stored and given back with the body
    body: memoryview  # contiguous bytes in the caller's memory, valid during the call


class Tier(Protocol):
    """Blocks by key, below the memory of nodes.

    Thread-safe. A key always means the same bytes, so that putting it again is harmless. What is wrong with one block
    is told in its place of the answer; OSError, or an error of the library's own, says that the tier is out of order.
    """

    shared: bool  # whether all nodes see one content

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        """Which of the blocks are stored now. False: there is no room for it."""

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        """Heads, with each body in its `out` (contiguous and writable; undefined where the head is None).

        None: not there, cut short, or of another length than its `out`.
        """

    def exists_many(self, keys: Sequence[bytes]) -> list[bool]: ...

    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Forget these keys, of which some may not be there."""

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        """Batches of (key, bytes of its body) of all that is there, oldest first as far as the tier knows."""

    def usage(self) -> int:
        """Bytes taken: what was put and deleted here, put right by each `scan` that went through."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class TierUrl:
    """A parsed `external=` URL, and the pool whose blocks lie there. Its repr holds no password."""

    scheme: str
    text: str  # for messages: without user, password and query
    parts: SplitResult = field(repr=False)  # with them
    capacity: int  # bytes
    shared: bool | None = None  # None: as the tier says
    params: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # others, for tiers that users register
    pool: str = "default"
