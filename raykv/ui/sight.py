"""What the page shows of a pool at one moment. As JSON it is what the page's scripts read: see static/page.js."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A living Ray node.

    shown: how a user names it. state, why: as `raykv status` says them. limit: bytes that it may offer; None where
    the directory does not know it. fills: (bytes used, bytes) by tier, of those that it has. faults: by kind, counted
    by its store since that started.
    """

    id: str
    shown: str
    host: str
    address: str
    roles: tuple[str, ...]
    state: str
    why: str
    uptime_s: float | None
    restarts: int | None
    limit: int | None
    fills: dict[str, tuple[int, int]]
    faults: dict[str, int]


@dataclass(frozen=True)
class Route:
    """What one memory has read from another since the reader's store started. failed: by transport."""

    reader: str
    source: str
    transport: str
    gbps: float
    bytes: dict[str, int]
    failed: dict[str, int]


@dataclass(frozen=True)
class Prefix:
    """A prefix that look-ups ended with.

    key: of its last block, in hex. blocks: its length. size: of it, in bytes. hits: look-ups. idle_s: since the last.
    nodes: where its last block is in memory, as they are shown.
    """

    key: str
    blocks: int
    size: int
    hits: int
    idle_s: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Sight:
    """counts: of the directory, and `asked`; empty while it does not answer. hits: blocks found, by where they were.

    tiers: state of external tiers, by how their node is shown, or "all nodes". upkeep: what is wrong with the
    directory, its successor and the supervisor; "" where all is well.
    """

    pool: str
    epoch: int | None
    nodes: tuple[Node, ...]
    counts: dict[str, int]
    hits: dict[str, int]
    routes: tuple[Route, ...]
    tiers: dict[str, str]
    upkeep: dict[str, str]
    prefixes: tuple[Prefix, ...]
