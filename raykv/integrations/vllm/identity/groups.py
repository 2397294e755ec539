"""The KV cache groups of a model: layers whose chunks are looked up, stored and evicted together.

A full-attention layer reads every chunk of a prefix, and a sliding-window layer the last chunks. A layer with a state
(Mamba, gated delta nets, short convolutions) reads only the last chunk. So each group is its own cache in the pool.
vLLM asks for a chunk of a group by its hash and the index of the group.
"""

from __future__ import annotations

from collections import Counter
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


class Layers(NamedTuple):
    """Layers whose pages make chunks of their own: in a vLLM group, the target's layers or the drafter's.

    group: index among vLLM's offloaded groups.
    """

    group: int
    of_drafter: bool = False


class Group(NamedTuple):
    """group_idx: vLLM's index in keys. place: index among the engine's Layers.

    tokens: of a chunk. window: how many last chunks of a prefix are read; 0: all. ahead: how many chunks after the
    prefix vLLM asks for and then drops, as a drafter's KV of a chunk depends on the token after the chunk.
    """

    group_idx: int
    place: int
    tokens: int
    window: int
    ahead: int = 0
    of_drafter: bool = False


def first_parts(drafters: Iterable[bool], ranks: Iterable[Sequence[int]]) -> list[int]:
    """For each place, the argument `part` of `KVPool.cache` for part 0 of its chunks.

    For part n the argument is n more.
    drafters: for each place, whether it is a drafter's. ranks: by rank, its parts of a chunk. The target's places and
    the drafter's places are counted apart, as vLLM may put a drafter's group between the target's groups. So the
    arguments of the target's places do not depend on a drafter.
    """
    parts, counts, found = 1 + max(map(max, ranks)), Counter[bool](), []
    for of_drafter in drafters:
        found.append(counts[of_drafter] * parts)
        counts[of_drafter] += 1
    return found


def groups_of(configs: Sequence[Any], layers: Sequence[Layers] = ()) -> list[Group]:
    """The groups of an engine's layers: groups that read all chunks come first.

    configs: vLLM's `kv_group_configs`. layers: by place; if empty, one for each of vLLM's groups.
    """
    found = [
        Group(
            configs[of.group].group_idx,
            place,
            configs[of.group].tokens_per_chunk,
            configs[of.group].sliding_window_size_in_chunks or 0,
            int(configs[of.group].is_eagle_group),
            of.of_drafter,
        )
        for place, of in enumerate(layers or map(Layers, range(len(configs))))
    ]
    return sorted(found, key=lambda group: group.window > 0)


def loadable(tokens: int, groups: Sequence[Group], aligned: int, most: int | None) -> int:
    """How many leading tokens of a request vLLM's scheduler loads at most. Windows end with the last of these tokens.

    tokens: of the request; where a group has a window, the last token is computed. aligned: a state exists only after a
    multiple of so many tokens; 0: after any token. most: the request's own limit; None: no limit.
    """
    found = tokens if most is None else min(tokens, most)
    if any(group.window for group in groups):
        found -= 1
    steps = [aligned] if aligned else []
    if most is not None:  # by whole chunks
        steps += [group.tokens for group in groups]
    return found - found % lcm(*steps)


def unsupported(spec: Any) -> set[str]:
    """Names of a group's kinds of pages that raykv can't share: they depend on more than the earlier tokens."""
    return {type(layer).__name__ for layer in _layers(spec)}.difference(SUPPORTED)


def is_latent(spec: Any) -> bool:
    """Whether every tensor-parallel rank has the same pages."""
    return all(isinstance(layer, MLAAttentionSpec) for layer in _layers(spec))


def in_strides(spec: Any) -> bool:
    """Whether decode context parallelism gives each rank some of the tokens, in all layers and with all bytes."""
    return all(
        getattr(layer, "dcp_sharded", True) and getattr(layer, "max_tp_shards", 1) == 1  # 0.30 has neither attribute
        for layer in _layers(spec)
    )


def _layers(spec: Any) -> Iterable[Any]:
    """The specs of a group's layers; if all layers have the same spec, only this spec."""
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def blocks_within(spec: Any) -> int:
    """How many blocks a chunk may have at most; 0: any number. A longer chunk would exceed a window, or span states.

    Such a chunk would be incomplete: while it is filled, vLLM frees the blocks before the window.
    """
    if isinstance(spec, MambaSpec):
        return 1
    if isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)):
        blocks: int = _window(spec) // spec.block_size
        return max(1, blocks)
    return 0


def _window(spec: Any) -> int:
    """How many last tokens a group reads; 0: all tokens, or a state instead of tokens."""
    tokens: int = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    return tokens


def names(groups: Sequence[tuple[Any, Sequence[str]]]) -> str:
    """Text that differs if an engine's options divide the layers of one model into other groups.

    groups: for each group, vLLM's spec and the names of the layers.
    """
    return ";".join(
        f"{type(spec).__name__},{spec.block_size},{_window(spec)},{','.join(layers)}" for spec, layers in groups
    )
