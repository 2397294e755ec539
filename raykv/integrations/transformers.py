"""Hugging Face transformers on a pool: prefill that reads what is known and stores what is new.

    cache = model_cache(raykv.attach(), model, name="meta-llama/Llama-3.1-8B")
    start = prefill(model, cache, tokenizer(prompt).input_ids)
    token = start.logits.argmax()  # go on from start.past_key_values

A block is (layers, 2, kv_heads, block_tokens, head_dim) of the model's dtype, contiguous; the 2 are keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

try:
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer
except ImportError as error:
    raise ImportError("this needs torch and transformers: pip install 'raykv[transformers]'") from error

if TYPE_CHECKING:
    from raykv.client.cache import KVCache
    from raykv.client.pool import KVPool

Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Prefill:
    """A prompt that the model has seen.

    past_key_values: of the whole prompt; batch 1.
    logits: (vocab,), of the prompt's last position.
    pool_tokens: leading tokens that came from the pool instead of being computed.
    nodes: Ray node ids that those were on, in order, each once; empty if there were none.
    """

    past_key_values: DynamicCache
    logits: torch.Tensor
    pool_tokens: int
    nodes: tuple[str, ...]


def model_cache(
    pool: KVPool, model: Any, *, name: str | None = None, revision: str | None = None, block_tokens: int = 16
) -> KVCache:
    """The cache of `pool` that engines with this model share.

    model: a causal language model of transformers, on one device, with full attention in every layer.
    name, revision: must tell this model's weights and settings from any other's. Default: where it was loaded from, and
        the commit that the hub named.
    Raises ValueError for a model without a name, or one whose layers keep anything but full attention.
    """
    name = name or model.config.name_or_path
    if not name:
        raise ValueError("the model was not loaded from anywhere: give name=, the same for equal weights only")
    shape = block_shape(model.config, block_tokens)
    return pool.cache(
        model=name,
        revision=revision or getattr(model.config, "_commit_hash", None) or "",
        block_tokens=block_tokens,
        block_bytes=math.prod(shape) * model.dtype.itemsize,
        dtype=str(model.dtype).removeprefix("torch."),
        layout="transformers/layers,2,kv_heads,tokens,head_dim=" + ",".join(map(str, shape)),
    )


def block_shape(config: Any, block_tokens: int) -> Shape:
    """(layers, 2, kv_heads, block_tokens, head_dim) of a model's blocks. ValueError for layers of another kind."""
    text = config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if kinds != {DynamicLayer}:
        odd = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer}))
        raise ValueError(f"this model's cache has layers of {odd}: only full attention in every layer can be pooled")
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, 2, kv_heads, block_tokens, head_dim


def prefill(
    model: Any,
    cache: KVCache,
    input_ids: Sequence[int] | torch.Tensor,
    *,
    lora: str | None = None,
    salt: str | None = None,
) -> Prefill:
    """Run `model` over a prompt, except over the leading blocks that the pool has; store the new full blocks.

    input_ids: 1-D, at least one token. At least the last is always computed: its logits are wanted.
    lora: the active adapter, if any. salt: what tells this request's tenant from others (see KVCache.keys).
    A pool that is down or empty makes this an ordinary prefill. Raises ValueError for input that is not 1-D, or a cache
    whose blocks are not this model's.
    """
    ids = torch.as_tensor(input_ids)
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"input_ids are of shape {tuple(ids.shape)}: give one prompt, 1-D, of at least one token")
    shape = block_shape(model.config, cache.block_tokens)
    block_bytes = math.prod(shape) * model.dtype.itemsize
    if block_bytes != cache.block_bytes:
        raise ValueError(f"the cache has blocks of {cache.block_bytes} bytes, this model of {block_bytes}")
    keys = cache.keys(ids, lora=lora, salt=salt)
    with cache.match(keys[: (len(ids) - 1) // cache.block_tokens]) as match:
        blocks = torch.empty((match.num_blocks, block_bytes), dtype=torch.uint8)
        found = match.read(blocks) if match.num_blocks else 0
        nodes = tuple(match.nodes) if found else ()
    past = restore(blocks[:found].to(model.device), shape, model)
    known = found * cache.block_tokens
    with torch.no_grad():
        out = model(ids[None, known:].to(model.device), past_key_values=past, use_cache=True, logits_to_keep=1)
    if found < len(keys):
        cache.store(keys, extract(past, shape, found, len(keys)), start=found)
    return Prefill(past, out.logits[0, -1], known, nodes)


def restore(blocks: torch.Tensor, shape: Shape, model: Any) -> DynamicCache:
    """A cache that holds `blocks`, (n, block_bytes) uint8 on the model's device; n may be 0."""
    past = DynamicCache(config=model.config)
    if not len(blocks):
        return past
    # (layers, 2, 1, kv_heads, n, block_tokens, head_dim), still in the order of the blocks
    tensors = blocks.view(model.dtype).view(len(blocks), *shape)[None].permute(2, 3, 0, 4, 1, 5, 6)
    for layer, (keys, values) in zip(past.layers, tensors, strict=True):
        keys, values = keys.flatten(2, 3), values.flatten(2, 3)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values  # `update` would copy them once more
    return past


def extract(past: DynamicCache, shape: Shape, start: int, stop: int) -> torch.Tensor:
    """Blocks `start` to `stop` of a cache, in host memory: (stop - start, block_bytes) uint8."""
    _, _, kv_heads, block_tokens, head_dim = shape
    count = stop - start
    dtype = past.layers[0].keys.dtype
    blocks = torch.empty((count, *shape), dtype=dtype, device=past.layers[0].keys.device)
    for index, layer in enumerate(past.layers):
        for part, tensor in enumerate((layer.keys, layer.values)):
            if tensor.shape[:2] + tensor.shape[3:] != (1, kv_heads, head_dim):
                raise ValueError(f"layer {index} keeps {tuple(tensor.shape)}, not (1, {kv_heads}, tokens, {head_dim})")
            run = tensor[0, :, start * block_tokens : stop * block_tokens]
            blocks[:, index, part] = run.unflatten(1, (count, block_tokens)).transpose(0, 1)
    return blocks.view(torch.uint8).flatten(1).cpu()
