"""A GPU's memory as a tier of its node: what is old there goes down to the node's memory."""

import logging
import os
import threading
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raykv import registry
from raykv.actors.node_memory import NodeMemory
from raykv.arena.gpu import device
from raykv.arena.gpu.gpu_arena import GpuArena, copy_between
from raykv.config import METADATA_DEADLINE_S, slab_bytes
from raykv.errors import CapacityError, DeviceError
from raykv.protocol import KEY_BYTES, LOCATION, PULLED
from raykv.transports.selector import open_transports

log = logging.getLogger("raykv")
LOOK_S = 0.25  # for what is to go down next
NOTHING = b"", b""
DRIVER = "/proc/driver/nvidia/version"


def open_gpus(pool: str, node_id: str, fingerprint: bytes, gpu_memory: float | int, transport: str) -> list[NodeMemory]:
    """The memory of each GPU that this process can use. CapacityError where one has less."""
    if not gpu_memory:
        return []
    found = device.visible()
    if not found and os.path.exists(DRIVER):
        raise CapacityError(
            f"gpu_memory={gpu_memory}, but this node's GPUs can't be used: pip install 'raykv[gpu]' there, or see "
            f"CUDA_VISIBLE_DEVICES of its raylet"
        )
    return [_open(pool, node_id, fingerprint, device.device(uuid), gpu_memory, transport) for uuid in found]


def _open(
    pool: str, node_id: str, fingerprint: bytes, gpu: device.Device, gpu_memory: float | int, transport: str
) -> NodeMemory:
    size = gpu.capacity(gpu_memory)
    slab = slab_bytes(size)
    if size < slab:
        raise CapacityError(f"{gpu.uuid}: gpu_memory={gpu_memory} are {size} bytes: the smallest tier has {slab}")
    arena = GpuArena.open_new(pool, fingerprint, gpu, slab, size // slab)
    report = arena.slabs, arena.slabs, b""
    lanes = open_transports(arena, transport, ray.util.get_node_ip_address())
    return NodeMemory(f"{node_id}/{gpu.uuid}", arena, lanes, lambda: report, lambda *_: None)


class GpuDemoter:
    """Copies a GPU's oldest blocks to its node's memory: a thread."""

    def __init__(self, pool: str, gpu: NodeMemory, memory: NodeMemory) -> None:
        self._pool, self._gpu, self._memory = pool, gpu, memory
        self._done = NOTHING  # LOCATIONs of the last answer, and which of them are written
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="raykv-cool", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        directory = None
        while not self._stopped.is_set():
            some = False
            try:
                directory = directory or registry.find_directory(self._pool)
                some = self._demote(directory)
            except (RayError, ValueError) as error:  # dead, restarting or replaced
                log.debug("cooling: %r", error)
                directory = None
            except Exception:  # what no longer goes down would be lost when its room is needed
                log.exception("gpu_demoter")
            if not some:
                self._stopped.wait(LOOK_S)

    def _demote(self, directory: Any) -> bool:
        """One batch. Returns whether some of it went down."""
        asked = directory.demote_gpu.remote(self._gpu.name, *self._done)
        source, keys, target = ray.get(asked, timeout=4 * METADATA_DEADLINE_S)
        at, to = np.frombuffer(source, LOCATION), np.frombuffer(target, LOCATION).copy()
        stored = self._copy(at, np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES), to)
        self._done = target, stored.astype(np.uint8).tobytes()
        return bool(stored.any())

    def _copy(self, at: NDArray[np.void], keys: NDArray[np.uint8], to: NDArray[np.void]) -> NDArray[np.bool_]:
        at = self._gpu.arena.with_lengths(at)
        to["bytes"] = at["bytes"]
        stored = np.zeros(len(at), np.bool_)
        for size in np.unique(at["bytes"]):
            some = at["bytes"] == size
            try:
                verdicts = copy_between(self._gpu.arena, at[some], keys[some], self._memory.arena, to[some], used=False)
                stored[some] = verdicts == PULLED
            except DeviceError as error:
                log.warning("%s: %s", self._gpu.name, error)
        return stored
