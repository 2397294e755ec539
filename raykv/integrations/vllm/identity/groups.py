"""The KV cache groups of a model: layers whose chunks are looked up, stored and evicted together.

A layer of full attention reads every chunk of a prefix, one that attends to a sliding window the last ones, and a state
(Mamba, gated delta nets, short convolutions) is the last chunk alone. So each group is a cache of its own in the pool,
and vLLM asks for a chunk of a group by its hash and the index of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

SUPPORTED = (  # by name: a subclass may mean something else
    *("FullAttentionSpec", "SinkFullAttentionSpec", "MLAAttentionSpec"),
    *("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "MambaSpec"),
)


class Group(NamedTuple):
    """group_idx: what vLLM's keys call it. place: among those that are offloaded.

    tokens: of a chunk. window: how many last chunks of a prefix are read; 0: all.
    """

    group_idx: int
    place: int
    tokens: int
    window: int


def pool_part(place: int, part: int, ranks: Iterable[Sequence[int]]) -> int:
    """Which part of the pool's cache a part of a group's chunks is. ranks: the parts of a chunk that each rank has."""
    return place * (1 + max(map(max, ranks))) + part


def groups_of(configs: Sequence[Any]) -> list[Group]:
    """Of vLLM's `kv_group_configs`, those of which all chunks are read first."""
    found = [
        Group(config.group_idx, place, config.tokens_per_chunk, config.sliding_window_size_in_chunks or 0)
        for place, config in enumerate(configs)
    ]
    return sorted(found, key=lambda group: group.window > 0)


def loadable(tokens: int, groups: Sequence[Group], aligned: int, most: int | None) -> int:
    """Of how many leading tokens of a request vLLM's scheduler loads KV at most, so that windows end there.

    tokens: of the request; where a group has a window, its last is computed. aligned: tokens after which a state may be
    taken; 0: any. most: up to which the request is loaded; None: to its end.
    """
    found = tokens if most is None else min(tokens, most)
    if any(group.window for group in groups):
        found -= 1
    steps = [aligned] if aligned else []
    if most is not None:  # by whole chunks
        steps += [group.tokens for group in groups]
    return found - found % lcm(*steps)


def unsupported(spec: Any) -> set[str]:
    """Names of the kinds of pages in a group that are not KV which depends on nothing but the tokens before."""
    return {type(layer).__name__ for layer in _layers(spec)}.difference(SUPPORTED)


def is_latent(spec: Any) -> bool:
    """Whether every tensor-parallel rank has the same pages."""
    return all(isinstance(layer, MLAAttentionSpec) for layer in _layers(spec))


def _layers(spec: Any) -> Iterable[Any]:
    """What a group's layers keep, where they differ; else what all of them keep."""
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def blocks_within(spec: Any) -> int:
    """How many blocks a chunk may have at most: a longer one would never lie whole in a window, nor be a state; 0: any.

    vLLM lets go of what is before a window while the next chunk is being filled.
    """
    if isinstance(spec, MambaSpec):
        return 1
    if isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)):
        blocks: int = _window(spec) // spec.block_size
        return max(1, blocks)
    return 0


def _window(spec: Any) -> int:
    """How many last tokens a group reads; 0: all, or a state."""
    tokens: int = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    return tokens


def names(groups: Sequence[Any]) -> str:
    """What tells these groups from others of the same model, which other options make. groups: vLLM's."""
    return ";".join(
        f"{type(group.kv_cache_spec).__name__},{group.kv_cache_spec.block_size},{_window(group.kv_cache_spec)},"
        f"{','.join(group.layer_names)}"
        for group in groups
    )
