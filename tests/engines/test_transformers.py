"""The transformers integration: KV comes out of blocks as it went in, and the model gives the same tokens."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig

from raykv import keys as raykv_keys
from raykv.integrations.transformers import block_shape, extract, generate, model_cache, prefill, restore
from raykv.system.extras import to_install

BLOCK = 4


class SizeClass:
    """A stand-in for a pool with one cache. A read gives at most `reads` blocks, as if others were lost."""

    node_id = "here"

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.num_blocks = 0
        self.reads = 1 << 30
        self.identity: dict[str, Any] = {}

    def cache(self, **identity: Any) -> Any:
        self.identity = identity
        self.block_tokens, self.block_bytes = identity["block_tokens"], identity["block_bytes"]
        return self

    def keys(self, token_ids: Any, **fields: Any) -> NDArray[np.uint8]:
        return raykv_keys.chain(raykv_keys.root(b"s"), token_ids, self.block_tokens, **fields)

    def match(self, keys: NDArray[np.uint8]) -> "SizeClass":
        self.wanted = [key.tobytes() for key in keys]
        hits = [key in self.blocks for key in self.wanted]
        self.num_blocks = hits.index(False) if False in hits else len(hits)
        self.nodes = ["here"]
        return self

    def __enter__(self) -> "SizeClass":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, out: torch.Tensor) -> int:
        assert out.shape == (self.num_blocks, self.block_bytes)
        out.fill_(0xFF)  # garbage where nothing is read
        for row, key in zip(out[: self.reads], self.wanted, strict=False):
            row.copy_(torch.frombuffer(bytearray(self.blocks[key]), dtype=torch.uint8))
        return min(self.reads, self.num_blocks)

    def store(self, keys: NDArray[np.uint8], blocks: torch.Tensor, start: int) -> int:
        assert blocks.shape == (len(keys) - start, self.block_bytes) and blocks.is_contiguous()
        for key, block in zip(keys[start:], blocks, strict=True):
            self.blocks[key.tobytes()] = block.numpy().tobytes()
        return len(blocks)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).to(request.param).eval()


@pytest.fixture
def cache(model: Any) -> Any:
    size_class: Any = SizeClass()
    return model_cache(size_class, model, name="tiny", block_tokens=BLOCK)


def plain(model: Any, ids: torch.Tensor, split: int = 0) -> tuple[torch.Tensor, DynamicCache]:
    """The model's answer without a pool. Prefill is cut in two at `split`, because float sums depend on the cut."""
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (ids[:split], ids[split:]):
            if len(part):
                out = model(part[None], past_key_values=past, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1], past


