"""What a node that has raykv says of itself."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import ray

from raykv import cluster
from raykv.actors.store.gpu_memory import DRIVER
from raykv.actors.store.readiness import left_behind_by_pool, machine
from raykv.arena.files import SHM, arenas_of, left_behind
from raykv.arena.gpu import device
from raykv.line import tls
from raykv.system import free_memory, jit
from raykv.system.free_memory import FreeMemory
from raykv.transports import nixl

HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Facts(NamedTuple):
    """machine: equal for nodes that share their memory. room, total, shm: what is free of it, all of it, and the size
    of /dev/shm, in bytes. left: bytes in /dev/shm by pool, of stores that do not live any more; alive: those of these
    pools that have other stores here that do.
    kernels: the folder of machine code. unwritable: better ones, that can't be written by this user alone.
    huge_pages: the kernel's word for files in memory, "" if it has none. gpus: how many raykv can use. driver: the
    version of NVIDIA's, "" without. no_nixl: why NIXL can't be used, "" if it can. rdma: whether there is a card.
    niceness: of Ray's workers. no_tls: where Ray uses it, why the pool can't; "" if it can. tls: whether Ray does.
    """

    machine: str
    room: FreeMemory
    total: int
    shm: int
    left: dict[str, int]
    alive: set[str]
    kernels: str
    unwritable: list[str]
    huge_pages: str
    gpus: int
    driver: str
    no_nixl: str
    rdma: bool
    niceness: int
    tls: bool
    no_tls: str


def look() -> Facts:
    """Of this node, from one of its Ray workers."""
    stats, ours = os.statvfs(SHM), cluster.identity()
    kernels, unwritable = jit.cache_folder()
    left = {pool: size for pool, size in left_behind_by_pool().items() if size}
    return Facts(
        machine(),
        free_memory.free_bytes(),
        free_memory.total_bytes(),
        stats.f_blocks * stats.f_frsize,
        left,
        {pool for pool in left if len(left_behind(pool, ours)) < len(arenas_of(pool, ours))},
        kernels,
        unwritable,
        _found(HUGE_PAGES, r"\[(\w+)\]"),
        len(device.visible()),
        _found(DRIVER, r"Kernel Module.*?\s(\d[\d.]+)"),
        nixl.why_not(),
        nixl.has_rdma(),
        os.getpriority(os.PRIO_PROCESS, 0),
        tls.used(),
        _no_tls(),
    )


def _no_tls() -> str:
    try:
        if tls.used():
            tls.check(ray.util.get_node_ip_address())
    except OSError as error:
        return str(error)
    return ""


def _found(path: str, pattern: str) -> str:
    """What a file of the kernel's says; "" where there is no such file, or it says something else."""
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8"))
    except OSError:
        return ""
    return match[1] if match else ""
