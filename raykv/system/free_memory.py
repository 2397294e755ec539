"""The shared memory that is still available on this node.

It is the minimum of the free memory of /dev/shm, the machine and cgroups. Memory that Ray's object stores may still
take is subtracted.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raykv.errors import CapacityError
from raykv.system import raylets

PROC, CGROUP, SHM = "/proc", "/sys/fs/cgroup", "/dev/shm"
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number of about this size


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes under each limit. free: bytes that an arena may take."""

    shm_free: int  # free bytes of the /dev/shm file system
    memory_free: int  # free bytes of the machine, minus bytes that object stores in other mounts of /dev/shm may take
    cgroup_free: int | None  # free bytes under this process's tightest memory limit; None without a limit
    plasma_unfilled: int  # bytes of this /dev/shm that local raylets' object stores may still take

    @property
    def free(self) -> int:
        bounds = [self.shm_free, self.memory_free]
        if self.cgroup_free is not None:
            bounds.append(self.cgroup_free)
        return max(0, min(bounds) - self.plasma_unfilled)


def free_bytes(proc: str = PROC, cgroup: str = CGROUP) -> FreeMemory:
    """Return the memory that is free now. proc, cgroup: where the kernel's proc and cgroup file systems are mounted."""
    stats = os.statvfs(SHM)
    found = [(_unfilled(process), _sees(process)) for process in raylets.processes(proc)]
    elsewhere = sum(unfilled for unfilled, ours in found if not ours)
    return FreeMemory(
        shm_free=stats.f_bavail * stats.f_frsize,
        memory_free=max(0, _meminfo(Path(proc), "MemAvailable") - elsewhere),
        cgroup_free=min((left for _, left in _limits(Path(proc), Path(cgroup))), default=None),
        plasma_unfilled=sum(unfilled for unfilled, ours in found if ours),
    )


def check(asked: int) -> None:
    """Raise CapacityError if fewer than `asked` bytes are free."""
    found = free_bytes()
    if asked > found.free:
        raise CapacityError(refusal(asked, found))


def refusal(asked: int, found: FreeMemory, nodes: int = 1) -> str:
    """Return the message of a CapacityError. asked: bytes that the machine's `nodes` Ray nodes need."""
    limit = "none" if found.cgroup_free is None else f"{gib(found.cgroup_free)} left"
    whom = f" for {nodes} Ray nodes of one machine" if nodes > 1 else ""
    return (
        f"asked for {gib(asked)} of shared memory ({asked} bytes){whom}, {gib(found.free)} are free: "
        f"/dev/shm {gib(found.shm_free)} free, memory {gib(found.memory_free)} available, cgroup limit {limit}, "
        f"minus {gib(found.plasma_unfilled)} that local raylets' object stores may still fill. Lower cpu_memory, "
        f"start Ray with a smaller object_store_memory, or enlarge /dev/shm (in Kubernetes: emptyDir sizeLimit and "
        f"memory limit)"
    )


def gib(amount: int) -> str:
    """Format a size, as "1.50 GiB"."""
    return f"{amount / (1 << 30):.2f} GiB"


def total_bytes() -> int:
    """The node's memory: the machine's, or the tightest memory limit on this process."""
    limits = [limit for limit, _ in _limits(Path(PROC), Path(CGROUP))]
    return min([_meminfo(Path(PROC), "MemTotal"), *limits])


def _meminfo(proc: Path, name: str) -> int:
    for line in (proc / "meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise CapacityError(f"{proc}/meminfo does not say {name}: raykv needs Linux 3.14 or newer")


def _limits(proc: Path, root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, free bytes) of this process's cgroup and its ancestors. Inactive page cache counts as free."""
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, tree = ("memory.max", "memory.current", "inactive_file"), root
        elif "memory" in controllers.split(","):
            names, tree = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), root / "memory"
        else:
            continue
        for folder in _upwards(tree, path):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield limit, max(0, limit - used + _stat(folder / "memory.stat", names[2]))


def _upwards(tree: Path, path: str) -> Iterator[Path]:
    """Yield the cgroup's folder and its ancestors. A container may see only its own folder, as the root."""
    folder = tree / path.lstrip("/")
    while folder != tree and tree in folder.parents:
        yield folder
        folder = folder.parent
    yield tree


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file is absent, or says "max"
        return None


def _stat(path: Path, name: str) -> int:
    try:
        fields = dict(line.split(None, 1) for line in path.read_text(encoding="utf-8").splitlines())
    except OSError:
        return 0
    return int(fields.get(name, 0))


def _unfilled(process: Path) -> int:
    """Return the bytes of SHM that a raylet's object store may still take."""
    options = raylets.options(process)
    if not options.get("plasma_directory", SHM).startswith(SHM):
        return 0  # the object store is on a disk
    return max(0, int(options.get("object_store_memory", 0)) - _filled(process))


def _sees(process: Path) -> bool:
    """Whether a process has the same SHM as this process, since each container has its own. True if unknown."""
    try:
        return os.stat(f"{process}/root{SHM}").st_dev == os.stat(SHM).st_dev
    except OSError:
        return True


def _filled(process: Path) -> int:
    """Return the bytes of an object store's open, already unlinked files. Returns 0 for another user's store."""
    blocks: dict[tuple[int, int], int] = {}
    try:
        for name in os.listdir(process / "fd"):
            link = process / "fd" / name
            if os.readlink(link).startswith(f"{SHM}/plasma"):
                info = os.stat(link)
                blocks[info.st_dev, info.st_ino] = info.st_blocks * 512
    except OSError:
        pass
    return sum(blocks.values())
