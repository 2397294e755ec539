"""The store of one node: owns its arena, serves its blocks to other nodes and pulls theirs."""

import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv import registry
from raykv.actors.demoter import Demoter, open_external, seed
from raykv.actors.gpu import GpuDemoter, open_gpus
from raykv.actors.node_memory import JOIN_DEADLINE_S, NodeMemory
from raykv.actors.resizer import Resizer, size_of
from raykv.arena.arena import Arena, open_own, remove_left_behind
from raykv.arena.gpu.gpu_arena import GpuArena, copy_between
from raykv.config import HEARTBEAT_S, capacity_bytes, fingerprint, slab_bytes
from raykv.errors import DeviceError
from raykv.protocol import FAILED, KEY_BYTES, LOCATION, PULLED, data_deadline
from raykv.system import free_memory
from raykv.transports.base import Peer
from raykv.transports.selector import open_transports

log = logging.getLogger("raykv")
# Calls at a time. A push waits for its peer's pull and that for our read: each kind has threads of its own, or stores
# that are busy with each other would wait for good. So have pulls from a tier, and reads of it: memory waits for none.
GROUPS = {"push": 8, "pull": 16, "read": 8, "promote": 8, "lift": 8, "resize": 4}


class NodeStore:
    """Owns a node's tiers: its memory, that of its GPUs, and what is below."""

    def __init__(
        self,
        pool: str,
        node_id: str,
        cpu_memory: float | int,
        gpu_memory: float | int,
        secret: bytes,
        transport: str,
        external: str | None,
    ) -> None:
        """Raises CapacityError where the node cannot afford `cpu_memory`, or one of its GPUs `gpu_memory`.

        Serves without `external` while that can't be used (see PoolConfig).
        """
        self._pool, self._node_id = pool, node_id
        total, mark = free_memory.total_bytes(), fingerprint(pool, secret)
        slab = slab_bytes(capacity_bytes(cpu_memory, total))
        limit = max(1, capacity_bytes(size_of(pool, node_id, cpu_memory), total) // slab)
        self._size = limit * slab
        tier = open_external(pool, mark, external, registry.get(pool, "tier")) if external else None
        if tier and not tier[0].open(seed(pool)):
            log.warning("pool %s: its external tier can't be used on node %s yet", pool, node_id[:8])
        # Laid out for all of the node's memory: what is not offered takes none.
        self._arena: Arena = open_own(pool, mark, slab, max(total // slab, limit), free_memory.check, limit=limit)
        self._demoter = Demoter(pool, node_id, self._arena, *tier) if tier else None
        lanes = open_transports(self._arena, transport, ray.util.get_node_ip_address())
        self._resizer = Resizer(pool, node_id, self._arena, limit, self._demoter, lanes.withdraw)
        self._memory = NodeMemory(node_id, self._arena, lanes, self._resizer.report, self._resizer.on_directory_reply)
        gpus = open_gpus(pool, node_id, mark, gpu_memory, transport)
        self._homes = [self._memory, *gpus]
        self._gpu_demoters = [GpuDemoter(pool, gpu, self._memory) for gpu in gpus]
        self._peers: dict[int, Peer] = {}
        self._pulled = 0
        self._pulling: dict[tuple[int, int, int], Future[int]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        for home in self._homes:  # none waits for another
            threading.Thread(target=self._heartbeat_forever, args=(home,), name="raykv-beat", daemon=True).start()

    def __repr__(self) -> str:
        return f"NodeStore(pool={self._pool}, node={self._node_id[:8]}, cpu={self._size / (1 << 30):.1f}GiB)"

    # ------------------------------------------------------------------ for clients of this node

    def describe_arena(self, gpu: str | None = None) -> dict[str, Any]:
        """Where the arena is, and what the directory calls it: that of a GPU of the node, if it has one.

        Waits until it has joined.
        """
        name = f"{self._node_id}/{gpu}"
        home = next((home for home in self._homes if home.name == name), self._memory)
        if not home.joined.wait(JOIN_DEADLINE_S):
            raise TimeoutError(f"{self!r} has not reached the directory in {JOIN_DEADLINE_S:.0f} s")
        arena = home.arena
        handle = arena.handle if isinstance(arena, GpuArena) else b""
        return {
            "name": home.name,
            "path": arena.path,
            "nonce": arena.nonce,
            "index": home.index,
            "handle": handle,
        }

    def _home(self, name: str) -> NodeMemory:
        for home in self._homes:
            if home.name == name:
                return home
        raise ValueError(f"{self!r} has no {name}, but {', '.join(home.name for home in self._homes)}")

    def _home_at(self, index: int) -> NodeMemory:
        """Where places of an index are; of one that an earlier directory gave, in the node's memory."""
        return next((home for home in self._homes if home.index == index), self._memory)

    @ray.method(concurrency_group="pull")
    def pull(self, source: bytes, keys: bytes, target: bytes) -> bytes:
        """Fetch blocks of other nodes into slots of this arena; uint8 verdicts, FAILED, PULLED or ALTERED.

        source, target: LOCATIONs. Two pulls into the same slot happen once.
        """
        at, to = np.frombuffer(source, LOCATION), np.frombuffer(target, LOCATION)
        names = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        slots = [(int(p["slab"]), int(p["slot"]), int(p["gen"])) for p in to]
        mine = []
        with self._lock:
            for i, slot in enumerate(slots):
                if slot not in self._pulling:
                    self._pulling[slot] = Future()
                    mine.append(i)
            waits = [self._pulling[slot] for slot in slots]
        verdicts = np.full(len(at), FAILED, np.uint8)
        try:
            if mine:
                verdicts[mine] = self._fetch(at[mine], names[mine], to[mine])
        finally:
            with self._lock:
                for i in mine:
                    del self._pulling[slots[i]]
                    waits[i].set_result(int(verdicts[i]))
        end = time.monotonic() + data_deadline(int(at["bytes"].sum()))
        for i in set(range(len(at))) - set(mine):
            try:
                verdicts[i] = waits[i].result(max(0.0, end - time.monotonic()))
            except TimeoutError:
                break
        return verdicts.tobytes()

    @ray.method(concurrency_group="push")
    def push(self, source: bytes, keys: bytes, target: bytes) -> bytes:
        """Have other nodes fetch blocks of this arena into slots that were granted there; verdicts as of `pull`."""
        to = np.frombuffer(target, LOCATION)
        at, names = np.frombuffer(source, LOCATION), np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        verdicts = np.full(len(to), FAILED, np.uint8)
        for index in np.unique(to["node"]).tolist():
            there = to["node"] == index
            args = at[there].tobytes(), names[there].tobytes(), to[there].tobytes()
            try:
                answer = self._peer(index).store.pull.remote(*args)
                deadline = data_deadline(int(to["bytes"][there].sum()))
                verdicts[there] = np.frombuffer(ray.get(answer, timeout=deadline), np.uint8)
            except (RayError, ValueError, KeyError) as error:
                log.debug("push to node %d: %r", index, error)
                self._peers.pop(index, None)
        return verdicts.tobytes()

    def _fetch(self, at: NDArray[np.void], keys: NDArray[np.uint8], to: NDArray[np.void]) -> NDArray[np.uint8]:
        home = self._home_at(int(to["node"][0]))
        _, _, there = home.arena.read_headers(to, keys)  # another reader's pull was faster
        verdicts = np.where(there, PULLED, FAILED).astype(np.uint8)
        for index in np.unique(at["node"][~there]).tolist():
            wanted = np.flatnonzero((at["node"] == index) & ~there)
            try:
                verdicts[wanted] = self._fetch_from(index, at[wanted], keys[wanted], home, to[wanted])
                with self._lock:
                    self._pulled += int((verdicts[wanted] == PULLED).sum())
            except (RayError, DeviceError, OSError, ValueError, KeyError) as error:
                log.debug("pull from node %d: %r", index, error)
                self._peers.pop(index, None)
        return verdicts

    def _fetch_from(
        self, index: int, at: NDArray[np.void], keys: NDArray[np.uint8], home: NodeMemory, to: NDArray[np.void]
    ) -> NDArray[np.uint8]:
        if self._demoter and index == self._demoter.index:
            return self._demoter.load(keys, home.arena, to)
        for own in self._homes:
            if own.index == index:
                return copy_between(own.arena, at, keys, home.arena, to)
        return home.lanes.pull(self._peer(index), at, keys, home.arena, to)

    def _peer(self, index: int) -> Peer:
        """The store of the node that places call `index`. KeyError or ValueError where there is none."""
        if index not in self._peers:
            nodes = ray.get(registry.find_directory(self._pool).nodes.remote(), timeout=1.0)
            store = registry.find(registry.node_store_name(self._pool, nodes[index]))
            self._peers[index] = Peer(nodes[index], store, external=bool(index & 1))
        return self._peers[index]

    # ------------------------------------------------------------------ for other nodes

    def offers(self, name: str) -> dict[str, Any]:
        """What a peer needs to read from a memory of this node, by transport."""
        return self._home(name).lanes.offers()

    @ray.method(concurrency_group="read")
    def serve(self, name: str, transport: str, *args: Any) -> Any:
        """What a peer's pull by a transport asks of a memory of this node; see Transport.serve."""
        return self._home(name).lanes.serve(transport, *args)

    @ray.method(concurrency_group="read")
    def read(self, locations: bytes, keys: bytes) -> tuple[bytes, bytes, bytes, list[NDArray[np.uint8]]]:
        """(uint8 mask, uint64 checksums, uint32 positions, bytes of the masked, not copied here: verify them).

        Of blocks in this node's memory, or in its external tier.
        """
        at, names = np.frombuffer(locations, LOCATION), np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        if self._demoter and len(at) and at["node"][0] == self._demoter.index:
            return self._demoter.read(names, int(at["bytes"][0]))
        arena = self._home_at(int(at["node"][0])).arena if len(at) else self._arena
        sums, positions, ok, runs = arena.read_for_peer(at, names)
        return ok.astype(np.uint8).tobytes(), sums.tobytes(), positions.tobytes(), runs

    # ------------------------------------------------------------------ for the pool

    def ping(self) -> int:
        return os.getpid()

    def stats(self) -> dict[str, Any]:
        """Since this process started: blocks pulled here from other nodes or from a tier, blocks found altered on
        arrival, how other nodes were read from, and what went wrong with the external tier.
        """
        tier = self._demoter.external.faults if self._demoter else {}
        return {
            "pulled": self._pulled,
            "corrupt": sum(home.arena.corrupt for home in self._homes),
            "transports": [
                {"reader": home.name, "from": name, **lane}
                for home in self._homes
                for name, lane in home.lanes.stats().items()
            ],
            **{f"tier_{what}": count for what, count in tier.items()},
        }

    def clear(self, generation: int, content: bytes) -> None:
        """Blocks up to a generation were cleared: a restarted directory must not find them again.

        content: what the external tier's content is called from now on.
        """
        for home in self._homes:
            home.arena.raise_floor(generation)
        if self._demoter:
            self._demoter.external.clear(content)

    @ray.method(concurrency_group="resize")
    def resize(self, cpu_memory: float | int, seconds: float) -> int:
        """See KVPool.resize."""
        return self._resizer.resize(cpu_memory, seconds)

    def flush_to_shared(self, seconds: float) -> bool:
        """As `flush`, to a tier that outlives this node. False if there is none."""
        return self._demoter is not None and self._demoter.external.shared is True and self._demoter.flush(seconds)

    def sizes(self, locations: bytes) -> bytes:
        """block_bytes (int64) of blocks, by their headers; of LOCATIONs whose `bytes` are their slots'."""
        return self._arena.with_lengths(np.frombuffer(locations, LOCATION))["bytes"].astype(np.int64).tobytes()

    def flush(self, seconds: float) -> bool:
        """Bring all blocks down to the external tier. Returns whether that was done in time, if there is one."""
        return self._demoter is None or self._demoter.flush(seconds)

    def stop(self) -> None:
        """Let go of the memory, and of what dead stores of this machine left. The actor is of no use afterwards."""
        self._stopped.set()
        self._resizer.stop()
        for gpu_demoter in self._gpu_demoters:
            gpu_demoter.stop()
        for home in self._homes:
            home.lanes.close()
        if self._demoter is not None:
            self._demoter.stop()
        for home in self._homes:
            home.arena.close(unlink=True)
        remove_left_behind(self._pool)

    def _heartbeat_forever(self, home: NodeMemory) -> None:
        directory = None
        while not self._stopped.is_set():
            begin = time.monotonic()
            try:
                directory = directory or registry.find_directory(self._pool)
                if home.heartbeat(directory):
                    self._peers.clear()
            except (RayError, ValueError) as error:  # dead, restarting or replaced
                log.debug("%r: no heartbeat of %s: %r", self, home.name, error)
                directory = None
            except Exception:  # what no longer beats would be lost for good
                log.exception("%r: no heartbeat of %s", self, home.name)
                directory = None
            settled = home.joined.is_set() and directory is not None and self._resizer.settled
            pause = HEARTBEAT_S if settled else HEARTBEAT_S / 4
            self._stopped.wait(max(0.0, pause - (time.monotonic() - begin)))
