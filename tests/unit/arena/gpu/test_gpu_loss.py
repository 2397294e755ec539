"""A lost GPU is an error, drops all locks and leaves memory as it was."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.arena.gpu_arenas import SIZE, Locations, gpu_arena, granted, has, memory_arena, some
from helpers.arena.gpu_rows import on_gpu

from raykv.arena.gpu import device as devices
from raykv.arena.gpu_arena import copy_between
from raykv.client.leases.lease import Lease
from raykv.client.leases.leased_blocks import LeasedBlocks, LeaseName
from raykv.client.stores.local_store import LocalStore
from raykv.errors import DeviceError

pytestmark = pytest.mark.usefixtures("nothing_left", "locked")


def test_a_lost_gpu(on_host: Any, locked: dict[int, int]) -> None:
    gpu = devices.device(devices.visible()[0])
    ours, host = gpu_arena(gpu), memory_arena()
    at, keys, blocks = some(2)
    rows = on_gpu(on_host, blocks)
    assert ours.write(at, keys, rows).all() and host.write(at, keys, rows).all()
    host.populate(gpu.uuid)
    assert len(locked) == 2
    on_host.cuda.runtime.lose()
    for arena in (ours, host):
        new = granted(at)
        with pytest.raises(DeviceError):
            arena.write(new, keys, rows)
        with pytest.raises(DeviceError):
            arena.read(at, keys, rows)
        assert not arena._locks.busy(0, 1 << 20) and not len(arena.inventory().writing), "all locks were dropped"
    assert has(host, at, keys, blocks) and host.write(granted(at), keys, blocks).all(), "memory is as it was"
    with pytest.raises(DeviceError):
        copy_between(ours, at, keys, host, granted(at, gen=200))
    assert not len(host.inventory().writing)
    for arena in (ours, host):
        arena.close(unlink=True)
    gc.collect()  # frames of what was raised
    assert not locked


class DirectoryClient:
    def __init__(self) -> None:
        self.blamed, self.faults = 0, []  # type: tuple[int, list[str]]

    def corrupt(self, locations: Locations) -> None:
        self.blamed += len(locations)

    def fault(self, kind: str, detail: object) -> None:
        self.faults.append(kind)


@pytest.mark.parametrize(
    "lost, replaced, faults, blamed", [(True, False, ["gpu"], 0), (False, True, [], 0), (False, False, ["read"], 2)]
)
def test_verdicts_of_blocks_that_were_not_copied(
    on_host: Any, lost: bool, replaced: bool, faults: list[str], blamed: int
) -> None:
    """Blocks that are not there are reported to the directory. Blocks that the reader can't reach, or that another
    arena has, must not be reported."""
    host, directory = memory_arena(), DirectoryClient()
    at, keys, blocks = some(2)
    at["node"], rows = 4, on_gpu(on_host, blocks)
    if lost:
        assert host.write(at, keys, rows).all()
        on_host.cuda.runtime.lose()
    local: Any = object.__new__(LocalStore)
    local.arena = host
    session: Any = SimpleNamespace(directory=directory, local=None if replaced else local)
    lease = Lease(session, local, LeasedBlocks(session.directory, SIZE, LeaseName(b"", 4, 1, 1, 0), at, keys))
    assert not lease._copy(at, keys, rows, False).any()
    assert (directory.faults, directory.blamed) == (faults, blamed)
    host.close(unlink=True)
    gc.collect()  # frees frames of the errors while this CuPy is still imported
