"""The settings of a pool, and the constants that several parts of raykv share.

Only this module parses sizes ("20GiB", 0.3). It imports no other module of raykv.
"""

import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

MIB = 1 << 20
NAMESPACE = "raykv"  # Ray's namespace of every actor that raykv starts
METADATA_DEADLINE_S = 0.25  # default deadline for the directory's answer to a client's question
HEARTBEAT_S = 1.0  # interval between two heartbeats of a node
SUSPECT_AFTER_S = 3.0 * HEARTBEAT_S  # a node without a heartbeat for this time is "suspect"
KEEP_MOST_S = 24 * 3600.0  # maximum time for which a hint keeps a block
CLIENT_TTL_S = 10.0  # a client that sends nothing for this time counts as gone
TRANSPORTS = ("auto", "nixl", "tcp", "object_store")
# By setting `write`: share of a node's slots that can take a new block at once. The pool keeps such a slot free, or
# copies the slot's block to the external tier.
WRITE_SHARES = {"back": 0.25, "through": 1.0, "never": 0.0}
FLUSH_DEADLINE_S = 300.0  # deadline for demoting all blocks to the external tier when a pool stops
USES_MAX = 255  # maximum of a block's count of matches
KEYS_PER_CALL = 6000  # maximum keys of a call (96 KB): an argument of a Ray call costs 2 to 4 ms more above 100 KB
KEYS_PER_JOINT_CALL = 200_000  # maximum keys of a call that can't be split: 3.2 MB; the directory accepts 4 MiB
MIN_MEMORY = 8 * MIB  # minimum size of an arena, in bytes

Size = float | int | str  # a memory size: see parse_size
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt]?)(i?)b?)", re.IGNORECASE)


@dataclass(frozen=True)
class PoolConfig:
    """Settings of a pool. ValueError for an impossible setting.

    name: 1 to 40 letters, digits, '_' or '-', and no '-' first.
    cpu_memory: memory that each node gives to the pool: a fraction of the node's memory (0.3), or bytes (an int above
        1, or "20GiB"); see `parse_size`.
    gpu_memory: memory that each GPU gives to the pool, in the same form as `cpu_memory`. Blocks of engines that attach
        with `device=` are stored on that GPU first. 0: no GPU tier.
    locality: a writer's node evicts its own coldest block. If a block of another node has been idle more than
        `locality` times as long, the pool evicts that block instead. 1 is exact cluster-wide LRU. With a value above 1,
        the pool changes to exact LRU when memory is scarce. When memory is plentiful, the pool uses some of it for
        copies of other nodes' blocks.
    transport: how blocks travel between nodes. "auto": each pair of nodes uses the best transport that both support:
        NIXL over RDMA, else TCP between node stores. While that transport fails, the pair uses Ray's object store.
        "nixl": NIXL over any network. "tcp": no NIXL. "object_store": only Ray's object store, for networks that only
        Ray may use. If Ray uses TLS, TCP uses TLS with Ray's certificates, and "nixl" is refused.
    external: URL of the external tier. "file:///mnt/nvme/raykv?capacity=200GiB" gives each node its own tier; append
        "&shared=1" for a shared mount. "redis://host:6379?capacity=50GiB" or "s3://bucket/prefix?capacity=1TiB" is one
        tier for all nodes. The tier outlives the pool, so the pool needs a `secret`.
    write: which blocks are demoted, that is, copied to the external tier. "back": a node's oldest blocks, before their
        memory is needed; "through": every block soon after it is stored; "never": none.
    min_hits: number of matches that must have asked for a block before it is demoted.
    deadline: seconds that a client waits for the directory's answer, at most 10; a later answer is a miss. Raise it if
        engines keep all processors busy; clients then take longer to notice a directory that hangs. A router waits a
        fifth of the deadline. A read waits for staging slots on its node for eight deadlines, but at least 2 s.
    idle_node_s: the pool leaves a node when nothing else has run on the node for this number of seconds. The node's
        blocks move to other nodes, and the node's store ends, so that Ray's autoscaler can remove the node. 0: never.
        Ray's head always keeps its store.
    secret: the secret that keys are derived from, as bytes or as the path of a file that only its owner can read.
        Default: the environment variable RAYKV_SECRET, else a random secret that is kept in Ray's internal KV.
    """

    name: str = "default"
    cpu_memory: Size = 0.3
    gpu_memory: Size = 0
    locality: float = 1.5
    transport: str = "auto"
    external: str | None = field(default=None, repr=False)  # the URL may contain a password
    write: str = "back"
    min_hits: int = 0
    deadline: float = METADATA_DEADLINE_S
    idle_node_s: float = 0.0
    secret: bytes | str | Path | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,39}", self.name):
            raise ValueError(f"pool name {self.name!r}: use 1 to 40 letters, digits, '_' or '-', and no '-' first")
        object.__setattr__(self, "cpu_memory", memory_size("cpu_memory", self.cpu_memory))
        gpu_memory = 0 if self.gpu_memory in (0, "0") else memory_size("gpu_memory", self.gpu_memory)
        object.__setattr__(self, "gpu_memory", gpu_memory)
        if not self.locality >= 1:
            raise ValueError(f"locality={self.locality}: must be at least 1 (1 is exact cluster-wide LRU)")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r}: use one of {', '.join(TRANSPORTS)}")
        if self.write not in WRITE_SHARES:
            raise ValueError(f"write={self.write!r}: use one of {', '.join(WRITE_SHARES)}")
        if not 0 <= self.min_hits <= USES_MAX:
            raise ValueError(f"min_hits={self.min_hits}: must be from 0 to {USES_MAX}")
        if isinstance(self.deadline, bool) or not isinstance(self.deadline, int | float) or not 0 < self.deadline <= 10:
            raise ValueError(
                f"deadline={self.deadline!r}: give seconds above 0, and at most 10: for up to so long a request waits "
                f"for a directory that hangs"
            )
        if isinstance(self.idle_node_s, bool) or not 0 <= self.idle_node_s < float("inf"):
            raise ValueError(f"idle_node_s={self.idle_node_s!r}: give seconds, or 0 for no node ever")
        if self.external is not None and "://" not in self.external:  # `start` checks the rest of the URL
            raise ValueError("external= is not a URL such as file:///mnt/nvme/raykv?capacity=200GiB")

    def explicit_secret(self) -> bytes | None:
        """Return the secret that the user gave, or None.

        ValueError for an empty secret, and for a file that is missing or that others can read.
        """
        given = self.secret if self.secret is not None else os.environ.get("RAYKV_SECRET", "").encode() or None
        if given in (b"", ""):
            raise ValueError(f"secret={given!r} is empty: anybody could derive its keys. Leave it out for a random one")
        if given is None or isinstance(given, bytes):
            return given
        path = Path(given)
        if not path.is_file():
            raise ValueError(
                "secret= names no file that is there: a str is the path of a file that holds the secret; "
                "give the secret itself as bytes"
            )
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"secret file {path} is readable by others (mode {mode & 0o777:o}): chmod 600 {path}")
        secret = path.read_bytes().strip()
        if not secret:
            raise ValueError(f"secret file {path} is empty")
        return secret


