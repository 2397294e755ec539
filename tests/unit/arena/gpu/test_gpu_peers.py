"""An arena on a GPU gives its blocks to peers on other nodes, on a stand-in for CuPy; with `-m gpu`, on a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.arena.gpu_arenas import SIZE, gpu_arena, granted, memory_arena, some, sums_of
from helpers.arena.gpu_rows import on_gpu
from helpers.arena.gpus import meanwhile
from helpers.arena.worker import key_of

from raykv.arena.arena import Arena
from raykv.arena.gpu import device as devices
from raykv.arena.gpu_arena import GpuArena
from raykv.transports import selector
from raykv.transports.object_store import ObjectStore
from raykv.transports.tcp import Tcp

pytestmark = pytest.mark.usefixtures("nothing_left", "locked")


@pytest.mark.parametrize("kind", ["host", "ours"])
def test_read_for_peer(request: pytest.FixtureRequest, cupy: Any, kind: str) -> None:
    arena: Arena = request.getfixturevalue(kind)
    at, keys, blocks = some(4)
    assert arena.write(at[:2], keys[:2], blocks[:2], np.array([3, 4])).all()
    assert arena.write(at[3:], keys[3:], on_gpu(cupy, blocks[3:]), np.array([6])).all()
    sums, positions, ok, runs = arena.read_for_peer(at, keys)
    assert ok.tolist() == [True, True, False, True] and positions[ok].tolist() == [3, 4, 6]
    assert np.concatenate([run.reshape(-1) for run in runs]).tobytes() == blocks[ok].tobytes()
    assert sums[ok].tolist() == sums_of(blocks[ok])
    _, _, ok, runs = arena.read_for_peer(at[2:3], keys[2:3])
    assert not ok.any() and not sum(run.size for run in runs)


def test_read_for_peer_of_blocks_that_are_evicted(ours: GpuArena, monkeypatch: pytest.MonkeyPatch) -> None:
    at, keys, blocks = some(3)
    assert ours.write(at, keys, blocks).all()
    meanwhile(monkeypatch, lambda: ours.write(granted(at, slab=1)[1:2], key_of(9), blocks[2:]))
    sums, _, ok, runs = ours.read_for_peer(at, keys)
    assert ok.tolist() == [True, False, True] and runs[0].tobytes() == blocks[ok].tobytes()
    assert sums[ok].tolist() == sums_of(blocks[ok])


def test_read_for_peer_of_a_size_that_no_slab_has(ours: GpuArena) -> None:
    """Memory is allocated only for blocks that are there, whatever sizes the request names."""
    at, keys, blocks = some(4)
    assert ours.write(at, keys, blocks).all()
    at["bytes"][2:] = 0xFFFFFFFF
    found = ours.read_for_peer(at, keys)
    assert found.there.tolist() == [True, True, False, False]
    assert (np.concatenate(found.runs).reshape(-1, SIZE) == blocks[:2]).all()


def test_no_nixl_for_a_gpu(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL would take the GPU's addresses for host memory."""
    host, ours = memory_arena(), gpu_arena(devices.device(devices.visible()[0]))
    monkeypatch.setattr(selector, "why_not", lambda: "")
    monkeypatch.setattr(selector, "Nixl", lambda arena: SimpleNamespace(name="nixl", close=lambda: None))
    names = {}
    for arena in (host, ours):
        opened = selector.open_transports(arena, "nixl", "127.0.0.1")
        names[arena] = [transport.name for transport in opened._transports]
        opened.close()
        arena.close(unlink=True)
    assert names == {host: ["nixl", Tcp.name, ObjectStore.name], ours: [Tcp.name, ObjectStore.name]}
