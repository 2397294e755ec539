"""The KV cache groups of a model: layers whose chunks are looked up, stored and evicted together.

A full-attention layer reads every chunk of a prefix. A sliding-window layer reads the last chunks. A layer with a state
(Mamba, gated delta nets, short convolutions) reads only the last chunk. So each group has its own cache in the pool.
vLLM asks for a chunk by the chunk's hash and the index of its group.
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

SUPPORTED = (  # by name, as a subclass may behave differently
    *("FullAttentionSpec", "SinkFullAttentionSpec", "MLAAttentionSpec"),
    *("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "MambaSpec"),
)


class Layers(NamedTuple):
    """Layers that share chunks: the target's layers or the drafter's layers of one vLLM group.

    group: index among vLLM's offloaded groups.
    """

    group: int
    of_drafter: bool = False


class Group(NamedTuple):
    """A group of layers. group_idx: vLLM's index in keys. place: index among the engine's Layers.

    tokens: number of tokens per chunk. window: number of last chunks of a prefix that are read; 0: all chunks. ahead:
    number of chunks after the prefix that vLLM asks for and then drops, as a drafter's KV of a chunk depends on the
    token after the chunk.
    """

    group_idx: int
    place: int
    tokens: int
    window: int
    ahead: int = 0
    of_drafter: bool = False


def first_parts(drafters: Iterable[bool], ranks: Iterable[Sequence[int]]) -> list[int]:
    """Return, by place, the argument `part` of `KVPool.cache` for part 0 of a chunk. For part n, add n.

    drafters: whether each place is a drafter's. ranks: each rank's parts of a chunk. The target's places and the
    drafter's places are counted separately, as vLLM may put a drafter's group between the target's groups. So the
    arguments of the target's places do not depend on a drafter.
    """
    parts, counts, found = 1 + max(map(max, ranks)), Counter[bool](), []
    for of_drafter in drafters:
        found.append(counts[of_drafter] * parts)
        counts[of_drafter] += 1
    return found


def groups_of(configs: Sequence[Any], layers: Sequence[Layers] = ()) -> list[Group]:
    """Return the groups of an engine's layers. Groups that read all chunks come first.

    configs: vLLM's `kv_group_configs`. layers: the engine's Layers by place; if empty, one for each of vLLM's groups.
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
    """Return how many leading tokens of a request vLLM's scheduler may load. Windows end with the last of these tokens.

    tokens: number of the request's tokens; if a group has a window, the last token is computed. aligned: states exist
    only after multiples of this number of tokens; 0: after any token. most: the request's own limit; None: no limit.
    """
    found = tokens if most is None else min(tokens, most)
    if any(group.window for group in groups):
        found -= 1
    steps = [aligned] if aligned else []
    if most is not None:  # whole chunks only
        steps += [group.tokens for group in groups]
    return found - found % lcm(*steps)


def unsupported(spec: Any) -> set[str]:
    """Return the kinds of a group's pages that raykv can't share, as they depend on more than the earlier tokens."""
    return {type(layer).__name__ for layer in _layers(spec)}.difference(SUPPORTED)


def is_latent(spec: Any) -> bool:
    """Whether every tensor-parallel rank has the same pages."""
    return all(isinstance(layer, MLAAttentionSpec) for layer in _layers(spec))


def in_strides(spec: Any) -> bool:
    """Whether decode context parallelism gives each rank all bytes of some of the tokens, in all layers."""
    return all(
        getattr(layer, "dcp_sharded", True) and getattr(layer, "max_tp_shards", 1) == 1  # 0.30 has neither attribute
        for layer in _layers(spec)
    )


def _layers(spec: Any) -> Iterable[Any]:
    """Return the specs of a group's layers. If all layers have the same spec, returns only this spec."""
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def blocks_within(spec: Any) -> int:
    """Return the maximum number of blocks per chunk, or 0 for no maximum.

    A longer chunk would exceed a window, or span states. It would never be complete, as vLLM frees the blocks before
    the window while the chunk is being filled.
    """
    if isinstance(spec, MambaSpec):
        return 1
    if isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)):
        blocks: int = _window(spec) // spec.block_size
        return max(1, blocks)
    return 0


def _window(spec: Any) -> int:
    """Return how many last tokens a group reads; 0: all tokens, or a state instead of tokens."""
    tokens: int = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    return tokens


def names(groups: Sequence[tuple[Any, Sequence[str]]]) -> str:
    """Return a text that identifies how an engine divides the layers of its model into groups.

    groups: for each group, vLLM's spec and the names of the layers.
    """
    return ";".join(
        f"{type(spec).__name__},{spec.block_size},{_window(spec)},{','.join(layers)}" for spec, layers in groups
    )
