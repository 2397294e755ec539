"""GPU tests share this: CuPy's stand-in, a GPU's memory as bytes, and other processes with the same CuPy."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from raykv.arena.gpu import cuda
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import Device
from raykv.errors import DeviceError

ON_HOST = str(Path(__file__).parent / "cupy_on_host")
Bytes = NDArray[np.uint8]


def forget() -> None:
    """Forget the imported CuPy, so that another one can be imported."""
    for cached in (cuda.uuid, cuda._context, cuda._libcuda, devices.device):
        cached.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        del sys.modules[name]


def page_locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The memory that raykv page-locks from now on: lengths by address."""
    lock, unlock, found = Device.register, Device.unregister, dict[int, int]()

    def register(self: Device, address: int, length: int) -> None:
        lock(self, address, length)
        found[address] = length

    def unregister(self: Device, address: int) -> None:
        del found[address]
        unlock(self, address)

    monkeypatch.setattr(Device, "register", register)
    monkeypatch.setattr(Device, "unregister", unregister)
    return found


def table_of(*copies: tuple[int, int, int]) -> NDArray[np.int64]:
    return np.array(copies, np.int64).reshape(-1, 3)


def put(gpu: Device, to: int, data: Bytes) -> None:
    """Write into a GPU's memory through a bounce buffer."""
    bounce = gpu.bounce_buffer()
    bounce[: len(data)] = data
    gpu.copy(table_of((to, bounce.ctypes.data, len(data))))


def get(gpu: Device, of: int, length: int) -> Bytes:
    bounce = gpu.bounce_buffer()
    gpu.copy(table_of((bounce.ctypes.data, of, length)))
    return bounce[:length].copy()


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def elsewhere(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in another process with the same CuPy."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)


def refuse(*_: object) -> None:
    raise DeviceError("cudaErrorNotSupported")


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call `act` once, when the next copy on a GPU is done but has not returned."""
    original, acts = Device.copy, [act]

    def copy(self: Device, table: Any, *how: Any) -> None:
        original(self, table, *how)
        if acts:
            acts.pop()()

    monkeypatch.setattr(Device, "copy", copy)
