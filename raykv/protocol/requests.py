"""Reports of clients to people who follow requests."""

from typing import NamedTuple

from raykv.protocol.packing import packed, unpacked


class RequestLine(NamedTuple):
    """A finished request. While somebody follows requests, the request's client reports this line, as bytes.

    kind: "request" for a look-up and its reads; "match" for a look-up for another process, which reads the blocks;
    "read" for the reads of that other process. A time is -1 for a step that this process did not do. Counts are numbers
    of tokens.
    """

    kind: str
    id: str  # id of the lease; a "match" and its "read" have the same id
    request: str  # the engine's name of the request, or ""
    at_ms: int  # Unix time when the request was done
    node: str  # Ray node id of the client
    pid: int
    model: str
    tenant: str
    asked: int
    hit: int
    memory: int  # part of `hit` on the client's node
    other: int  # part of `hit` on other nodes
    external: int  # part of `hit` in an external tier
    read: int
    size: int  # number of bytes that were read
    lookup_us: int
    pull_us: int  # time spent waiting for blocks from elsewhere
    copy_us: int
    short: str  # why the hit is shorter than `asked`, or `read` is shorter than the hit; else ""
    about: int  # index of the node that `short` names; -1: none

    def packed(self) -> bytes:
        """Return the line as it travels; long texts are cut to LINE_TEXT characters."""
        return packed(tuple(part[:LINE_TEXT] if isinstance(part, str) else part for part in self))

    @classmethod
    def unpacked(cls, data: bytes) -> "RequestLine":
        """Return the line that another process sent, without unprintable characters. ValueError for other bytes."""
        parts = unpacked(data)
        if not isinstance(parts, tuple) or [type(part).__name__ for part in parts] != LINE_TYPES:
            raise ValueError(f"{len(data)} bytes are no line of a request")
        return cls._make("".join(filter(str.isprintable, part)) if isinstance(part, str) else part for part in parts)


LINE_TEXT = 160  # maximum characters of a text
LINE_BYTES = 4096  # maximum bytes of a line
LINE_TYPES = [kind.__name__ for kind in RequestLine.__annotations__.values()]


class Followed(NamedTuple):
    """The answer to `follow`: lines of requests since the caller's cursor."""

    cursor: tuple[int, int, int]  # cursor for the next call. The first call passes (0, 0, 0), and gets no lines
    lines: tuple[bytes, ...]  # RequestLine.packed
    left_out: int  # number of requests since the cursor that are missing in `lines`
    names: dict[int, str]  # names of nodes, by index in locations
