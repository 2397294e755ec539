"""Other processes use a GPU's arena while its store lives, and let go of the arena when the store ends."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.arena.gpu_arenas import POOL, gpu_arena, granted, has, some
from helpers.arena.gpu_rows import on_gpu, read_to_gpu
from helpers.arena.gpus import elsewhere, environment, meanwhile
from helpers.arena.worker import block_of, key_of

from raykv.arena.buffers import rows_of
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import Device
from raykv.arena.gpu_arena import GpuArena
from raykv.errors import DeviceError
from raykv.system.file_locks import SlotLocks

pytestmark = pytest.mark.usefixtures("nothing_left", "locked")

CLIENT = """
import sys
import time
import numpy as np
from helpers.arena.worker import key_of
from raykv.arena.gpu_arena import GpuArena
from helpers.arena.gpu_arenas import granted, has, some
path, nonce, gpu, handle = sys.argv[1:]
arena = GpuArena.map(path, bytes.fromhex(nonce), gpu, bytes.fromhex(handle))
at, keys, blocks = some(3)
assert has(arena, at, keys, blocks)
assert arena.write(granted(at), keys, ~blocks).all()
assert has(arena, granted(at), keys, ~blocks)
arena.close()
assert not arena.read(at, keys, blocks).any() and not arena.write(granted(at, gen=200), keys, blocks).any()
"""


def test_another_process_stores_and_reads(ours: GpuArena, gpu: Device) -> None:
    at, keys, blocks = some(3)
    assert ours.write(at, keys, blocks).all()
    done = elsewhere(CLIENT, ours.path, ours.nonce.hex(), gpu.uuid, ours.handle.hex())
    assert done.returncode == 0, done.stderr
    assert has(ours, at, keys, blocks) and has(ours, granted(at), keys, ~blocks)


STORE = """
import sys
import time
from raykv.arena import gpu_arena as gpu_arenas
from raykv.arena.gpu.device import device
from helpers.arena.gpu_arenas import gpu_arena, some
arena = gpu_arena(device(sys.argv[1]), sys.argv[2])
assert arena.write(*some(3)).all()
print(arena.path, arena.nonce.hex(), arena.handle.hex(), flush=True)
if patience := sys.stdin.readline():  # to stop with so many seconds
    gpu_arenas.LET_GO_S = float(patience)
    arena.close(unlink=True)
    print("freed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(gpu: Device) -> Iterator[tuple["subprocess.Popen[str]", GpuArena]]:
    """(a node store's process, the arena of its GPU as this process maps it)."""
    command = [sys.executable, "-c", STORE, gpu.uuid, POOL]
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin and process.stdout
    path, nonce, handle = process.stdout.readline().split()
    arena = GpuArena.map(path, bytes.fromhex(nonce), gpu.uuid, bytes.fromhex(handle))
    yield process, arena
    arena.close()
    process.kill()
    process.communicate()


@pytest.mark.parametrize("opened", [False, True])
def test_a_store_that_is_killed(cupy: Any, store: tuple["subprocess.Popen[str]", GpuArena], opened: bool) -> None:
    """The store's memory is gone. No process may copy there, whether it has opened the region or not."""
    process, arena = store
    at, keys, blocks = some(3)
    assert not opened or has(arena, at, keys, blocks)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for rows in (rows_of([blocks]), on_gpu(cupy, blocks)):
        with pytest.raises(DeviceError, match="its node store is gone"):
            arena.read(at, keys, rows)
        with pytest.raises(DeviceError, match="its node store is gone"):
            arena.write(granted(at), keys, rows)


def test_a_store_that_is_killed_while_its_blocks_are_read(
    cupy: Any, store: tuple["subprocess.Popen[str]", GpuArena], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, arena = store
    at, keys, _ = some(3)

    def kill() -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    meanwhile(monkeypatch, kill)
    with pytest.raises(DeviceError, match="its node store is gone"):
        read_to_gpu(cupy, arena, at, keys)


def test_a_store_that_stops_frees_its_memory_when_others_have_let_go(
    store: tuple["subprocess.Popen[str]", GpuArena],
) -> None:
    process, arena = store
    assert process.stdin and process.stdout
    at, keys, blocks = some(3)
    assert has(arena, at, keys, blocks) and not arena.lost
    process.stdin.write("60\n")
    process.stdin.flush()
    while not arena.lost:
        time.sleep(0.01)
    with pytest.raises(DeviceError, match="its node store is gone"):
        arena.read(at, keys, rows_of([blocks]))
    assert not select.select([process.stdout], [], [], 0.5)[0], "it waits for this process"
    arena.close()
    assert process.stdout.readline() == "freed\n"


def test_a_forked_child_keeps_no_memory_shared(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ours, other = (SlotLocks(os.open(tmp_path / "file", os.O_RDWR), 0, 8) for _ in range(2))
    end = ours.share()
    assert other.shared_elsewhere()
    started, ends = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.write(started[1], b"x")
        os.close(ends[1])
        os.read(ends[0], 1)
        os._exit(0)
    try:
        os.read(started[0], 1)
        end()
        assert not other.shared_elsewhere()
    finally:
        os.close(ends[1])
        os.waitpid(child, 0)
    for locks in (ours, other):
        locks.close()


def test_a_store_that_stops_waits_for_nobody_for_ever(store: tuple["subprocess.Popen[str]", GpuArena]) -> None:
    process, arena = store
    assert process.stdin and process.stdout
    assert has(arena, *some(3))
    process.stdin.write("0.1\n")
    process.stdin.flush()
    assert process.stdout.readline() == "freed\n" and arena.lost


def test_nothing_is_mapped_before_it_is_copied(on_host: Any) -> None:
    ours = gpu_arena(devices.device(devices.visible()[0]))
    arena = GpuArena.map(ours.path, ours.nonce, ours.gpu, bytes(64))
    assert arena._region is None and block_of(key_of(1)).size
    arena.close()
    ours.close(unlink=True)
