"""Facts that a node with raykv reports about itself."""

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
    """Facts about one node.

    machine: id of the machine, equal for nodes that share memory. room: free memory, in bytes. total, shm: bytes of all
    memory, and of /dev/shm. left: bytes that dead stores left in /dev/shm, by pool. alive: pools in `left` that also
    have a live store here. kernels: folder of compiled kernels. unwritable: folders that raykv prefers for
    kernels, but that are not writable by this user alone. huge_pages: Linux's setting for files in memory, or "".
    gpus: number of GPUs that raykv can use. driver: version of NVIDIA's driver, or "". no_nixl: why NIXL can't be used,
    or "". rdma: whether there is an RDMA card. niceness: niceness of Ray's workers. tls: whether Ray uses TLS.
    no_tls: why the pool can't use TLS although Ray does, or "".
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
    """Return the facts about this node. Called in one of its Ray workers."""
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
    """Return the text that the pattern's group matches in a kernel file; "" if the file or a match is missing."""
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8"))
    except OSError:
        return ""
    return match[1] if match else ""
