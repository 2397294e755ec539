"""A pool at one moment, as its page shows it. The page's scripts read it as JSON: see static/page.js."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A living Ray node.

    shown: short id. state, why: as in `raykv status`. limit: bytes of memory that it may offer; None if the directory
    does not know the node. fills: (bytes used, bytes) by tier, of its tiers. faults: counts of its store by kind, since
    the store started.
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
    """Bytes that one memory has read from another since the reader's store started. bytes, failed: by transport."""

    reader: str
    source: str
    transport: str
    gbps: float
    bytes: dict[str, int]
    failed: dict[str, int]


@dataclass(frozen=True)
class Prefix:
    """A prefix at whose end look-ups ended.

    key: of its last block, in hex. blocks: its length. size: its bytes. hits: number of look-ups. idle_s: seconds since
    the last look-up. nodes: short ids of the nodes whose memory has its last block.
    """

    key: str
    blocks: int
    size: int
    hits: int
    idle_s: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Sight:
    """counts: of the directory; empty while it does not answer. hits: found blocks, by where they were.
    hit_curve: hit rates by multiples of the memory, and the `ceiling`; empty before a block was asked for.

    tiers: state of external tiers by short id of their node, or "all nodes". upkeep: faults of the directory, its
    successor and the supervisor; "" if they are well.
    """

    pool: str
    epoch: int | None
    nodes: tuple[Node, ...]
    counts: dict[str, int]
    hits: dict[str, int]
    hit_curve: dict[str, float]
    routes: tuple[Route, ...]
    tiers: dict[str, str]
    upkeep: dict[str, str]
    prefixes: tuple[Prefix, ...]
