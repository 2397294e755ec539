"""Transfers blocks between nodes as Ray objects. This is the slowest transport, but it works wherever Ray works."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError

from raykv.arena.buffers import rows_within
from raykv.arena.checksum import judge
from raykv.cluster import ray_calls
from raykv.protocol.transfers import ALTERED, BlocksRead, seconds_left
from raykv.transports.base import Peer, PullRequest, Transport


class ObjectStore(Transport):
    """Calls `NodeStore.read` of the peer, which copies blocks into Ray's object store. This node copies them out."""

    name = "object_store"
    concurrent = True

    def pull(self, peer: Peer, offer: Any, request: PullRequest) -> NDArray[np.uint8]:
        source, keys, arena, target, end = request
        order = np.lexsort((source["slot"], source["slab"]))  # adjacent slots are sent as one array
        source, keys, target = source[order], keys[order], target[order]
        method = peer.store.read.options(concurrency_group="tier_read") if peer.external else peer.store.read
        answer = method.remote(source.tobytes(), keys.tobytes())
        # Call `wait` first. While `get` waits, it keeps the lock of Ray's store client. A thread that frees an object
        # would wait for this lock while it holds the GIL, and so stop all threads.
        if not ray_calls.wait([answer], timeout=seconds_left(end))[0]:
            raise GetTimeoutError(f"{len(source)} blocks did not arrive in time")
        read, size = BlocksRead(*ray_calls.get(answer, timeout=seconds_left(end))), int(source["bytes"][0])
        there = np.frombuffer(read.mask, np.uint8) > 0
        checksums, positions = np.frombuffer(read.checksums, np.uint64), np.frombuffer(read.positions, np.uint32)
        if not len(there) == len(checksums) == len(positions) == len(source):
            raise ConnectionError(f"a peer did not answer for each of {len(source)} blocks")
        checksums, positions, rows = checksums[there], positions[there], rows_within(read.runs, size)
        written = arena.write(target[there], keys[there], rows, positions, checksums)
        payloads = (block for run in read.runs for block in run.reshape(-1, size))
        verdicts = np.full(len(there), ALTERED, np.uint8)
        verdicts[order[there]] = judge(written, payloads, checksums)
        return verdicts
