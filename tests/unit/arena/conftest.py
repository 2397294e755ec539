"""Fixtures for tests of arenas. Files that need an `arena` of another size have their own fixture."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.arena import worker as w
from helpers.arena.gpu_arenas import POOL, gpu_arena, memory_arena
from helpers.arena.gpus import page_locked
from helpers.arena.worker import PRINT, SLAB, Child

from raykv.arena.arena import Arena
from raykv.arena.files import remove_left_behind
from raykv.arena.gpu.device import Device
from raykv.arena.gpu_arena import GpuArena


@pytest.fixture
def path() -> Iterator[str]:
    path = f"/dev/shm/raykv-test-{os.getpid()}"
    yield path
    if os.path.exists(path):
        os.unlink(path)


@pytest.fixture
def client(arena: Arena) -> Iterator[Arena]:
    client = Arena.attach(arena.path, arena.nonce)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    yield
    while Child.all:
        Child.all.pop().end()  # a stopped child would keep pytest from ending


@pytest.fixture
def arena(path: str) -> Iterator[Arena]:
    """The owner's arena of three slabs, two of them offered, with epoch 1."""
    arena = Arena.create(path, PRINT, SLAB, 3)
    assert arena.offer_next() and arena.offer_next()
    arena.raise_epoch(w.EPOCH)
    yield arena
    arena.close(unlink=True)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    remove_left_behind(POOL)


@pytest.fixture
def host(cupy: Any) -> Iterator[Arena]:
    arena = memory_arena()
    yield arena
    arena.close(unlink=True)


@pytest.fixture
def ours(gpu: Device) -> Iterator[GpuArena]:
    arena = gpu_arena(gpu)
    yield arena
    arena.close(unlink=True)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    return page_locked(monkeypatch)
