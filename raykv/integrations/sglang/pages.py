"""Pages of SGLang's host memory as blocks of a cache, copied directly to and from SGLang's buffers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raykv.arena.buffers import Rows
from raykv.client.cache import KVCache
from raykv.client.pool import KVPool
from raykv.keys import Keys


class Pages:
    """SGLang's pages as blocks of `cache`."""

    cache: KVCache

    def keys(self, hashes: Sequence[str]) -> Keys:
        """Convert SGLang's page hashes to keys. The hash of a page also covers all pages before that page."""
        return self.cache.rekey([name.encode() for name in hashes])


class HostPages(Pages):
    """Pages of a host pool. A block holds all pieces that a page has in the host pool's buffers."""

    def __init__(self, pool: KVPool, host: Any, name: str, caches: dict[str, Any]) -> None:
        """host: a HostKVCache of SGLang. name: the host pool's name. caches: the other arguments of `KVPool.cache`.

        Propagates the error of `host.get_page_buffer_meta` if it does not support the host pool's layout.
        """
        self._host, self._page_size = host, host.page_size or 1
        addresses, sizes = host.get_page_buffer_meta(torch.arange(self._page_size))
        self._lengths = np.array(sizes, np.int64)
        self.cache = pool.cache(
            **caches,
            block_bytes=int(self._lengths.sum()),
            dtype=str(host.dtype).removeprefix("torch."),
            layout=f"sglang/{name}/{_form(host)}/{len(addresses)}",
        )

    def rows(self, indices: torch.Tensor, pages: int) -> Rows:
        """Return the addresses of pages.

        indices: indices of the pages' tokens in the host pool. Raises ValueError for invalid indices.
        """
        if indices.numel() != pages * self._page_size:
            raise ValueError(f"{indices.numel()} host indices for {pages} pages of {self._page_size} tokens")
        first = indices[:: self._page_size]
        if pages and not 0 <= int(first.min()) <= int(first.max()) <= self._host.size - self._page_size:
            raise ValueError(f"host indices {first.tolist()}, but the host pool has {self._host.size}")
        addresses, sizes = self._host.get_page_buffer_meta(indices)
        if sizes != self._lengths.tolist() * pages:
            raise ValueError(f"{pages} pages have parts of {sizes} bytes, where the first has {self._lengths}")
        at: NDArray[np.int64] = np.array(addresses, np.int64).reshape(pages, len(self._lengths))
        return Rows(at, self._lengths, self._host, writable=True)


class FlatPages(Pages):
    """Pages as tensors, for use without `interface_v1`. SGLang itself copies them from and to its host pool."""

    def __init__(self, pool: KVPool, host: Any, caches: dict[str, Any]) -> None:
        """Like HostPages. A block's bytes are ordered differently than in HostPages, so the caches are separate."""
        self.cache = pool.cache(
            **caches,
            block_bytes=host.get_dummy_flat_data_page().nbytes,
            dtype=str(host.dtype).removeprefix("torch."),
            layout=f"sglang/flat/{_form(host)}",
        )

    def rows(self, tensors: Sequence[torch.Tensor]) -> Rows:
        """Return the addresses of pages. Raises ValueError unless each is contiguous host memory of a block's size."""
        for tensor in tensors:
            if tensor.nbytes != self.cache.block_bytes or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(
                    f"a page of {tensor.dtype}{list(tensor.shape)} on {tensor.device}: give contiguous host memory "
                    f"of {self.cache.block_bytes} bytes"
                )
        at = np.array([tensor.data_ptr() for tensor in tensors], np.int64).reshape(-1, 1)
        return Rows(at, np.array([self.cache.block_bytes], np.int64), list(tensors), writable=True)


def _form(host: Any) -> str:
    """Return a text that identifies the layout of a host pool's pages."""
    return f"{type(host).__name__}/{host.layout}/{getattr(host, 'storage_format_tag', None) or ''}"
