"""Blocks cross nodes as Ray objects."""

from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError

from raykv.arena.buffers import rows_within
from raykv.arena.checksum import judge
from raykv.protocol import ALTERED, seconds_left
from raykv.transports.base import Peer, PullRequest, Transport


class ObjectStore(Transport):
    """A peer's blocks are what its `read` returns: one copy into Ray's object store there, one out of it here."""

    name = "object_store"

    def pull(self, peer: Peer, offer: Any, wanted: PullRequest) -> NDArray[np.uint8]:
        source, keys, arena, target, end = wanted
        order = np.lexsort((source["slot"], source["slab"]))  # neighbours travel as one array
        source, keys, target = source[order], keys[order], target[order]
        read = peer.store.read.options(concurrency_group="lift") if peer.external else peer.store.read
        answer = read.remote(source.tobytes(), keys.tobytes())
        # Not by `get`: one that waits keeps the lock of Ray's store client, and who lets go of an object meanwhile
        # waits for that lock with the GIL in his.
        if not ray.wait([answer], timeout=seconds_left(end))[0]:
            raise GetTimeoutError(f"{len(source)} blocks did not arrive in time")
        mask, sums, positions, runs = ray.get(answer, timeout=seconds_left(end))
        ok = np.frombuffer(mask, np.bool_)
        expected = np.frombuffer(sums, np.uint64)[ok]
        size = int(source["bytes"][0])
        where = np.frombuffer(positions, np.uint32)[ok]
        written = arena.write(target[ok], keys[ok], rows_within(runs, size), where, expected)
        payloads = (block for run in runs for block in run.reshape(-1, size))
        verdicts = np.full(len(ok), ALTERED, np.uint8)
        verdicts[order[ok]] = judge(written, payloads, expected)
        return verdicts
