"""The class that SGLang calls for the third tier of its KV cache, from its own threads in every rank's process.

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-mem-layout page_first_direct \
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
            "backend_name": "raykv", "module_path": "raykv.integrations.sglang", "class_name": "RayKVStorage",
            "interface_v1": 1, "pool": "default"}' ...
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
except ImportError as error:
    raise ImportError("this needs SGLang, 0.5.23 or later: pip install sglang") from error

from raykv.arena.buffers import Rows
from raykv.client.cache import KVCache
from raykv.client.leases.joint_match import JointMatch, Part
from raykv.client.leases.match import Match
from raykv.client.reservation import store_rows
from raykv.integrations.node import attach
from raykv.integrations.sglang.identity import identity
from raykv.integrations.sglang.pages import FlatPages, HostPages
from raykv.keys import Keys

P = ParamSpec("P")
T = TypeVar("T")
KV = "kv"  # SGLang's name for its main host pool


class RayKVStorage(HiCacheStorage):  # type: ignore[misc]
    """Stores pages of SGLang's host memory in a pool. Each rank's part of each host pool has its own cache.

    A failure of the pool is a miss. Failures are counted, logged once a minute, and never raised.
    """

    def __init__(self, storage_config: Any, more: Any = None) -> None:
        """storage_config: HiCacheStorageConfig. more: unused.

        In extra_config, `pool` is the pool's name, and `tenant` is charged for the blocks (see KVPool.cache).
        Raises the errors of `raykv.attach`, and ValueError for a model without a name. SGLang then does not start.
        """
        self._config, extra = storage_config, storage_config.extra_config or {}
        identity(storage_config, KV)
        self._zero_copy, self._tenant = bool(extra.get("interface_v1", 0)), extra.get("tenant", "")
        self._pool = attach(extra.get("pool", "default"))
        self._session = self._pool.session
        self._flat: FlatPages | None = None
        self._pages: dict[str, HostPages] = {}  # by host pool

    # ------------------------------------------------------------------ host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the host pool that holds the KV. For DeepSeek V4 it has no memory, and thus no pages to store."""
        super().register_mem_pool_host(mem_pool_host)
        self._flat, self._pages = None, {}
        if mem_pool_host.kv_buffer is None:
            return
        if self._zero_copy:
            self._pages[KV] = self._host_pages(mem_pool_host, KV)
        else:
            self._flat = FlatPages(self._pool, mem_pool_host, self._caches(KV))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Register another host pool.

        Propagates the error of a host pool without page addresses, for example a pool of states in layout layer_first.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != KV:
            self._pages[host_pool_name] = self._host_pages(host_pool, host_pool_name)

    def _host_pages(self, host: Any, name: str) -> HostPages:
        plain = str(getattr(name, "value", name))
        return HostPages(self._pool, host, plain, self._caches(plain))

    def _caches(self, name: str) -> dict[str, Any]:
        """Return the arguments of a host pool's cache. In every host pool, one page hash names one block."""
        page_tokens = self.mem_pool_host.page_size
        return {**identity(self._config, name), "block_tokens": page_tokens, "tenant": self._tenant}

    # ------------------------------------------------------------------ zero copy

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages the pool has."""
        return self._or(0, self._find, keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool. Pages after the first missing page count as missing."""
        return self._or([False] * len(keys), self._get, KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool. A page counts as stored if the pool has it, or another engine is writing it."""
        return self._or([False] * len(keys), self._set, KV, keys, host_indices, extra_info)

    # ------------------------------------------------------------------ several host pools

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Find the longest prefix that can be restored.

        Some host pools need all pages of the prefix, others only its last pages. The prefix's length is reported for
        every host pool, as a lower bound. Transfers of block groups never shorten the prefix, so they are ignored.
        """
        return self._or(PoolTransferResult.empty(), self._find_all, keys, pool_transfers or [])

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Like `batch_get_v1`, for each transfer's host pool."""
        return {
            one.name: self._or([False] * len(one.keys or []), self._get, one.name, one.keys, one.host_indices)
            for one in transfers
        }

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Like `batch_set_v1`, for each transfer's host pool."""
        return {
            one.name: self._or(
                [False] * len(one.keys or []), self._set, one.name, one.keys, one.host_indices, extra_info
            )
            for one in transfers
        }

    # ------------------------------------------------------------------ without `interface_v1`

    def exists(self, key: str) -> bool:
        """Whether the pool has a page."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read a page into the tensor `target_location`. Returns the tensor, or None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Like `get`, for several pages. All pages after the first miss are misses."""
        count = self._or(0, self._read_flat, keys, target_locations)
        return [*target_locations[:count], *[None] * (len(keys) - count)] if count else [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store the page `value`. Returns whether the pool has the page, or another engine is writing it."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Like `set`, for several pages. Returns whether all are stored."""
        return self._or(False, self._write_flat, keys, values)

    # ------------------------------------------------------------------ whole pool

    def clear(self) -> None:
        """Remove the blocks of all engines from the pool, for `POST /hicache/storage-backend/clear`."""
        self._or(0, self._pool.clear)

    def close(self) -> None:
        """Leave the pool. Later calls find nothing."""
        self._pool.close()

    def _or(self, miss: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result, or `miss` after an error, as an exception would end SGLang's threads."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self._session.directory.fault("sglang", f"{function.__name__} failed: {error!r}")
            return miss

    def _find(self, keys: list[str]) -> int:
        pages = self._flat or self._pages.get(KV)
        if pages is None:
            return 0
        with pages.cache.match(pages.keys(keys)) as match:
            return match.num_blocks

    def _get(self, name: str, keys: list[str], indices: torch.Tensor) -> list[bool]:
        if self._is_logical(name):
            return [True] * len(keys)
        pages = self._known(name)
        count = self._read(pages.cache, pages.keys(keys), pages.rows(indices, len(keys)))
        return [number < count for number in range(len(keys))]

    def _set(self, name: str, keys: list[str], indices: torch.Tensor, extra_info: Any) -> list[bool]:
        if self._is_logical(name):
            return [True] * len(keys)
        pages, parents = self._known(name), _parents(extra_info)
        rows = pages.rows(indices, len(keys))
        covered = store_rows(self._session, pages.keys([*parents, *keys]), rows, len(parents)).covered
        return [number < covered for number in range(len(parents), len(parents) + len(keys))]

    def _is_logical(self, name: str) -> bool:
        """Whether pages of the host pool have no bytes, so that there is nothing to copy."""
        return bool(name == KV and self.mem_pool_host.kv_buffer is None)

    def _known(self, name: str) -> HostPages:
        if name not in self._pages:
            raise ValueError(f"SGLang did not register a host pool {name!r}, but {sorted(self._pages)}")
        return self._pages[name]

    def _read(self, cache: KVCache, keys: Keys, rows: Rows) -> int:
        """Read leading pages. Returns the number of read pages. Counts no look-up, as `batch_exists` has counted it."""
        with Match(self._session, keys, cache.recompute_tokens_per_s).ask() as match:
            return match.read_rows(rows)

    def _read_flat(self, keys: list[str], targets: Sequence[torch.Tensor]) -> int:
        pages = self._known_flat()
        return self._read(pages.cache, pages.keys(keys), pages.rows(targets))

    def _write_flat(self, keys: list[str], values: Sequence[torch.Tensor]) -> bool:
        pages = self._known_flat()
        rows = pages.rows([value.contiguous() for value in values])
        return store_rows(self._session, pages.keys(keys), rows).covered == len(keys)

    def _known_flat(self) -> FlatPages:
        if self._flat is None:
            raise ValueError("with interface_v1 SGLang calls batch_get_v1 and batch_set_v1")
        return self._flat

    def _find_all(self, keys: list[str], transfers: list[Any]) -> Any:
        windows = {KV: 0} if not self._is_logical(KV) else {}
        for one in transfers:
            if one.hit_policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                trailing = one.hit_policy == PoolHitPolicy.TRAILING_PAGES
                windows[one.name] = max(1, len(one.keys or [])) if trailing else 0
        wanted = {name: self._known(name) for name in windows}
        if not wanted:
            return PoolTransferResult.empty()
        parts = [Part(self._session.memory_name, wanted[name].keys(keys), windows[name]) for name in windows]
        match = JointMatch(self._session, parts, next(iter(wanted.values())).cache.recompute_tokens_per_s)
        try:
            tokens = match.ask().tokens
        finally:
            match.release()
        ends = list(range(1, tokens // parts[0].keys.cache.block_tokens + 1))
        for name, window in windows.items():
            if window and ends:
                ends = self._restorable(wanted[name].keys(keys[: ends[-1]]), window, ends)
        count = ends[-1] if ends else 0
        return PoolTransferResult(count, dict.fromkeys(windows, count) if count else {}, ends)

    def _restorable(self, keys: Keys, window: int, ends: list[int]) -> list[int]:
        """Return the `ends` from which this rank can continue: the pool has a whole window of pages before each end.

        SGLang continues from an end that all ranks return.
        """
        answer = self._session.directory.stored(keys.tobytes())
        if answer is None or not answer.found:
            return []
        missing = np.concatenate([[0], np.cumsum(np.frombuffer(answer.found, np.uint8) == 0)])
        return [end for end in ends if missing[end] == missing[max(0, end - window)]]


def _parents(extra_info: Any) -> list[str]:
    """Return hashes of the pages before a call's pages, if SGLang gives them (`hicache_storage_pass_prefix_keys`)."""
    return list((extra_info and extra_info.prefix_keys) or [])
