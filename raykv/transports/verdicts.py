"""What became of blocks that were to cross nodes, and how long they may take."""

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

FAILED, PULLED, ALTERED = range(3)


def seconds_left(end: float) -> float:
    """Until the time `end` (time.monotonic()); never 0, which some calls take for no deadline."""
    return max(0.001, end - time.monotonic())


def data_deadline(size: int) -> float:
    """Seconds that `size` bytes may take: a slow link's 100 MB/s, and 2 s for a busy machine."""
    return 2.0 + size / 100e6


def judge(
    written: NDArray[np.bool_], payloads: Iterable[NDArray[np.uint8]], sums: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    """Verdicts of blocks that arrived. One that was not written is ALTERED if its bytes are not what they were."""
    return np.array(
        [
            PULLED if done else FAILED if xxh3_64_intdigest(payload.data) == total else ALTERED
            for done, payload, total in zip(written, payloads, sums.tolist(), strict=True)
        ],
        np.uint8,
    )
