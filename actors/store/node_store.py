"""The store of one node. It owns the node's arenas and external tier, and moves blocks between this node and others.

A store is an actor with several groups of threads. The node's clients map the arena and copy blocks themselves. They
call the store only for blocks that are not in the arena.
"""

import logging
import os
import pickle
from functools import partial
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv import cluster
from raykv.actors.store.demoter import Demoter, content_seed, open_external
from raykv.actors.store.gpu_demoter import GpuDemoter
from raykv.actors.store.gpu_memory import open_gpus
from raykv.actors.store.metrics import StoreMetrics
from raykv.actors.store.node_memory import JOIN_DEADLINE_S, NodeMemory
from raykv.actors.store.peers import Peers
from raykv.actors.store.readiness import Question, answer
from raykv.actors.store.resizer import Resizer, SavedSize
from raykv.actors.store.single_flight import SingleFlight
from raykv.arena.arena import Arena, open_own
from raykv.arena.files import remove_left_behind
from raykv.arena.gpu import device
from raykv.arena.gpu_arena import GpuArena, copy_between
from raykv.cluster import internal_kv, named_actors
from raykv.cluster.internal_kv import Kept
from raykv.config import HEARTBEAT_S, capacity_bytes, fingerprint, slab_bytes
from raykv.errors import DeviceError
from raykv.line.directory_line import DirectoryLine
from raykv.line.directory_loop import DirectoryLoop
from raykv.line.periodic import Periodic
from raykv.protocol.location import CONTENT_BYTES, LOCATION, SLABS_MAX, Locations, is_tier
from raykv.protocol.transfers import FAILED, PULLED, BlocksRead, StoreDescription, Transfer, data_deadline, verdicts_of
from raykv.system import events, free_memory, sha256
from raykv.system.counts import Counts
from raykv.system.jit import compile_all
from raykv.tiers import parse
from raykv.transports.base import Peer
from raykv.transports.selector import open_transports

log = logging.getLogger("raykv")
GPUS_S = 5.0  # pause before the next attempt to open a GPU tier
# Threads of each concurrency group. A push waits for the peer's pull, and that pull waits for a read here. If pushes,
# pulls and reads shared threads, two busy stores could wait for each other forever. Pulls from a tier ("promote") and
# reads of a tier ("tier_read") are slow. They have their own threads, so that no pull or read of memory waits for them.
GROUPS = {"push": 8, "pull": 16, "read": 8, "promote": 8, "tier_read": 8, "resize": 4}


