"""What clients tell those who follow requests."""

from typing import NamedTuple

from raykv.protocol.packing import packed, unpacked


class RequestLine(NamedTuple):
    """A request that is done, as its client reports it while somebody follows requests. It travels as bytes.

    kind: "request", of a look-up and its reads; "match", of a look-up whose blocks another process reads; "read", of
    what that process read. Times of what was not done here are -1. Counts are of tokens.
    """

    kind: str
    id: str  # of the lease: a match and its read have the same
    request: str  # the engine's own name of it; "" where it has none
    at_ms: int  # when it was done, Unix time
    node: str  # Ray node id of the client
    pid: int
    model: str
    tenant: str
    asked: int
    hit: int
    memory: int  # of the hit: on the client's node
    other: int  # on other nodes
    external: int  # in an external tier
    read: int
    size: int  # bytes that were read
    lookup_us: int
    pull_us: int  # waited for what came from elsewhere
    copy_us: int
    short: str  # why less was hit than asked, or read than hit; "" where neither is so
    about: int  # index of the node that `short` is about; -1: none

    def packed(self) -> bytes:
        """As it travels; longer texts are cut."""
        return packed(tuple(part[:LINE_TEXT] if isinstance(part, str) else part for part in self))

    @classmethod
    def unpacked(cls, data: bytes) -> "RequestLine":
        """Of `packed` bytes that another process sent. Texts get printable. ValueError for anything else."""
        parts = unpacked(data)
        if not isinstance(parts, tuple) or [type(part).__name__ for part in parts] != LINE_TYPES:
            raise ValueError(f"{len(data)} bytes are no line of a request")
        return cls._make("".join(filter(str.isprintable, part)) if isinstance(part, str) else part for part in parts)


LINE_TEXT = 160  # characters of a text, at most
LINE_BYTES = 4096  # of a line, at most
LINE_TYPES = [kind.__name__ for kind in RequestLine.__annotations__.values()]


class Followed(NamedTuple):
    """Answer to `follow`: lines of requests that are new since the cursor."""

    cursor: tuple[int, int, int]  # for the next call; (0, 0, 0) asks for none yet
    lines: tuple[bytes, ...]  # RequestLine.packed
    left_out: int  # requests since the cursor that are not among them
    names: dict[int, str]  # of nodes, by the index that locations carry
