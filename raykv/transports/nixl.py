"""Blocks cross nodes by NIXL: one-sided reads out of a peer's arena straight into ours, no copy on either side.

UCX carries them: RDMA where there is a card for it, else shared memory or TCP. A reader asks the peer's actor once a
pull what its headers say, and where the slots are; the bytes come without anybody there. NIXL's metadata crosses in
that answer, so that only who is in the Ray cluster can have it.
https://github.com/ai-dynamo/nixl, version 1.5.
"""

import contextlib
import os
import secrets
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.arena import block_copy
from raykv.arena.arena import Arena
from raykv.protocol import ALTERED, FAILED, KEY_BYTES, LOCATION, PULLED, seconds_left
from raykv.transports.base import Peer, PullRequest, Transport, ask, translated

RDMA = "/sys/class/infiniband"  # a folder for each card, of RoCE too
POLL_S = 1e-4
LATE_S = 1.0  # for what is yet under way of a transfer that failed: neither its release nor `_forget` stops that
SHOWN = np.dtype([("there", "?"), ("position", "<u4"), ("sum", "<u8"), ("address", "<i8")])  # of a block, to a peer
Addresses = NDArray[np.int64]


def why_not() -> str:
    """Why this process can't use NIXL; "" if it can."""
    try:
        import nixl._api  # noqa: F401
    except ImportError as error:
        return f"NIXL is not installed here ({error}): pip install 'raykv[nixl]'"
    return ""


def has_rdma() -> bool:
    return os.path.isdir(RDMA) and bool(os.listdir(RDMA))


@dataclass
class Known:
    """A peer's agent, as this one knows it."""

    version: int = -1  # of its metadata
    agent: str = ""
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="raykv-nixl"))
    busy: bool = False  # a transfer whose caller has left may still be under way


class Nixl(Transport):
    """Reads out of peers' arenas, and has them read from ours."""

    name = "nixl"

    def __init__(self, arena: Arena) -> None:
        """ImportError without NIXL."""
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        config = nixl_agent_config(backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent: Any = nixl_agent(f"raykv-{secrets.token_hex(8)}", config)
        self._arena = arena
        self._registered: dict[int, Any] = {}  # by slab
        self._version = 0
        self._known: defaultdict[str, Known] = defaultdict(Known)
        self._mutex = threading.Lock()

    def offer(self) -> str:
        """The agent's name."""
        return str(self._agent.name)

    # ------------------------------------------------------------------ for peers

    def serve(self, agent: str, locations: bytes, keys: bytes, version: int) -> tuple[bytes, int, bytes]:
        """What is SHOWN of blocks, and the version of this agent's metadata.

        With the metadata itself where the peer knows another version of it. ValueError if it means another agent.
        """
        if agent != self.offer():
            raise ValueError(f"{agent} was another process's: ask for its offer again")
        at, names = np.frombuffer(locations, LOCATION), np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        shown = np.zeros(len(at), SHOWN)
        shown["sum"], shown["position"], shown["there"] = self._arena.read_headers(at, names)
        shown["address"] = self._arena.addresses(at)
        self._register(at[shown["there"]])
        with self._mutex:
            metadata = self._agent.get_agent_metadata() if version != self._version else b""
            return shown.tobytes(), self._version, metadata

    def withdraw(self, slab: int) -> None:
        """A slab's memory is about to go."""
        with self._mutex:
            if slab in self._registered:
                self._agent.deregister_memory(self._registered.pop(slab))
                self._version += 1

    # ------------------------------------------------------------------ from peers

    def pull(self, peer: Peer, offer: str, wanted: PullRequest) -> NDArray[np.uint8]:
        source, keys, arena, target, end = wanted
        known = self._known[offer]
        if known.busy:
            raise ConnectionError("an earlier transfer has not ended")
        data, version, metadata = ask(peer, end, self.name, offer, source.tobytes(), keys.tobytes(), known.version)
        shown = np.frombuffer(data, SHOWN)
        there = np.flatnonzero(shown["there"])
        known.busy = True
        job = known.thread.submit(self._read, known, version, metadata, shown[there], keys[there], arena, target[there])
        verdicts = np.full(len(source), ALTERED, np.uint8)
        try:
            verdicts[there] = job.result(seconds_left(end))
        except ConnectionError:
            self._forget(offer)
            raise
        return verdicts

    def _forget(self, offer: str) -> None:
        """A peer that may never come back; what is still there is learned anew."""
        known = self._known.pop(offer)
        known.thread.shutdown(wait=False)
        with contextlib.suppress(ConnectionError), translated("NIXL"):
            self._agent.remove_remote_agent(known.agent)

    def _read(
        self,
        known: Known,
        version: int,
        metadata: bytes,
        shown: NDArray[np.void],
        keys: NDArray[np.uint8],
        arena: Arena,
        target: NDArray[np.void],
    ) -> NDArray[np.uint8]:
        """In the thread of the peer, which stays with a transfer until it has ended, and keeps the slots' locks.

        What NIXL was asked for arrives whenever the peer goes on, even if it was released.
        """
        try:
            self._learn(known, version, metadata)
            self._register(target)
            altered = np.zeros(len(target), np.bool_)

            def fill(which: NDArray[np.bool_], slots: Addresses) -> list[int]:
                size = int(target["bytes"][0])
                self._transfer(known.agent, shown["address"][which], slots, size)
                sums = block_copy.sums(slots, size)
                altered[which] = np.array(sums, np.uint64) != shown["sum"][which]
                return sums

            written = arena.fill(target, keys, fill, shown["position"], shown["sum"])
            return np.where(written, PULLED, np.where(altered, ALTERED, FAILED)).astype(np.uint8)
        finally:
            known.busy = False

    def _learn(self, known: Known, version: int, metadata: bytes) -> None:
        if metadata:
            with translated("NIXL"):
                if known.agent:
                    self._agent.remove_remote_agent(known.agent)
                known.agent = self._agent.add_remote_agent(metadata)
            known.version = version

    def _register(self, locations: NDArray[np.void]) -> None:
        """Slab by slab: RDMA page-locks what is registered."""
        for slab in np.unique(locations["slab"]).tolist():
            with self._mutex:
                if slab not in self._registered:
                    address, length = self._arena.region(slab)
                    with translated("NIXL"):
                        self._registered[slab] = self._agent.register_memory([(address, length, 0, "")], "DRAM")
                    self._version += 1

    def _transfer(self, agent: str, remote: Addresses, local: Addresses, size: int) -> None:
        if not len(local):
            return
        with translated("NIXL"):
            handle = self._agent.initialize_xfer("READ", self._list(local, size), self._list(remote, size), agent)
            state = "ERR"
            try:
                state = self._agent.transfer(handle)
                while state == "PROC":
                    time.sleep(POLL_S)
                    state = self._agent.check_xfer_state(handle)
            finally:
                if state != "DONE":  # one of its requests failed: the others may go on
                    time.sleep(LATE_S)
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionError(f"NIXL: the transfer ended as {state}")

    def _list(self, addresses: Addresses, size: int) -> Any:
        """A list of descriptors: (address, length, device)."""
        table = np.zeros((len(addresses), 3), np.uint64)
        table[:, 0], table[:, 1] = addresses, size
        return self._agent.get_xfer_descs(table, "DRAM")
