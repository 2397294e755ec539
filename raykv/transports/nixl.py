"""Transfers blocks between nodes by NIXL: one-sided reads from a peer's arena directly into this node's arena.

UCX transfers the bytes: over RDMA if there is a card, otherwise over shared memory or TCP. In each pull the reader asks
the peer's actor once for the headers and the addresses of the slots. The actor also returns NIXL's metadata, so that
only processes of the Ray cluster get it. Then the bytes are read without the peer's processor.
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
from raykv.line import tls
from raykv.protocol.location import KEY_BYTES, LOCATION, Locations
from raykv.protocol.transfers import ALTERED, FAILED, PULLED, seconds_left
from raykv.system.extras import to_install
from raykv.transports.base import Peer, PullRequest, Transport, ask, records_of, translated
from raykv.transports.block_server import CLAIM

RDMA = "/sys/class/infiniband"  # this folder has a folder for each card, also for RoCE cards
POLL_S = 1e-4  # time between two checks whether a transfer is done
PROGRESS_US = 100_000  # microseconds for which NIXL's progress thread sleeps; UCX wakes it earlier if there is work
LATE_S = 1.0  # wait after a failed transfer: its running requests can't be stopped, and end meanwhile
BLOCK_INFO = np.dtype([*CLAIM.descr, ("address", "<i8")])  # a peer's answer about a block: its CLAIM, and its address
Addresses = NDArray[np.int64]


def why_not() -> str:
    """Return why this process can't use NIXL, or "" if it can."""
    if tls.used():
        return "RAY_USE_TLS is set, and NIXL does not encrypt"
    try:
        import nixl._api  # noqa: F401
    except ImportError as error:
        return f"NIXL is not installed here ({error}): {to_install('nixl')}"
    return ""


def has_rdma() -> bool:
    """Whether this machine has an RDMA card."""
    return os.path.isdir(RDMA) and bool(os.listdir(RDMA))


def _open_agent(name: str) -> Any:
    """Open an agent of NIXL's Python API, but with a progress thread that sleeps. The API's thread never sleeps."""
    from nixl._api import nixl_agent, nixl_agent_config, nixlBind

    config = nixlBind.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, PROGRESS_US
    config.syncMode = nixlBind.NIXL_THREAD_SYNC_STRICT
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.agent = nixlBind.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


@dataclass
class RemoteAgent:
    """A peer's NIXL agent, as this process knows it."""

    version: int = -1  # version of the agent's metadata
    name: str = ""
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="raykv-nixl"))
    busy: bool = False  # whether a transfer is running, even if its caller no longer waits


