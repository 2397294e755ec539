"""Just enough of SGLang's names for our storage where SGLang's sources are missing: base classes and a host pool.

`make contract` runs the same tests with SGLang's own classes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


class HiCacheStorage:
    """The base class of storages, with the methods that it implements itself."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        pass


class PoolHitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class PoolTransfer:
    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: str = PoolHitPolicy.ALL_PAGES


class HiCacheStorageConfig(SimpleNamespace):
    dp_rank, dcp_size, dcp_rank = 0, 1, 0


class HiCacheStorageExtraInfo(SimpleNamespace):
    pass


@dataclass
class HostPool:
    """Keys and values of some layers, in one of SGLang's layouts. Without `layers` a page is one piece."""

    layout: str
    page_size: int
    layers: int
    pages: int = 16
    storage_format_tag: None = None
    dtype: torch.dtype = torch.bfloat16
    buffers: list[torch.Tensor] = field(default_factory=list)  # for each part of a page, a tensor (pages, bytes)
    token_bytes: int = 256

    def __post_init__(self) -> None:
        self.size = self.pages * self.page_size
        parts = 2 * self.layers if self.layout == "layer_first" else 2
        each = 2 * max(1, self.layers) * self.page_size * self.token_bytes // parts
        self.kv_buffer = torch.zeros((parts, self.pages, each), dtype=torch.uint8)
        self.buffers = list(self.kv_buffer)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        rows = [
            buffer[index // self.page_size] for index in indices.tolist()[:: self.page_size] for buffer in self.buffers
        ]
        return [row.data_ptr() for row in rows], [row.nbytes for row in rows]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.kv_buffer[:, 0].numel(), dtype=torch.uint8)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[:, index // self.page_size].flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.kv_buffer[:, index // self.page_size] = data_page.reshape(len(self.buffers), -1)


class LogicalHostPool(SimpleNamespace):
    """Pages that have no bytes."""

    kv_buffer = None
    dtype = torch.uint8


def kv_pool(layout: str, page_size: int) -> HostPool:
    return HostPool(layout, page_size, layers=3)


def latent_pool(layout: str, page_size: int) -> HostPool:
    return HostPool(layout, page_size, layers=2)


def state_pool() -> HostPool:
    return HostPool("page_first", 1, layers=0)


def logical_pool(page_size: int) -> LogicalHostPool:
    return LogicalHostPool(page_size=page_size, size=16 * page_size, layout="page_first", storage_format_tag=None)