class NodeStore:
    """Owns a node's tiers: the node's memory, the memory of its GPUs, and the external tier."""

    def __init__(self, pool: str, node_id: str, question: Question | None = None) -> None:
        """Open the tiers. Raises CapacityError if the node has too little memory, or a GPU has less than `gpu_memory`.

        While the external tier is unusable, the store works without it. While a GPU fails, the store works without
        GPUs. A restarted store also works without GPUs while a GPU has too little memory. question: the question that
        `raykv.start` asks each node before the pool has settings. The store puts its answer into Ray's internal KV, and
        waits for the settings.
        """
        self._pool, self._node_id = pool, node_id
        again = named_actors.restarted()
        events.begin(again, role="store", pool=pool, node=node_id[:8], pid=os.getpid())
        if question is not None and internal_kv.settings(pool) is None:
            internal_kv.put(pool, Kept.ANSWER, pickle.dumps(answer(question)), node_id)
        compile_all("raykv.arena")  # while `raykv.start` still prepares the settings
        sha256.load()  # compiles the kernel, so that clients of this node need not compile it
        settings = internal_kv.await_settings(pool)
        pool_fingerprint = fingerprint(pool, bytes.fromhex(settings["secret"]))
        saved_size, total = SavedSize(pool, node_id), free_memory.total_bytes()
        slab = slab_bytes(capacity_bytes(settings["cpu_memory"], total))
        limit = max(1, capacity_bytes(saved_size.load(settings["cpu_memory"]), total) // slab)
        events.tell("settings", bytes=limit * slab, **internal_kv.shown(settings))
        tier = None
        if settings["external"]:
            tier = open_external(pool, pool_fingerprint, settings["external"], internal_kv.get(pool, Kept.TIER))
            up = tier[0].open(content_seed(pool))
            events.tell("external", url=parse(settings["external"]).text, capacity=tier[1], up=up)
        # The arena is laid out for all of the node's memory: slabs that are not offered take no memory.
        slabs = min(max(total // slab, limit), SLABS_MAX)
        self._cluster = cluster.identity()
        self._arena: Arena = open_own(pool, pool_fingerprint, slab, slabs, free_memory.check, limit, self._cluster)
        self._demoter = Demoter(pool, node_id, self._arena, *tier) if tier else None
        transports = open_transports(self._arena, settings["transport"], ray.util.get_node_ip_address())
        self._resizer = Resizer(saved_size, self._arena, limit, self._demoter, transports.withdraw)
        report, on_reply = self._resizer.report, self._resizer.on_directory_reply
        self._memory = NodeMemory(node_id, self._arena, transports, report, on_reply)
        self._memories, self._gpu_demoters = [self._memory], list[GpuDemoter]()
        self._heartbeats = [self._heartbeat_of(self._memory)]  # one thread per memory, so no memory waits for another
        memory, transport = settings["gpu_memory"], settings["transport"]
        self._gpu_tier = partial(open_gpus, pool, node_id, pool_fingerprint, memory, transport, self._cluster)
        self._gpus = Periodic("raykv-gpus", self._open_gpus_again, self._without_gpus)
        self._lacks_gpus = False
        self._peers = Peers(self._look_up)
        self._pulls = SingleFlight()
        self._counts = Counts()
        try:
            self._open_gpus(again)
        except Exception as error:
            if not again and not isinstance(error, DeviceError):
                raise
            log.warning("%r: no GPU tier until it can be opened, memory serves meanwhile: %s", self, error)
            events.tell("no_gpus", why=str(error))
            self._lacks_gpus = True
            self._gpus.start()
        self._heartbeats[0].start()
        self._metrics = StoreMetrics(pool, self._memories, self._demoter)

    def _open_gpus(self, again: bool) -> None:
        """Open the GPU tier, and let its memories join. Raises CapacityError or DeviceError if this is not possible.

        again: see `open_gpus`.
        """
        gpus = self._gpu_tier(again)
        self._memories += gpus
        self._gpu_demoters += [GpuDemoter(self._pool, gpu, self._memory) for gpu in gpus]
        heartbeats = [self._heartbeat_of(gpu) for gpu in gpus]
        self._heartbeats += heartbeats
        for loop in heartbeats:
            loop.start()
        self._lacks_gpus = False

    def _open_gpus_again(self) -> None:
        """Try again to open the GPU tier. First tell the directory that the blocks on this node's GPUs are lost."""
        directory = named_actors.find_directory(self._pool)
        names = [f"{self._node_id}/{gpu}" for gpu in device.visible()]
        ray.get([directory.remove_node.remote(name) for name in names], timeout=HEARTBEAT_S)
        self._open_gpus(again=True)

    def _without_gpus(self, error: Exception) -> float:
        """Return the pause before the next attempt. A dead store's GPU memory stays allocated while engines map it."""
        log.debug("%r: no GPU tier yet: %s", self, error)
        return GPUS_S

    def __repr__(self) -> str:
        return f"NodeStore(pool={self._pool}, node={self._node_id[:8]})"

    # ------------------------------------------------------------------ for clients of this node

    def describe_arena(self, gpu: str | None = None) -> tuple[Any, ...]:
        """Return the StoreDescription of the arena on the GPU with UUID `gpu`, or else of the arena in host memory.

        Waits until the arena has joined the directory. Raises TimeoutError after JOIN_DEADLINE_S.
        """
        name = f"{self._node_id}/{gpu}"
        memory = next((memory for memory in self._memories if memory.name == name), self._memory)
        if not memory.joined.wait(JOIN_DEADLINE_S):
            raise TimeoutError(f"{self!r} has not reached the directory in {JOIN_DEADLINE_S:.0f} s")
        arena = memory.arena
        handle = arena.handle if isinstance(arena, GpuArena) else b""
        return tuple(StoreDescription(memory.name, arena.door, arena.nonce, memory.index, handle))

    @ray.method(concurrency_group="pull")
    def pull(self, transfer: tuple[bytes, bytes, bytes]) -> bytes:
        """Fetch the blocks of a Transfer into slots of this node. Returns a uint8 verdict for each block.

        If several pulls want the same slot at the same time, only one of them copies. Raises ValueError as
        Transfer.arrays does.
        """
        source, keys, target = Transfer(*transfer).arrays()
        slots = [(int(slot["slab"]), int(slot["slot"]), int(slot["gen"])) for slot in target]

        def fetch(mine: list[int]) -> NDArray[np.uint8]:
            return self._fetch(source[mine], keys[mine], target[mine])

        return self._pulls.do(slots, fetch, data_deadline(int(source["bytes"].sum()))).tobytes()

    @ray.method(concurrency_group="push")
    def push(self, transfer: tuple[bytes, bytes, bytes]) -> bytes:
        """Ask other nodes to pull the blocks of a Transfer from slots of this node. Returns verdicts as `pull` does."""
        source, keys, target = Transfer(*transfer).arrays()
        verdicts = np.full(len(target), FAILED, np.uint8)
        for index in np.unique(target["node"]).tolist():
            there = target["node"] == index
            part = Transfer(source[there].tobytes(), keys[there].tobytes(), target[there].tobytes())
            try:
                answer = self._peers.get(index).store.pull.remote(tuple(part))
                deadline = data_deadline(int(target["bytes"][there].sum()))
                verdicts[there] = verdicts_of(ray.get(answer, timeout=deadline), int(there.sum()))
            except (RayError, ValueError, KeyError) as error:
                log.debug("push to node %d: %r", index, error)
                self._peers.forget(index)
        return verdicts.tobytes()

    def _fetch(self, source: Locations, keys: NDArray[np.uint8], target: Locations) -> NDArray[np.uint8]:
        """Copy blocks from any memory or tier into slots of one memory of this node. Returns (n,) verdicts."""
        memory = self._memory_at(int(target["node"][0]))
        if memory is None:
            return np.full(len(target), FAILED, np.uint8)
        _, _, there = memory.arena.read_headers(target, keys)  # there: blocks that another pull has brought
        verdicts = np.where(there, PULLED, FAILED).astype(np.uint8)
        for index in np.unique(source["node"][~there]).tolist():
            part = np.flatnonzero((source["node"] == index) & ~there)
            try:
                verdicts[part] = self._fetch_from(index, source[part], keys[part], memory, target[part])
                self._counts.add("pulled", int((verdicts[part] == PULLED).sum()))
            except (RayError, DeviceError, OSError, ValueError, KeyError) as error:
                log.debug("pull from node %d: %r", index, error)
                self._peers.forget(index)
        return verdicts

    def _fetch_from(
        self,
        index: int,
        source: Locations,
        keys: NDArray[np.uint8],
        memory: NodeMemory,
        target: Locations,
    ) -> NDArray[np.uint8]:
        """Like `_fetch`, but all blocks are in one memory or tier, which has this index in locations."""
        if self._demoter and index == self._demoter.index:
            return self._demoter.copier.load(keys, memory.arena, target)
        for own in self._memories:
            if own.index == index:
                return copy_between(own.arena, source, keys, memory.arena, target)
        return memory.transports.pull(self._peers.get(index), source, keys, memory.arena, target)

    def _look_up(self, index: int) -> Peer:
        """Return the store of the node with this index in locations. Raises KeyError or ValueError if there is none."""
        nodes = ray.get(named_actors.find_directory(self._pool).nodes.remote(), timeout=1.0)
        store = named_actors.find_store(self._pool, nodes[index])
        return Peer(nodes[index], store, external=is_tier(index))

    def _memory_at(self, index: int) -> NodeMemory | None:
        """Return the memory with this index in locations.

        An unknown index comes from an earlier directory, and means host memory. But while the GPUs are not open, None
        is returned for an unknown index, as it may be a GPU's index.
        """
        other = None if self._lacks_gpus else self._memory
        return next((memory for memory in self._memories if memory.index == index), other)

    def _memory_named(self, name: str) -> NodeMemory:
        for memory in self._memories:
            if memory.name == name:
                return memory
        raise ValueError(f"{self!r} has no {name}, but {', '.join(memory.name for memory in self._memories)}")

    # ------------------------------------------------------------------ for other nodes

    def offers(self, name: str) -> dict[str, Any]:
        """Return the offers of the transports of the memory with this name. See Transport.offer."""
        return self._memory_named(name).transports.offers()

    @ray.method(concurrency_group="read")
    def serve(self, name: str, transport: str, *args: Any) -> Any:
        """Answer a question of a peer's transport about the memory with this name; see Transport.serve."""
        return self._memory_named(name).transports.serve(transport, *args)

    @ray.method(concurrency_group="read")
    def read(self, locations: bytes, keys: bytes) -> tuple[Any, ...]:
        """Read blocks of one memory of this node, or of its external tier.

        Returns a BlocksRead, which the reader must verify. Raises ValueError as Transfer.arrays does.
        """
        source, rows, _ = Transfer(locations, keys, locations).arrays()
        if self._demoter and len(source) and source["node"][0] == self._demoter.index:
            return tuple(self._demoter.copier.read(rows, int(source["bytes"][0])))
        memory = self._memory_at(int(source["node"][0])) if len(source) else None
        arena = memory.arena if memory else self._arena
        checksums, positions, mask, runs = arena.read_for_peer(source, rows)
        return tuple(BlocksRead(mask.astype(np.uint8).tobytes(), checksums.tobytes(), positions.tobytes(), runs))

    # ------------------------------------------------------------------ for the pool

    def ping(self) -> int:
        """Return this process's id. Any answer proves that the store works."""
        return os.getpid()

    def stats(self) -> dict[str, Any]:
        """Return counters since this process started.

        pulled: blocks copied here from other memories or a tier. corrupt: blocks that had been altered when they
        arrived. transports: routes from other nodes. tier_*: faults of the external tier. refusal: why the tier can't
        be written now.
        """
        faults = self._demoter.external.faults if self._demoter else {}
        return {
            "pulled": self._counts["pulled"],
            "corrupt": sum(memory.arena.corrupt for memory in self._memories),
            "transports": [
                {"reader": memory.name, "from": name, **route}
                for memory in self._memories
                for name, route in memory.transports.stats().items()
            ],
            **{f"tier_{fault}": count for fault, count in faults.items()},
            "refusal": self._demoter.external.refusal if self._demoter else "",
        }

    def clear(self, generation: int, content: bytes) -> None:
        """Forget all blocks up to a generation, so that a restarted directory does not find them again.

        content: a new name for the external tier's content (CONTENT_BYTES). Raises ValueError for another length or an
        impossible generation; then nothing is forgotten.
        """
        if len(content) != CONTENT_BYTES:
            raise ValueError(f"a content is named by {CONTENT_BYTES} bytes, not {len(content)}")
        for memory in self._memories:
            memory.arena.raise_floor(generation)
        if self._demoter:
            self._demoter.external.clear(content)

    @ray.method(concurrency_group="resize")
    def resize(self, cpu_memory: float | int, seconds: float) -> int:
        """Change how much memory is offered; see Resizer.resize."""
        return self._resizer.resize(cpu_memory, seconds)

    def sizes(self, locations: bytes) -> bytes:
        """Return blocks' lengths (int64) from their headers. locations: LOCATIONs with the slots' sizes as `bytes`."""
        return self._arena.with_lengths(np.frombuffer(locations, LOCATION))["bytes"].astype(np.int64).tobytes()

    def flush(self, seconds: float) -> bool:
        """Demote all blocks to the external tier. Returns whether all were demoted in time; True without a tier."""
        return self._demoter is None or self._demoter.flush(seconds)

    def flush_to_shared(self, seconds: float) -> bool:
        """Like `flush`, but only to a tier that outlives this node. Returns False if there is no such tier."""
        return self._demoter is not None and self._demoter.external.shared is True and self._demoter.flush(seconds)

    def stop(self) -> None:
        """Release this store's memory, and the memory that dead stores of the pool left on this machine.

        The actor can't be used afterwards.
        """
        events.tell("stop")
        self._gpus.stop()
        if self._lacks_gpus:
            self._gpus.join(GPUS_S)  # if that thread is opening the GPU tier, the tier is closed below
        for loop in self._heartbeats:
            loop.stop()
        self._metrics.stop()
        self._resizer.stop()
        for gpu_demoter in self._gpu_demoters:
            gpu_demoter.stop()
        for memory in self._memories:
            memory.transports.close()
            if isinstance(memory.arena, GpuArena):
                memory.arena.disown()  # all GPUs first, as `close` waits until others unmap the memory
        if self._demoter is not None:
            self._demoter.stop()
        for memory in self._memories:
            memory.arena.close(unlink=True)
        remove_left_behind(self._pool, self._cluster)

    # ------------------------------------------------------------------ heartbeats

    def _heartbeat_of(self, memory: NodeMemory) -> DirectoryLoop:
        """Return the loop that keeps the directory informed about a memory."""

        def step(directory: DirectoryLine) -> float:
            if memory.heartbeat(directory):
                self._peers.forget_all()
            at_rest = memory.joined.is_set() and self._resizer.at_limit
            return loop.rest_of(HEARTBEAT_S if at_rest else HEARTBEAT_S / 4)

        loop = DirectoryLoop(self._pool, "raykv-heartbeat", step, lambda _: loop.rest_of(HEARTBEAT_S / 4))
        return loop


def start_store(pool: str, node_id: str, question: Question | None = None) -> Any:
    """Start the store of a node, or find the running one. Returns at once. question: see NodeStore."""
    options = named_actors.options(named_actors.node_store_name(pool, node_id), node_id, threads=4)
    return (
        ray.remote(concurrency_groups=GROUPS)(NodeStore)  # type: ignore[call-overload]
        .options(**options)
        .remote(pool, node_id, question)
    )