def same(one: DynamicCache, other: DynamicCache) -> bool:
    pairs = zip(one.layers, other.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


def prompt(length: int) -> torch.Tensor:
    return torch.arange(length) * 7 % 61


@pytest.mark.parametrize("length", [4, 5, 11, 16])
def test_extract_and_restore_round_trip(model: Any, length: int) -> None:
    _, past = plain(model, prompt(length))
    shape = block_shape(model.config, BLOCK)
    blocks = extract(past, shape, 0, length // BLOCK)
    assert blocks.dtype == torch.uint8 and blocks.is_contiguous()
    back = restore(blocks, shape, model)
    assert back.get_seq_length() == length // BLOCK * BLOCK
    for layer, original in zip(back.layers, past.layers, strict=True):
        assert torch.equal(layer.keys, original.keys[:, :, : length // BLOCK * BLOCK])
        assert torch.equal(layer.values, original.values[:, :, : length // BLOCK * BLOCK])
    assert torch.equal(extract(past, shape, 1, length // BLOCK), blocks[1:])


def test_a_block_is_laid_out_as_documented(model: Any) -> None:
    _, past = plain(model, prompt(12))
    shape = block_shape(model.config, BLOCK)
    assert shape == (3, 2, 2, BLOCK, 8)
    block = extract(past, shape, 1, 2)[0].view(model.dtype).view(shape)
    for layer in range(3):
        assert torch.equal(block[layer, 0], past.layers[layer].keys[0, :, 4:8])
        assert torch.equal(block[layer, 1], past.layers[layer].values[0, :, 4:8])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 18])
def test_a_warm_prefill_gives_the_logits_of_a_cold_one(model: Any, cache: Any, length: int) -> None:
    ids = prompt(length)
    logits, past = plain(model, ids)
    cold = prefill(model, cache, ids)
    assert (cold.pool_tokens, cold.nodes) == (0, ())
    assert torch.equal(cold.logits, logits) and same(cold.past_key_values, past)
    assert len(cache.blocks) == length // BLOCK  # the last block too, if it is full

    split = (length - 1) // BLOCK * BLOCK
    if split:
        past.crop(split)
    else:
        past = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(ids[None, split:], past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
    warm = prefill(model, cache, ids.tolist())
    assert (warm.pool_tokens, warm.nodes) == (split, ("here",) if split else ())
    assert torch.equal(warm.logits, logits) and same(warm.past_key_values, past)


def test_blocks_of_the_same_split_give_the_same_bits(model: Any, cache: Any) -> None:
    prefill(model, cache, prompt(12))
    warm = prefill(model, cache, prompt(18))
    logits, past = plain(model, prompt(18), split=12)
    assert warm.pool_tokens == 12
    assert torch.equal(warm.logits, logits) and same(warm.past_key_values, past)


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_a_short_read_is_a_shorter_hit(model: Any, cache: Any, reads: int) -> None:
    prefill(model, cache, prompt(reads * BLOCK)) if reads else None
    prefill(model, cache, prompt(18))
    cache.reads = reads
    short = prefill(model, cache, prompt(18))
    logits, past = plain(model, prompt(18), split=reads * BLOCK)
    assert (short.pool_tokens, short.nodes) == (reads * BLOCK, ("here",) if reads else ())
    assert torch.equal(short.logits, logits) and same(short.past_key_values, past)


def test_other_tenants_and_adapters_share_nothing(model: Any, cache: Any) -> None:
    prefill(model, cache, prompt(18), salt="a", lora="x")
    for fields in ({}, {"salt": "a"}, {"lora": "x"}, {"salt": "b", "lora": "x"}):
        assert prefill(model, cache, prompt(18), **fields).pool_tokens == 0
    assert prefill(model, cache, prompt(18), salt="a", lora="x").pool_tokens == 16


def test_generation_goes_on_from_a_restored_cache(model: Any, cache: Any) -> None:
    prefill(model, cache, prompt(12))
    start = prefill(model, cache, prompt(18))
    logits, past = plain(model, prompt(18), split=12)
    for _ in range(4):
        token = logits.argmax()
        with torch.no_grad():
            logits = model(token[None, None], past_key_values=past, use_cache=True).logits[0, -1]
            mine = model(token[None, None], past_key_values=start.past_key_values, use_cache=True).logits[0, -1]
        assert torch.equal(mine, logits)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 18])
def test_generate_gives_the_tokens_that_the_model_generates_alone(model: Any, cache: Any, length: int) -> None:
    ids, options = prompt(length), dict[str, Any](max_new_tokens=8, do_sample=False, pad_token_id=0)
    alone = model.generate(ids[None], attention_mask=torch.ones_like(ids[None]), **options)
    cold = generate(model, cache, ids, **options)
    assert len(cache.blocks) == length // BLOCK
    warm = generate(model, cache, ids.tolist(), **options)
    assert torch.equal(cold, alone) and torch.equal(warm, alone)


def test_generate_refuses_several_sequences(model: Any, cache: Any) -> None:
    for options in (dict[str, Any](num_beams=2), dict[str, Any](num_return_sequences=3, do_sample=True)):
        with pytest.raises(ValueError, match="of one sequence"):
            generate(model, cache, prompt(5), **options)


@pytest.mark.parametrize("warm", [False, True])
def test_a_prompt_that_is_given_to_a_model_twice_is_refused(model: Any, cache: Any, warm: bool) -> None:
    if warm:
        prefill(model, cache, prompt(18))
    start = prefill(model, cache, prompt(18))
    with pytest.raises(ValueError, match=r"use raykv\.integrations\.transformers\.generate"):
        model.generate(prompt(18)[None], past_key_values=start.past_key_values, max_new_tokens=2)


def test_a_continuation_as_long_as_the_prompt_is_no_repetition(model: Any, cache: Any) -> None:
    start, both = prefill(model, cache, prompt(8)), torch.cat([prompt(8), prompt(8).flip(0) + 1])[None]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(both)}
    alone = model.generate(both, **options)
    assert torch.equal(model.generate(both, past_key_values=start.past_key_values, **options), alone)


def test_a_models_cache_is_known_by_weights_layout_and_dtype(model: Any) -> None:
    size_class: Any = SizeClass()
    model_cache(size_class, model, name="tiny", revision="r1", block_tokens=8, tenant="team-a")
    assert size_class.identity == {
        "model": "tiny",
        "revision": "r1",
        "block_tokens": 8,
        "block_bytes": 3 * 2 * 2 * 8 * 8 * model.dtype.itemsize,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layout": "transformers/layers,2,kv_heads,tokens,head_dim=3,2,2,8,8",
        "tenant": "team-a",
    }
    with pytest.raises(ValueError, match="name="):
        model_cache(size_class, model)


def test_bad_input_is_refused(model: Any, cache: Any) -> None:
    for ids in ([], [[1, 2]]):
        with pytest.raises(ValueError, match="1-D"):
            prefill(model, cache, ids)  # type: ignore[arg-type]
    cache.block_bytes //= 2
    with pytest.raises(ValueError, match="bytes"):
        prefill(model, cache, prompt(5))
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        block_shape(MistralConfig(num_hidden_layers=2, sliding_window=8), BLOCK)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_the_extra_is_named_where_it_is_missing(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import raykv.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and to_install("transformers") in done.stderr
