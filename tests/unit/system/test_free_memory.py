"""How much memory a node can afford, by made-up kernel files of other machines, and by a real raylet."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.cluster.outside import outside

from raykv.errors import CapacityError
from raykv.system import free_memory, raylets

MIB = 1 << 20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  4096 kB\nMemFree:  1 kB\nMemAvailable:    1048576 kB\n")
    (proc / "self/cgroup").write_text("0::/\n")
    return proc


def cgroup(folder: Path, limit: str, used: int, cache: int, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'total_' if v1 else ''}inactive_file {cache}\n")


def free(proc: Path, tmp_path: Path) -> int | None:
    return free_memory.free_bytes(str(proc), str(tmp_path / "cgroup")).cgroup_free


def test_no_limit(proc: Path, tmp_path: Path) -> None:
    assert free(proc, tmp_path) is None
    cgroup(tmp_path / "cgroup", "max", 7 * MIB, 0)
    assert free(proc, tmp_path) is None
    (proc / "self/cgroup").write_text("4:memory:/job\n0::/\n")
    cgroup(tmp_path / "cgroup/memory/job", "9223372036854771712", 7 * MIB, 0, v1=True)
    assert free(proc, tmp_path) is None


def test_cgroup_v2_takes_the_tightest_limit_upwards(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/pods/one\n")
    cgroup(tmp_path / "cgroup/pods/one", str(100 * MIB), 10 * MIB, 4 * MIB)
    assert free(proc, tmp_path) == 94 * MIB
    cgroup(tmp_path / "cgroup/pods", str(50 * MIB), 20 * MIB, 0)
    assert free(proc, tmp_path) == 30 * MIB
    cgroup(tmp_path / "cgroup/pods", str(50 * MIB), 60 * MIB, 0)
    assert free(proc, tmp_path) == 0


def test_cgroup_v1_in_a_container_that_sees_only_its_own(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("11:cpu:/kubepods/x\n4:memory:/kubepods/x\n")
    cgroup(tmp_path / "cgroup/memory", str(64 * MIB), 16 * MIB, 8 * MIB, v1=True)
    assert free(proc, tmp_path) == 56 * MIB


def test_free_is_the_least_of_all_minus_what_ray_may_fill() -> None:
    assert free_memory.FreeMemory(shm_free=90, memory_free=80, cgroup_free=None, plasma_unfilled=30).free == 50
    assert free_memory.FreeMemory(shm_free=90, memory_free=80, cgroup_free=70, plasma_unfilled=30).free == 40
    assert free_memory.FreeMemory(shm_free=20, memory_free=80, cgroup_free=70, plasma_unfilled=30).free == 0


def test_raylet_with_its_store_on_disk(proc: Path) -> None:
    for pid, folder in ((7, "/tmp"), (8, "/dev/shm")):
        (proc / f"{pid}/fd").mkdir(parents=True)
        (proc / f"{pid}/comm").write_text("raylet\n")
        (proc / f"{pid}/cmdline").write_bytes(
            b"raylet\0--object_store_memory=1048576\0--plasma_directory=" + folder.encode() + b"\0"
        )
    (proc / "9").mkdir()
    (proc / "9/comm").write_text("bash\n")
    assert free_memory.free_bytes(str(proc)).plasma_unfilled == MIB


def test_raylet_of_a_container_with_a_dev_shm_of_its_own(proc: Path) -> None:
    """Its object store takes memory of the machine, but none of this /dev/shm."""
    for pid in (7, 8):
        (proc / f"{pid}/fd").mkdir(parents=True)
        (proc / f"{pid}/comm").write_text("raylet\n")
        (proc / f"{pid}/cmdline").write_bytes(b"raylet\0--object_store_memory=1048576\0--plasma_directory=/dev/shm\0")
    (proc / "7/root").symlink_to("/")
    (proc / "8/root/dev/shm").mkdir(parents=True)
    found = free_memory.free_bytes(str(proc))
    assert found.plasma_unfilled == MIB and found.memory_free == 1048576 * 1024 - MIB


def test_more_than_is_free_is_a_capacity_error() -> None:
    assert free_memory.free_bytes().memory_free > 0
    free_memory.check(1)
    with pytest.raises(CapacityError, match=r"asked for .*32768\.00 GiB.* are free: .*Lower cpu_memory"):
        free_memory.check(1 << 45)


@pytest.fixture
def ray_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The /proc folder of a raylet of this test, with an object store of 100 MiB."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    before = set(raylets.processes())
    with outside():
        ray.init("local", num_cpus=1, object_store_memory=100 * MIB, include_dashboard=False, logging_level="ERROR")
        session = ray._private.worker._global_node.get_session_dir_path().encode()
        new = set(raylets.processes()) - before
        yield next(process for process in new if session in (process / "cmdline").read_bytes())


@pytest.mark.full
def test_real_raylet(ray_store: Path) -> None:
    import ray

    whole = free_memory._unfilled(ray_store)
    assert 99 * MIB < whole <= 100 * MIB
    held = ray.put(np.ones(40 * MIB, np.uint8))
    assert whole - free_memory._unfilled(ray_store) >= 40 * MIB
    assert free_memory.free_bytes().plasma_unfilled >= 59 * MIB
    del held
    assert os.path.exists(ray_store)
