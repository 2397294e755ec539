"""The KV cache groups of a model: layers whose chunks are looked up, stored and evicted together.

A full-attention layer reads every chunk of a prefix, and a sliding-window layer the last chunks. A state (Mamba, gated
delta nets, short convolutions) is only the last chunk. So each group is its own cache in the pool. vLLM asks for a
chunk of a group by its hash and the index of the group.
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

SUPPORTED = (  # by name, as a subclass may mean something else
    *("FullAttentionSpec", "SinkFullAttentionSpec", "MLAAttentionSpec"),
    *("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "MambaSpec"),
)


class Group(NamedTuple):
    """group_idx: vLLM's index in keys. place: index among the offloaded groups.

    tokens: of a chunk. window: how many last chunks of a prefix are read; 0: all.
    """

    group_idx: int
    place: int
    tokens: int
    window: int


def pool_part(place: int, part: int, ranks: Iterable[Sequence[int]]) -> int:
    """The `part` of the pool's cache for a part of a group's chunks. ranks: by rank, its parts of a chunk."""
    return place * (1 + max(map(max, ranks))) + part


def groups_of(configs: Sequence[Any]) -> list[Group]:
    """The groups in vLLM's `kv_group_configs`, first those that read all chunks."""
    found = [
        Group(config.group_idx, place, config.tokens_per_chunk, config.sliding_window_size_in_chunks or 0)
        for place, config in enumerate(configs)
    ]
    return sorted(found, key=lambda group: group.window > 0)


def loadable(tokens: int, groups: Sequence[Group], aligned: int, most: int | None) -> int:
    """How many leading tokens of a request vLLM's scheduler loads at most. Windows end there.

    tokens: of the request; where a group has a window, the last token is computed. aligned: a state exists only after a
    multiple of so many tokens; 0: after any token. most: limit of the request; None: its end.
    """
    found = tokens if most is None else min(tokens, most)
    if any(group.window for group in groups):
        found -= 1
    steps = [aligned] if aligned else []
    if most is not None:  # by whole chunks
        steps += [group.tokens for group in groups]
    return found - found % lcm(*steps)


def unsupported(spec: Any) -> set[str]:
    """Names of the page kinds in a group that raykv can't share: not KV that depends on the earlier tokens alone."""
    return {type(layer).__name__ for layer in _layers(spec)}.difference(SUPPORTED)


def is_latent(spec: Any) -> bool:
    """Whether every tensor-parallel rank has the same pages."""
    return all(isinstance(layer, MLAAttentionSpec) for layer in _layers(spec))


def _layers(spec: Any) -> Iterable[Any]:
    """The specs of a group's layers: each layer's where they differ, else the common one."""
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def blocks_within(spec: Any) -> int:
    """How many blocks a chunk may have at most; 0: any number. A longer chunk would exceed a window or a state.

    vLLM frees the blocks before a window while the next chunk is being filled.
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
    """Text that tells these groups from those of the same model with other options. groups: vLLM's."""
    return ";".join(
        f"{type(group.kv_cache_spec).__name__},{group.kv_cache_spec.block_size},{_window(group.kv_cache_spec)},"
        f"{','.join(group.layer_names)}"
        for group in groups
    )
