"""Opens the GPU tier of a node: an arena on each of its GPUs."""

import os
from typing import Any

import ray

from raykv.actors.store.node_memory import NodeMemory
from raykv.arena.gpu import device
from raykv.arena.gpu_arena import GpuArena
from raykv.config import slab_bytes
from raykv.errors import CapacityError
from raykv.protocol.stores import SlabReport
from raykv.system.extras import to_install
from raykv.transports.nccl_pair import memory_of
from raykv.transports.selector import open_transports, uses_nccl

DRIVER = "/proc/driver/nvidia/version"


def open_gpus(
    pool: str,
    node_id: str,
    fingerprint: bytes,
    gpu_memory: float | int,
    transport: str,
    cluster: bytes,
    again: bool = False,
) -> list[NodeMemory]:
    """Open the memory of each GPU that this process can use.

    gpu_memory, transport: see PoolConfig. cluster: see `raylets.cluster_id`. again: whether the store was restarted, or
    an earlier attempt failed. If so, no memory is reserved for NCCL, as engines may already use that memory. Raises
    CapacityError if a GPU has too little memory or the node's GPUs can't be used, and DeviceError if a GPU fails.
    """
    if not gpu_memory:
        return []
    found = device.visible()
    if not found and os.path.exists(DRIVER):
        raise CapacityError(
            f"gpu_memory={gpu_memory}, but this node's GPUs can't be used: {to_install('gpu')} there, or see "
            f"CUDA_VISIBLE_DEVICES of its raylet"
        )
    counts = found and uses_nccl(transport) and not again
    beside = memory_of(2 * _others(node_id)) if counts else 0
    memories: list[NodeMemory] = []
    try:
        gpus = [device.device(uuid) for uuid in found]  # find all GPUs before the first arena takes memory
        for gpu in gpus:
            arena = _open_arena(pool, fingerprint, gpu, gpu_memory, beside, cluster)
            transports = open_transports(arena, transport, ray.util.get_node_ip_address())
            memories.append(_fixed_size_memory(f"{node_id}/{gpu.uuid}", arena, transports))
    except BaseException:
        for memory in memories:  # close all arenas, as the next attempt opens all again
            memory.transports.close()
            memory.arena.close(unlink=True)
        raise
    return memories


def _others(node_id: str) -> int:
    """Return the number of GPUs of other nodes. NCCL makes two pairs with each of these GPUs, one per direction."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != node_id]
    return int(sum(node["Resources"].get("GPU", 0) for node in nodes))


def _open_arena(
    pool: str, fingerprint: bytes, gpu: device.Device, gpu_memory: float | int, beside: int, cluster: bytes
) -> GpuArena:
    size = gpu.capacity(gpu_memory, beside)
    slab = slab_bytes(size)
    if size < slab:
        raise CapacityError(f"{gpu.uuid}: gpu_memory={gpu_memory} are {size} bytes: the smallest tier has {slab}")
    return GpuArena.open_new(pool, fingerprint, gpu, slab, size // slab, cluster)


def _fixed_size_memory(name: str, arena: GpuArena, transports: Any) -> NodeMemory:
    """Return a GPU's NodeMemory, which is offered as a whole and never resized."""
    report = SlabReport(offered=arena.slabs, limit=arena.slabs, given_back=b"")
    return NodeMemory(name, arena, transports, lambda: report, lambda *_: None)