TENANT_CHARACTERS = 64  # maximum length of a tenant's name: the name is a label of metrics


def check_tenant(name: object) -> str:
    """Check and return a tenant's name. ValueError for a bad name."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= TENANT_CHARACTERS:
        raise ValueError(f"tenant={name!r}: give a name of 1 to {TENANT_CHARACTERS} printable characters")
    return name


@dataclass(frozen=True)
class Quota:
    """A tenant's share of a pool's memory. ValueError for impossible shares.

    minimum: share of all nodes' memory that other tenants can't take from the tenant; 0 to 1. maximum: the largest
    share that the tenant can have; 0 to 1, where 1 means no limit.
    """

    minimum: float = 0.0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        for name, share in (("minimum", self.minimum), ("maximum", self.maximum)):
            if not isinstance(share, float | int) or not 0 <= share <= 1:
                raise ValueError(f"{name}={share!r}: give a share of the pool's memory, from 0 to 1")
        if self.minimum > self.maximum:
            raise ValueError(f"minimum={self.minimum:g} is above maximum={self.maximum:g}: raise that, or lower this")


def parse_size(name: str, given: Size) -> float | int:
    """Parse a size: return a fraction as a float in (0, 1], or bytes as an int above 1.

    given: a float, an int, a number as text ("0.3", "1073741824"), or a text with a unit ("500MB", "20GiB"). As
    in Kubernetes, Ki, Mi, Gi and Ti are powers of 1024, and k, M, G and T are powers of 1000. A `B` after the unit, and
    upper or lower case, make no difference. 1, 1.0 and "1" mean the whole, not one byte.
    name: the setting's name, for messages. Raises ValueError for any other value.
    """
    value = _number(given) if isinstance(given, str) else given
    if isinstance(value, float) and 0 < value <= 1:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return 1.0 if value == 1 else value
    raise ValueError(
        f"{name}={given!r}: give a fraction such as 0.3, or bytes: an int above 1, or a size such as '20GiB' or '500MB'"
    )


def _number(text: str) -> float | int | None:
    """Convert a size's text to a number: to a float only if it has a point and no unit. Returns None for other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    number, unit, binary = match.groups()
    if text.strip() == number:
        return float(number) if "." in number else int(number)
    bytes_ = int(Decimal(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))
    return bytes_ if bytes_ > 1 else None


def memory_size(name: str, given: Size) -> float | int:
    """Like `parse_size`, but for an arena: a size in bytes must be at least MIN_MEMORY."""
    size = parse_size(name, given)
    if isinstance(size, int) and size < MIN_MEMORY:
        raise ValueError(f"{name}={given!r} is {size} bytes: the smallest arena has {MIN_MEMORY} (8 MiB)")
    return size


def fingerprint(pool: str, secret: bytes) -> bytes:
    """Return 16 bytes that mark a pool's arenas and external tiers: a hash of pool and secret that hides the secret."""
    return hashlib.sha256(b"raykv arena\0" + pool.encode() + b"\0" + hashlib.sha256(secret).digest()).digest()[:16]


def slab_bytes(capacity: int) -> int:
    """Return the slab size for an arena of `capacity` bytes: about a 32nd, a power of two from 4 MiB to 1 GiB."""
    return min(1 << 30, max(4 * MIB, 1 << max(0, (capacity // 32).bit_length() - 1)))


def staging_window(capacity: int) -> int:
    """Return the bytes of a node's staging window: 2% of the arena, at least 256 MiB, at most an eighth of it."""
    return min(max(capacity // 50, 256 * MIB), capacity // 8)


def capacity_bytes(memory: Size, total: int) -> int:
    """Return an arena's size in bytes. memory: bytes, or a fraction of `total` bytes."""
    size = parse_size("memory", memory)
    return size if isinstance(size, int) else int(size * total)
