"""SGLang's own classes from its sources, without a GPU, or a stand-in for them, with our storage on either."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.project.pages import ROOT, codes

VERSION = "0.5.23"
SOURCES = ROOT / ".venv-compat" / "sources" / f"sglang-{VERSION}"  # `make contract` brings them
REAL = ("sglang.srt.mem_cache", "sglang.srt.environ")  # other modules need CUDA kernels, or start a server
OURS = "raykv.integrations.sglang"
STORAGE = "sglang.srt.mem_cache.hicache_storage"
KINDS = ("stand_in", "sources")


class Nothing:
    """Any name of a module that is left out: false, and every attribute and call gives another Nothing."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return Nothing()

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class LeftOut(ModuleType):
    """An empty module, in place of one of SGLang or its kernels that host pools import but do not need on a CPU."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Door(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports SGLang's modules in REAL from its sources, and its other modules and its kernels as LeftOut."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in ("sglang", "sgl_kernel"):
            return None
        if any(fullname == name or fullname.startswith(f"{name}.") for name in REAL):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return LeftOut(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = [str(SOURCES.joinpath(*module.__name__.split(".")))]


def _is_theirs(name: str) -> bool:
    return name.split(".")[0] in ("sglang", "sgl_kernel") or name.startswith(OURS)


_imported: dict[str, dict[str, ModuleType]] = {}  # by kind; kept, as modules can register their kernels only once


@contextmanager
def imported(kind: str) -> Iterator[SimpleNamespace]:
    """Our storage and the classes it is made with, of one of KINDS. Afterwards sys.modules is as before."""
    if kind == "sources":
        sources()
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_theirs(name)}
    sys.modules.update(_imported.get(kind, {}))
    door = Door()
    if kind == "sources":
        sys.meta_path.insert(0, door)
    elif kind not in _imported:
        _lay_stand_in()
    arguments = _lay_server()
    try:
        found = _from_sources() if kind == "sources" else _from_stand_in()
        found.arguments = arguments
        yield found
    finally:
        if door in sys.meta_path:
            sys.meta_path.remove(door)
        _imported[kind] = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_theirs(name)}
        sys.modules.update(before)


def _lay_server() -> SimpleNamespace:
    """Fake a running server's version and arguments. Returns the arguments."""
    context: Any = LeftOut("sglang.srt.runtime_context")
    version: Any = ModuleType("sglang.version")
    context.arguments, version.__version__ = SimpleNamespace(kv_cache_dtype="auto"), VERSION
    context.get_server_args = lambda: context.arguments
    for module in (context, version):
        sys.modules.setdefault(module.__name__, module)
    laid: SimpleNamespace = sys.modules[context.__name__].arguments
    return laid


def _lay_stand_in() -> None:
    parts = STORAGE.split(".")
    for end in range(1, len(parts)):
        sys.modules[".".join(parts[:end])] = ModuleType(".".join(parts[:end]))
    sys.modules[STORAGE] = importlib.import_module("helpers.engines.hicache_stand_in")


def _from_stand_in() -> SimpleNamespace:
    theirs = importlib.import_module("helpers.engines.hicache_stand_in")
    return _made(theirs, theirs.kv_pool, theirs.latent_pool, theirs.state_pool, theirs.logical_pool)


def _from_sources() -> SimpleNamespace:
    theirs = importlib.import_module(STORAGE)
    found = _made(theirs, _kv_pool, _latent_pool, _state_pool, _logical_pool)
    found.factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    return found


def _made(theirs: Any, kv: Any, latent: Any, state: Any, logical: Any) -> SimpleNamespace:
    ours = importlib.import_module(OURS)
    return SimpleNamespace(
        Storage=ours.RayKVStorage,
        Config=theirs.HiCacheStorageConfig,
        Transfer=theirs.PoolTransfer,
        Policy=theirs.PoolHitPolicy,
        Info=theirs.HiCacheStorageExtraInfo,
        kv_pool=kv,
        latent_pool=latent,
        state_pool=state,
        logical_pool=logical,
    )


def _theirs(module: str) -> Any:
    return importlib.import_module(f"sglang.srt.mem_cache.{module}")


def _in_budget(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a host pool without SGLang's check of memory, which leaves 10 GiB of the machine free."""
    with _theirs("pool_host.base").host_memory_budget_scope(1 << 30):
        return kind(*args, **kwargs)


def _common(page_size: int, layout: str) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": page_size,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": 8 * page_size,
        "start_layer": 0,
        "end_layer": 3,
        "host_token_capacity": 16 * page_size,
    }


def _kv_pool(layout: str, page_size: int) -> Any:
    info = _theirs("device_pool_info")
    layers = tuple(torch.zeros((8 * page_size, 2, 64), dtype=torch.bfloat16) for _ in range(3))
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    buffers = info.KVBuffers(
        k=layers, v=layers, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=info.KVBufferLayout.NHD
    )
    shape = {"head_num": 2, "head_dim": 64, "v_head_dim": 64, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    described = info.MHABufferInfo(buffers=buffers, page_size=page_size, **shape)
    return _in_budget(_theirs("pool_host.mha").MHATokenToKVPoolHost, described, **_common(page_size, layout))


def _latent_pool(layout: str, page_size: int) -> Any:
    info = _theirs("device_pool_info")
    layers = tuple(torch.zeros((8 * page_size, 1, 96), dtype=torch.bfloat16) for _ in range(3))
    described = info.MLABufferInfo(
        buffers=layers,
        data_ptrs=torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        layer_indices=(0, 1, 2),
        device_layer_num=3,
        page_size=page_size,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        kv_cache_dim=96,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    made = _theirs("pool_host.mla").MLATokenToKVPoolHost
    return _in_budget(made, described, **_common(page_size, layout), target_layer_num=3)


def _state_pool() -> Any:
    info = _theirs("device_pool_info")
    temporal = torch.zeros((3, 8, 32, 16), dtype=torch.float32)
    described = info.MambaStateBufferInfo(temporal=temporal, conv=(torch.zeros((3, 8, 24), dtype=torch.bfloat16),))
    made = _theirs("pool_host.mamba").MambaPoolHost
    return _in_budget(made, described, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")


def _logical_pool(page_size: int) -> Any:
    return _theirs("memory_pool_host").LogicalHostPool(16 * page_size, page_size)


def documented() -> dict[str, Any]:
    """The configuration of our storage that docs/engines.md shows."""
    (shell,) = (code.text for code in codes(ROOT / "docs/engines.md") if "sglang.launch_server" in code.text)
    words = shlex.split(shell)
    found: dict[str, Any] = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    return found


def sources() -> Path:
    """SGLang's sources. Skips the test where they are not here, except under CI."""
    if not SOURCES.exists() and "CI" not in os.environ:
        pytest.skip(f"the sources of SGLang {VERSION} are not here: make contract")
    return SOURCES
