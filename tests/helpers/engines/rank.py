"""A rank of an engine as an actor, which stores and reads its part. It needs no vLLM, whose import takes seconds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import raykv
from raykv.arena import buffers
from raykv.client.leases.lease import Lease, Leased

HASHES = [bytes([i]) * 32 for i in range(12)]
CACHE: dict[str, Any] = {"model": "m", "dtype": "uint8", "layout": "rows", "block_tokens": 16}


class StoringRank:
    """A rank whose blocks have the number of its part in every byte."""

    def __init__(self, pool: str) -> None:
        self.pool = raykv.attach(pool)

    def put(self, part: int, part_bytes: int, count: int) -> int:
        cache = self.pool.cache(**CACHE, part=part, block_bytes=part_bytes)
        return cache.store(cache.rekey(HASHES[:count]), np.full((count, part_bytes), part, np.uint8), wait=True)

    def get(self, leased: list[Leased], part_bytes: int) -> NDArray[np.uint8]:
        """Read blocks by another process's leases. Returns those that came."""
        found = []
        for blocks in leased:
            lease = Lease.borrowed(self.pool.session, part_bytes, blocks)
            out = np.full((len(lease), part_bytes), 255, np.uint8)
            count = lease.read(buffers.dense("out", out, len(lease), part_bytes), verify=True)
            found.append(out[:count])
        return np.concatenate(found)