class Nixl(Transport):
    """Reads from peers' arenas, and lets peers read from this node's arena."""

    name = "nixl"

    def __init__(self, arena: Arena) -> None:
        """arena: host memory that peers read from and this node reads into. Raises ImportError without NIXL."""
        self._agent = _open_agent(f"raykv-{secrets.token_hex(8)}")
        self._arena = arena
        self._registered: dict[int, Any] = {}  # NIXL's handles by slab
        self._version = 0  # version of this agent's metadata, which changes with `_registered`
        self._remote: defaultdict[str, RemoteAgent] = defaultdict(RemoteAgent)  # by offer
        self._mutex = threading.Lock()  # guards `_registered` and `_version`; nothing else is locked meanwhile

    def offer(self) -> str:
        """Return the agent's name."""
        return str(self._agent.name)

    # ------------------------------------------------------------------ for peers

    def serve(self, agent: str, locations: bytes, keys: bytes, version: int) -> tuple[bytes, int, bytes]:
        """Return BLOCK_INFO of blocks, the version of this agent's metadata, and the metadata.

        agent: the offer that the peer has. version: the version of the metadata that the peer has; if it is current,
        the returned metadata is empty. Raises ValueError for the offer of another process.
        """
        if agent != self.offer():
            raise ValueError(f"NIXL agent {agent} was another process's: ask for the offer again")
        source, source_keys = np.frombuffer(locations, LOCATION), np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        headers = self._arena.read_headers(source, source_keys)
        info = np.zeros(len(source), BLOCK_INFO)
        info["there"], info["position"], info["sum"] = headers.there, headers.positions, headers.checksums
        info["address"] = self._arena.addresses(source)
        self._register(source[headers.there])
        with self._mutex:
            metadata = self._agent.get_agent_metadata() if version != self._version else b""
            return info.tobytes(), self._version, metadata

    def withdraw(self, slab: int) -> None:
        """Deregister a slab, as its memory is about to be freed."""
        with self._mutex:
            if slab in self._registered:
                self._agent.deregister_memory(self._registered.pop(slab))
                self._version += 1

    # ------------------------------------------------------------------ from peers

    def pull(self, peer: Peer, offer: str, request: PullRequest) -> NDArray[np.uint8]:
        source, keys, arena, target, end = request
        remote = self._remote[offer]
        if remote.busy:
            raise ConnectionError("NIXL: an earlier transfer has not ended")
        data, version, metadata = ask(peer, end, self.name, offer, source.tobytes(), keys.tobytes(), remote.version)
        info = records_of(data, BLOCK_INFO, len(source))
        there = np.flatnonzero(info["there"])
        found = PullRequest(source[there], keys[there], arena, target[there], end)
        remote.busy = True
        job = remote.thread.submit(self._read, remote, version, metadata, info[there], found)
        verdicts = np.full(len(source), ALTERED, np.uint8)
        try:
            verdicts[there] = job.result(seconds_left(end))
        except ConnectionError:
            self._forget(offer)
            raise
        return verdicts

    def _forget(self, offer: str) -> None:
        """Drop a peer's agent, as the peer may never come back. If it does, its metadata is loaded again."""
        remote = self._remote.pop(offer)
        remote.thread.shutdown(wait=False)
        with contextlib.suppress(ConnectionError), translated("NIXL"):
            self._agent.remove_remote_agent(remote.name)

    def _read(
        self,
        remote: RemoteAgent,
        version: int,
        metadata: bytes,
        info: NDArray[np.void],
        found: PullRequest,
    ) -> NDArray[np.uint8]:
        """Transfer blocks, and return their verdicts. info: their BLOCK_INFO.

        Runs in this process's thread for that peer. If a stalled peer continues, NIXL writes to the slots, even after
        the transfer was released. So the thread keeps the slots' locks until the transfer ends.
        """
        try:
            self._load_metadata(remote, version, metadata)
            self._register(found.target)
            altered = np.zeros(len(info), np.bool_)

            def fill(which: NDArray[np.bool_], slots: Addresses) -> list[int]:
                size = int(found.target["bytes"].max(initial=0))  # all blocks have one size; there may be none
                self._transfer(remote.name, info["address"][which], slots, size)
                checksums = block_copy.sums(slots, size)
                altered[which] = np.array(checksums, np.uint64) != info["sum"][which]
                return checksums

            written = found.arena.fill(found.target, found.keys, fill, info["position"], info["sum"])
            return np.where(written, PULLED, np.where(altered, ALTERED, FAILED)).astype(np.uint8)
        finally:
            remote.busy = False

    def _load_metadata(self, remote: RemoteAgent, version: int, metadata: bytes) -> None:
        if metadata:
            with translated("NIXL"):
                if remote.name:
                    self._agent.remove_remote_agent(remote.name)
                remote.name = self._agent.add_remote_agent(metadata)
            remote.version = version

    def _register(self, locations: Locations) -> None:
        """Register only the slabs of these locations, because RDMA page-locks registered memory."""
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
                if state != "DONE":  # a request failed, but others may still be running
                    time.sleep(LATE_S)
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionError(f"NIXL: the transfer ended as {state}")

    def _list(self, addresses: Addresses, size: int) -> Any:
        """Return NIXL's list of descriptors: (address, length, device)."""
        table = np.zeros((len(addresses), 3), np.uint64)
        table[:, 0], table[:, 1] = addresses, size
        return self._agent.get_xfer_descs(table, "DRAM")
