"""Blocks cross nodes as Ray objects."""

import threading
from collections import defaultdict
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError

from raykv.arena import Arena
from raykv.rows import rows_within
from raykv.transports.verdicts import ALTERED, data_deadline, judge


class ObjectStore:
    """A peer's blocks are what its `read` returns: one copy into Ray's object store there, one out of it here.

    Of one peer's objects one crosses at a time: Ray sends several in turns, chunk by chunk, so that all would arrive at
    the end, and no copy out of one would overlap the crossing of the next.
    """

    def __init__(self) -> None:
        self._turns: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)

    def pull(
        self, peer: Any, source: NDArray[np.void], keys: NDArray[np.uint8], arena: Arena, target: NDArray[np.void]
    ) -> NDArray[np.uint8]:
        """Copy blocks (n PLACEs) of a peer into slots of `arena`; verdicts FAILED, PULLED, or ALTERED there.

        Raises RayError if the peer does not answer in time.
        """
        order = np.lexsort((source["slot"], source["slab"]))  # neighbours travel as one array
        source, keys, target = source[order], keys[order], target[order]
        below = bool(source["node"][0] & 1)
        read = peer.read.options(concurrency_group="lift") if below else peer.read
        answer = read.remote(source.tobytes(), keys.tobytes())
        deadline = data_deadline(int(source["bytes"].sum()))
        turn = self._turns[peer, below]  # what comes from its tier is waited for, and not by what comes from memory
        if not turn.acquire(timeout=deadline):
            raise GetTimeoutError(f"the objects before this one took {deadline:.1f} s")
        try:
            # Not by `get`: one that waits keeps the lock of Ray's store client, and who lets go of an object meanwhile
            # waits for that lock with the GIL in his.
            if not ray.wait([answer], timeout=deadline)[0]:
                raise GetTimeoutError(f"{len(source)} blocks did not arrive in {deadline:.1f} s")
            mask, sums, positions, runs = ray.get(answer, timeout=deadline)
        finally:
            turn.release()
        ok = np.frombuffer(mask, np.bool_)
        expected = np.frombuffer(sums, np.uint64)[ok]
        size = int(source["bytes"][0])
        where = np.frombuffer(positions, np.uint32)[ok]
        written = arena.write(target[ok], keys[ok], rows_within(runs, size), where, expected)
        payloads = (block for run in runs for block in run.reshape(-1, size))
        verdicts = np.full(len(ok), ALTERED, np.uint8)
        verdicts[order[ok]] = judge(written, payloads, expected)
        return verdicts
