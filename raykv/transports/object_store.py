"""Blocks cross nodes as Ray objects."""

from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from raykv.arena import Arena


def data_deadline(size: int) -> float:
    """Seconds that `size` bytes may take: a slow link's 100 MB/s, and 2 s for a busy machine."""
    return 2.0 + size / 100e6


class ObjectStore:
    """A peer's blocks are the return value of its `read`: one copy into Ray's object store there, one out of it here."""

    def pull(
        self, peer: Any, source: NDArray[np.void], keys: NDArray[np.uint8], arena: Arena, target: NDArray[np.void]
    ) -> NDArray[np.uint8]:
        """Copy blocks (n PLACEs) of a peer into slots of `arena`; verdicts 0 failed, 1 pulled, 2 altered there.

        Raises RayError if the peer does not answer in time.
        """
        answer = peer.read.remote(source.tobytes(), keys.tobytes())
        mask, sums, payloads = ray.get(answer, timeout=data_deadline(int(source["bytes"].sum())))
        ok = np.frombuffer(mask, np.bool_)
        verdicts = np.where(ok, 0, 2).astype(np.uint8)
        expected = np.frombuffer(sums, np.uint64)[ok]
        verdicts[ok] = arena.write(target[ok], keys[ok], payloads, expected=expected)
        return verdicts
