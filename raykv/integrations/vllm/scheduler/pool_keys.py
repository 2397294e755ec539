"""The pool's keys of a request's chunks."""

from __future__ import annotations

from collections.abc import Collection

from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx

from raykv.client.cache import KVCache
from raykv.integrations.vllm.chunks.chunks import Origin
from raykv.keys import Keys


def by_group(keys: Collection[bytes]) -> dict[int, list[bytes]]:
    """Return the keys by vLLM's group."""
    groups: dict[int, list[bytes]] = {}
    for key in keys:
        groups.setdefault(get_offload_group_idx(key), []).append(key)
    return groups


def pool_keys(caches: dict[int, KVCache], keys: list[bytes], origin: Origin) -> dict[int, Keys]:
    """Return pool keys of a group's chunks, by part. The salt only sets a tenant, as vLLM's hashes cover the salt."""
    hashes = [get_offload_block_hash(key) + origin.weights for key in keys]
    return {part: Keys(cache.rekey(hashes), cache.id_for(origin.salt)) for part, cache in caches.items()}
