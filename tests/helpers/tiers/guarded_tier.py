"""Blocks that a test stores in a guarded tier and loads again, and the files of such blocks."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from helpers.pools import payload
from raykv.tiers import Tier, open_tier, parse
from raykv.tiers.base import path_of
from raykv.tiers.guarded import GuardedTier

SIZE = 64 << 10
OURS, OTHERS = b"fingerprint-ours", b"fingerprint-else"
SEED, NEXT = b"the seed", b"cleared."
DEADLINE_S = 0.3  # of every call in tests with `hasty`
Keys = NDArray[np.uint8]


def folder(path: Path) -> Tier:
    return open_tier(parse(f"file://{path}?capacity=64MiB"))


def some_keys(count: int, seed: int = 1) -> Keys:
    return np.random.default_rng(seed).integers(1, 256, (count, 16), np.uint8)


def store(tier: GuardedTier, keys: Keys, bodies: NDArray[np.uint8] | None = None, size: int = SIZE) -> list[bool]:
    rows = payload(keys, size) if bodies is None else bodies
    sums = np.array([xxh3_64_intdigest(row) for row in payload(keys, size)], np.uint64)
    stored: list[bool] = tier.store(keys, sums, keys[:, 0].astype(np.uint32), [row.data for row in rows]).tolist()
    return stored


def load(tier: GuardedTier, keys: Keys, size: int = SIZE) -> list[bool]:
    """Which of the blocks the tier has. AssertionError if a block that it gives is wrong."""
    found: list[bool] = []
    for piece, rows, sums, positions, there in tier.load(keys, size):
        assert piece.start == len(found)
        right = payload(keys[piece], size)
        for i in np.flatnonzero(there).tolist():
            assert (rows[i] == right[i]).all() and positions[i] == keys[piece.start + i, 0]
            assert sums[i] == xxh3_64_intdigest(right[i])
        found += there.tolist()
    return found


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def file_of(folder: Path, key: bytes) -> Path:
    (path,) = folder.rglob(path_of(key))
    return path
