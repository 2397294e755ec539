"""Hugging Face transformers on a pool: a prefill that reads blocks of the pool and stores the missing blocks.

    cache = model_cache(raykv.attach(), model, name="meta-llama/Llama-3.1-8B")
    tokens = generate(model, cache, tokenizer(prompt).input_ids, max_new_tokens=100)  # as model.generate

or, for a decoding loop of your own:

    start = prefill(model, cache, tokenizer(prompt).input_ids)
    token = start.logits.argmax()  # feed it to the model with past_key_values=start.past_key_values

Don't pass start.past_key_values to `model.generate` with the same prompt: the cache already holds the whole prompt, and
transformers would feed the prompt a second time. `generate` above avoids that.

A block is a contiguous array of the model's dtype: (layers, 2, kv_heads, block_tokens, head_dim). The second axis has
the keys, then the values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raykv.system.extras import to_install

try:
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer
except ImportError as error:
    raise ImportError(f"this needs torch and transformers: {to_install('transformers')}") from error

from raykv.client.cache import KVCache
from raykv.client.pool import KVPool

Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Prefill:
    """A prompt that the model has seen.

    past_key_values: KV of the whole prompt, batch size 1; continue with the token after the prompt.
    logits: (vocab,), for the prompt's last position.
    pool_tokens: number of leading tokens that came from the pool instead of being computed.
    nodes: Ray ids of the nodes that had these tokens' blocks, in order, without repeats; () if pool_tokens is 0.
    """

    past_key_values: DynamicCache
    logits: torch.Tensor
    pool_tokens: int
    nodes: tuple[str, ...]


class PromptCache(DynamicCache):  # type: ignore[misc]
    """KV of a whole prompt. Rejects a repeat of the prompt, which the model would treat as a continuation."""

    prompt_tokens = 0  # number of tokens in this cache after `prefill`

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Like `DynamicCache.update`. Raises ValueError if the first continuation repeats the prompt."""
        if layer_idx == 0 and self._repeats_prompt(value_states):
            raise ValueError(
                f"the {self.prompt_tokens} tokens of the prompt were given to the model a second time, with a cache "
                f"that holds them already: use raykv.integrations.transformers.generate(model, cache, input_ids, ...) "
                f"instead of model.generate(input_ids, past_key_values=...), or go on with the token after the prompt"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _repeats_prompt(self, values: torch.Tensor) -> bool:
        """Compare the first layer's values: in a rotary model they depend only on the tokens, not on their positions.

        A prompt of one token is not checked, as the same token may follow it.
        """
        if not 1 < self.prompt_tokens == self.get_seq_length() == values.shape[-2]:
            return False
        old, new = self.layers[0].values.float(), values.float()
        return old.shape == new.shape and torch.allclose(old, new, rtol=0.05, atol=0.05 * float(old.abs().max()))


def model_cache(
    pool: KVPool,
    model: Any,
    *,
    name: str | None = None,
    revision: str | None = None,
    block_tokens: int = 16,
    tenant: str = "",
) -> KVCache:
    """Return the cache of `pool` that engines with this model share.

    pool: from raykv.start or raykv.attach. model: a causal language model of transformers, on one device, with full
    attention in every layer. block_tokens: number of tokens per block, equal in all engines that share blocks.
    name, revision: must distinguish this model's weights and settings from those of any other model. By default, name
    is the place from which the model was loaded, and revision is its commit on the hub.
    tenant: the tenant that is charged for the blocks (see KVPool.cache).
    The other arguments of the cache come from the model.
    Raises ValueError for a model without a name, or with a layer that is not full attention.
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
        tenant=tenant,
    )


def block_shape(config: Any, block_tokens: int) -> Shape:
    """Return the shape of a block. Raises ValueError if a layer is not full attention."""
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
    """Run `model` over a prompt, except over the leading blocks that the pool has, and store the new full blocks.

    model: a causal language model. cache: from `model_cache` for this model.
    input_ids: 1-D, at least one token. The last token is always computed, for its logits.
    lora: the active adapter, if any. salt: separates this request's tenant from other tenants (see KVCache.keys).
    Returns a Prefill. If the pool is down or empty, this is an ordinary prefill.
    Raises ValueError for input that is not 1-D, or if the cache's blocks have another size than the model's.
    To generate with `model.generate`, use `generate` of this module instead.
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
    past.prompt_tokens = len(ids)
    return Prefill(past, out.logits[0, -1], known, nodes)


def generate(
    model: Any,
    cache: KVCache,
    input_ids: Sequence[int] | torch.Tensor,
    *,
    lora: str | None = None,
    salt: str | None = None,
    **generate_kwargs: Any,
) -> Any:
    """Like `model.generate(input_ids, **generate_kwargs)`, but reads the prompt's blocks from the pool.

    input_ids: 1-D, at least one token. lora, salt: see `prefill`. generate_kwargs: arguments of `model.generate`.
    Returns the result of `model.generate`: by default the tokens of prompt and answer, (1, tokens) int64.
    Raises the errors of `prefill`, and ValueError if num_beams or num_return_sequences is above 1.
    """
    config = generate_kwargs.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        count = generate_kwargs.get(name, getattr(config, name, None)) or 1
        if count > 1:
            raise ValueError(f"{name}={count}: the pool's prefill is of one sequence; leave it out, or at 1")
    past = prefill(model, cache, input_ids, lora=lora, salt=salt).past_key_values
    past.crop(-1)  # `generate` begins with the logits of the prompt's last token, so it computes that token again
    ids = torch.as_tensor(input_ids)[None].to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=past, **generate_kwargs)


def restore(blocks: torch.Tensor, shape: Shape, model: Any) -> PromptCache:
    """Return a cache that holds the given blocks.

    blocks: (n, block_bytes) uint8 on the model's device; n may be 0. shape: from `block_shape`.
    """
    past = PromptCache(config=model.config)
    if not len(blocks):
        return past
    # a view (layers, 2, 1, kv_heads, n, block_tokens, head_dim): memory is still in the order of the blocks
    tensors = blocks.view(model.dtype).view(len(blocks), *shape)[None].permute(2, 3, 0, 4, 1, 5, 6)
    for layer, (keys, values) in zip(past.layers, tensors, strict=True):
        keys, values = keys.flatten(2, 3), values.flatten(2, 3)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values  # `update` would copy them once more
    return past


def extract(past: DynamicCache, shape: Shape, start: int, stop: int) -> torch.Tensor:
    """Copy blocks `start` to `stop` of a cache to host memory: (stop - start, block_bytes) uint8.

    past: KV of a prompt of at least `stop` blocks, batch size 1. shape: from `block_shape`. Raises ValueError if a
    layer has another shape.
    """
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
