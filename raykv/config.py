"""What a pool is started with."""

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from raykv.tiers import parse, tier_for

MIB = 1 << 20
NAMESPACE = "raykv"  # of every actor that raykv starts
METADATA_DEADLINE_S = 0.25
HEARTBEAT_S = 1.0
SUSPECT_AFTER_S = 3.0 * HEARTBEAT_S
CLIENT_TTL_S = 10.0  # a client that has said nothing for this long is gone
TRANSPORTS = ("auto", "nixl", "tcp", "object_store")
# Of a node's slots, how many are kept free or copied to its external tier, so that what needs room finds it at once.
WRITE_SHARES = {"back": 0.25, "through": 1.0, "never": 0.0}
FLUSH_DEADLINE_S = 300.0  # for what is still to go down when a pool stops
USES_MAX = 255  # matches of a block that are counted
KEYS_PER_CALL = 6000  # 96 KB of keys: past 100 KB a Ray argument costs 2 to 4 ms more


@dataclass(frozen=True)
class PoolConfig:
    """Settings of a pool.

    name: letters, digits, '_' and '-'; at most 40 of them.
    cpu_memory: of every node: a fraction of its memory (float in (0, 1]) or bytes (int).
    gpu_memory: of every GPU that a node has: a fraction of its memory (float in (0, 1]), or bytes (int). What engines
        that attach with `device=` store goes there first. 0: no such tier.
    locality: how much longer than its writer's own coldest block another node's must have been idle before that one
        is evicted for it. 1 is exact cluster-wide LRU.
    transport: how blocks cross nodes. "auto": of each pair of nodes the best that both have: NIXL over RDMA, else TCP
        from node store to node store, and while that fails, or where Ray uses TLS, Ray's object store. "nixl": NIXL
        whatever it runs over; "tcp": no NIXL; "object_store": always, for networks that only Ray may use.
    external: URL of the tier below memory, such as "file:///mnt/nvme/raykv?capacity=200GiB" (every node's own; for a
        shared mount append "&shared=1"), "redis://host:6379?capacity=50GiB" or "s3://bucket/prefix?capacity=1TiB" (all
        nodes'). It outlives the pool, so it takes a `secret`.
    write: what goes down there: "back", a node's oldest blocks before their room is needed; "through", every block soon
        after it is stored; "never".
    min_hits: how often a block must have been asked for to go down.
    secret: what keys are derived from: bytes, or the path of a file only its owner can read. Default: the environment's
        RAYKV_SECRET, else a random one kept in Ray's internal KV.
    """

    name: str = "default"
    cpu_memory: float | int = 0.3
    gpu_memory: float | int = 0
    locality: float = 1.5
    transport: str = "auto"
    external: str | None = None
    write: str = "back"
    min_hits: int = 0
    secret: bytes | str | Path | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", self.name):
            raise ValueError(f"pool name {self.name!r}: use 1 to 40 letters, digits, '_' or '-'")
        check_memory("cpu_memory", self.cpu_memory)
        if self.gpu_memory != 0:
            check_memory("gpu_memory", self.gpu_memory)
        if not self.locality >= 1:
            raise ValueError(f"locality={self.locality}: must be at least 1 (1 is exact cluster-wide LRU)")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r}: use one of {', '.join(TRANSPORTS)}")
        if self.write not in WRITE_SHARES:
            raise ValueError(f"write={self.write!r}: use one of {', '.join(WRITE_SHARES)}")
        if not 0 <= self.min_hits <= USES_MAX:
            raise ValueError(f"min_hits={self.min_hits}: must be from 0 to {USES_MAX}")
        if self.external is not None:
            tier_for(parse(self.external))

    def explicit_secret(self) -> bytes | None:
        """The secret that the user gave, or None. Raises ValueError on a file that others can read."""
        given = self.secret if self.secret is not None else os.environ.get("RAYKV_SECRET", "").encode() or None
        if given == b"":
            raise ValueError("secret is empty: anybody could derive its keys")
        if given is None or isinstance(given, bytes):
            return given
        path = Path(given)
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"secret file {path} is readable by others (mode {mode & 0o777:o}): chmod 600 {path}")
        secret = path.read_bytes().strip()
        if not secret:
            raise ValueError(f"secret file {path} is empty")
        return secret


def check_memory(name: str, value: float | int) -> None:
    """ValueError unless it is a fraction of a memory, or bytes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r}: give a fraction of the memory or bytes")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"{name}={value}: a float is a fraction in (0, 1]; bytes are an int")
    if isinstance(value, int) and value < 8 * MIB:
        raise ValueError(f"{name}={value} bytes: the smallest arena is {8 * MIB} (8 MiB)")


def fingerprint(pool: str, secret: bytes) -> bytes:
    """16 bytes that tell whether stored blocks belong to this pool and secret, without telling the secret."""
    return hashlib.sha256(b"raykv arena\0" + pool.encode() + b"\0" + hashlib.sha256(secret).digest()).digest()[:16]


def slab_bytes(capacity: int) -> int:
    """Bytes of a slab in an arena of `capacity` bytes: about 32 slabs, a power of two from 4 MiB to 1 GiB."""
    return min(1 << 30, max(4 * MIB, 1 << max(0, (capacity // 32).bit_length() - 1)))


def capacity_bytes(cpu_memory: float | int, total: int) -> int:
    """Bytes of a node's arena: `cpu_memory` is bytes (int), or a fraction of the node's `total` bytes (float)."""
    return cpu_memory if isinstance(cpu_memory, int) else int(cpu_memory * total)
