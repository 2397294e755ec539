"""All settings that change KV enter the keys: engines share blocks if and only if these settings are equal.

Keys are made as the connector makes them, from vLLM's configuration of an engine and its hashes of requests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

import torch
from transformers import LlamaConfig, Phi3Config, Qwen3MoeConfig
from vllm import SamplingParams
from vllm.config import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from raykv.integrations.vllm.configuration import identify
from raykv.integrations.vllm.connector import kv_transfer_config
from raykv.integrations.vllm.identity.identity import _options_digest
from raykv.integrations.vllm.identity.weights import Weights
from raykv.integrations.vllm.worker.loads import digest_of, files_of
from raykv.keys import rekey, root

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 500}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
BLOCK = 32  # tokens
HASH = get_hash_fn_by_name("sha256")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    llama = LlamaConfig(**SIZES, **HEADS, max_position_embeddings=4096, architectures=["LlamaForCausalLM"])
    for name in ("llama", "tuned"):
        llama.save_pretrained(folder / name)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "architectures": ["Qwen3MoeForCausalLM"]}
    Qwen3MoeConfig(**SIZES, **HEADS, **experts, max_position_embeddings=4096).save_pretrained(folder / "experts")
    factors = {"long_factor": [4.0] * 32, "short_factor": [1.0] * 32, "type": "longrope"}
    lengths = {"max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
    phi = Phi3Config(**SIZES, **HEADS, **lengths, rope_scaling=factors, pad_token_id=0)
    phi.architectures = ["Phi3ForCausalLM"]
    phi.save_pretrained(folder / "phi")
    return folder


def key(models: Path, extra: dict[str, Any] | None = None, model: str = "llama", **options: Any) -> str:
    """The root of all keys of the target's layers. extra: for the connector's configuration. options: vLLM's."""
    return names(models, extra, model, **options)[0]


def names(
    models: Path, extra: dict[str, Any] | None = None, model: str = "llama", **options: Any
) -> tuple[str, str | None]:
    """(root of the keys of the target's layers, root of those of the drafter's layers)."""
    transfer = kv_transfer_config()
    transfer["kv_connector_extra_config"].update(extra or {})
    defaults = {"dtype": "float32", "load_format": "dummy", "enforce_eager": True, "block_size": BLOCK}
    defaults |= {"model": str(models / model), "skip_tokenizer_init": True, "kv_transfer_config": transfer}
    config = EngineArgs(**(defaults | options)).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"  # in an engine the workers tell it
    tensor, dtype = config.parallel_config.tensor_parallel_size, config.model_config.dtype
    if config.cache_config.cache_dtype == "fp8":
        dtype = torch.uint8
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size, num_kv_heads=4 // tensor, head_size=64, dtype=dtype
    )
    layers = {f"model.layers.{layer}.self_attn.attn": spec for layer in range(4)}
    if "speculative_config" in options:
        layers |= {DRAFT_LAYERS[options["speculative_config"]["method"]]: spec}
    caches = get_kv_cache_configs(config, [layers] * tensor, [1 << 30] * tensor)[0]
    identify(config, caches)
    found = config.kv_transfer_config.kv_connector_extra_config
    blocks, parts = found["blocks_per_chunk"], len(found["parts"][0])

    def of(cache: dict[str, Any], layers: int) -> str:
        name = cache | {"revision": cache["revision"] + Weights(found.get("weights")).name}
        size = layers * spec.page_size_bytes * blocks // parts
        return root(b"secret", **name, block_tokens=blocks * spec.block_size, block_bytes=size, part=0).hex()

    return of(found["cache"], 4), of(found["drafter"], 1) if "drafter" in found else None


APART: dict[str, dict[str, Any]] = {
    "model": {"model": "tuned"},
    "revision": {"revision": "of May"},
    "code_revision": {"code_revision": "of May"},
    "model_impl": {"model_impl": "transformers"},
    "load_format": {"load_format": "auto"},
    "model_loader_extra_config": {"model_loader_extra_config": {"qlora_adapter_name_or_path": "x"}},
    "dtype": {"dtype": "bfloat16"},
    "quantization": {"quantization": "fp8_per_block", "dtype": "bfloat16"},
    "quantization_config": {"quantization_config": {"linear": {"weight": "fp8_per_tensor_static"}}},
    "rope": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}},
    "scaled rope": {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
    "kv_cache_dtype_skip_layers": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
    "other skipped layers": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]},
    "mamba_cache_dtype": {"mamba_cache_dtype": "float16"},
    "block_size": {"block_size": 64},
    "blocks_per_chunk": {"extra": {"blocks_per_chunk": 2}},
    "prefix_caching_hash_algo": {"prefix_caching_hash_algo": "sha256_cbor"},
    "attention_backend": {"attention_backend": "TORCH_SDPA"},
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "pipeline_parallel_size": {"pipeline_parallel_size": 2},
    "canonical_layout": {"extra": {"canonical_layout": True}},
}
ALIKE: dict[str, dict[str, Any]] = {
    "tokenizer": {"tokenizer": "another"},
    "served_model_name": {"served_model_name": "another"},
    "seed": {"seed": 5},
    "max_model_len": {"max_model_len": 1000},
    "sizes of batches": {"max_num_seqs": 3, "max_num_batched_tokens": 4096},
    "memory": {"kv_cache_memory_bytes": 1 << 26},
    "kv_role": {"kv_transfer_config": kv_transfer_config(role="kv_consumer")},
}


def test_engines_that_differ_in_what_changes_kv_share_nothing(models: Path, tmp_path: Path) -> None:
    found = {name: key(models, **options) for name, options in APART.items()}
    (tmp_path / "weights").write_text("step 1")
    found |= {"weights": key(models, {"weights": str(tmp_path / "weights")}), "": key(models)}
    same = {value: [name for name in found if found[name] == value] for value in found.values()}
    assert [names for names in same.values() if len(names) > 1] == []


@pytest.mark.parametrize("options", ALIKE.values(), ids=ALIKE)
def test_engines_that_differ_in_nothing_else_share(models: Path, options: dict[str, Any]) -> None:
    assert key(models, **options) == key(models)


def test_sizes_of_engines_share_where_the_layout_is_canonical(models: Path) -> None:
    canonical = {"canonical_layout": True}
    assert key(models, canonical) == key(models, canonical, tensor_parallel_size=2)


def test_where_positions_depend_on_the_longest_sequence_it_is_in_the_key(models: Path) -> None:
    """If the longest sequence exceeds the original one, vLLM computes all positions by the long factors."""
    found = {key(models, model="phi", max_model_len=length) for length in (512, 2048)}
    assert len(found) == 2


DRAFT_LAYERS = {
    "draft_model": "draft_model.model.layers.0.self_attn.attn",
    "eagle": "model.layers.4.self_attn.attn",
    "ngram": "model.layers.3.self_attn.attn",  # ngram has no drafter
}


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 2},
        {"data_parallel_size": 4, "data_parallel_rank": 3},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=["size", "rank", "experts"],
)
def test_data_and_expert_parallel_change_no_key(models: Path, options: dict[str, Any]) -> None:
    assert key(models, model="experts", **options) == key(models, model="experts")


def test_engines_share_the_layers_of_the_target_and_drafters_of_one_kind_their_own(models: Path) -> None:
    def found(method: str = "draft_model", model: str = "tuned", **options: Any) -> tuple[str, str | None]:
        speculative = {"method": method, "model": str(models / model), "num_speculative_tokens": 3} | options
        return names(models, speculative_config=speculative)

    alike = found(), found(num_speculative_tokens=5)
    apart = (
        *(found(), found("eagle"), found(model="llama"), found(revision="of May")),
        *(found(draft_load_config={"load_format": "auto"}), found("eagle", disable_eagle_block_drop=True)),
    )
    assert {target for target, _ in (*alike, *apart)} == {key(models)}
    assert alike[0] == alike[1]
    assert len({drafter for _, drafter in apart}) == len(apart)


def test_a_drafter_without_layers_changes_no_key(models: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    assert names(models, speculative_config=ngram) == (key(models), None)


def test_what_vllm_sets_itself_is_in_the_key(models: Path) -> None:
    """These are options of a model's encoder, and the kind of states, which a CPU overrides."""
    engine = EngineArgs(model=str(models / "llama"), skip_tokenizer_init=True, load_format="dummy")
    config, digests = engine.create_engine_config(), set()
    for state in ("float16", "bfloat16"):
        config.cache_config.mamba_ssm_cache_dtype = state
        digests.add(_options_digest(config))
    pruned: dict[str, Any] = {"video_pruning_rate": 0.5}
    encoder: list[dict[str, Any]] = [{}, pruned, pruned | {"video_pruning_method": "vidcom2"}]
    encoder += [{"mm_encoder_attn_dtype": "fp8"}, {"mm_processor_kwargs": {"num_crops": 4}}]
    video = {"num_frames": 40, "fps": 1}
    encoder += [{"media_io_kwargs": {"video": video}}, {"media_io_kwargs": {"video": video | {"fps": 2}}}]
    for options in encoder:
        config.model_config.multimodal_config = MultiModalConfig(**options)
        digests.add(_options_digest(config))
    assert len(digests) == 9
    again: dict[str, Any] = {"device": "cuda", "fps": 2, "num_frames": 40}
    config.model_config.multimodal_config = MultiModalConfig(media_io_kwargs={"video": again})
    assert _options_digest(config) in digests, "in another order, and decoded on another device"


# ---------------------------------------------------------------------- what a request brings


def image(identifier: str, offset: int = 40) -> MultiModalFeatureSpec:
    where = PlaceholderRange(offset=offset, length=30)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=where)


def keys(extra: bytes = b"", **options: Any) -> list[bytes]:
    """Keys of a prompt's first four blocks, as the manager makes them from vLLM's hashes. extra: an adapter's."""
    init_none_hash(HASH)
    prompt: Any = None if "prompt_embeds" in options else [7] * 4 * BLOCK
    hasher = get_request_block_hasher(BLOCK, HASH)
    asked = Request("r", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher, **options)
    return [row.tobytes() for row in rekey(b"root" * 8, [value + extra for value in asked.block_hashes])]


def trained(folder: Path, number: int, weights: str) -> list[bytes]:
    """Keys of a request for an adapter that has the folder's name and these weights."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "adapter_model.bin").write_text(weights)
    digest = digest_of(files_of(str(folder)))
    assert digest
    return keys(digest, lora_request=LoRARequest(folder.name, number, str(folder)))


embeds = partial(torch.full, (4 * BLOCK, 8))


def test_requests_that_differ_in_what_changes_kv_share_nothing(tmp_path: Path) -> None:
    found = [
        keys(),
        keys(cache_salt="a"),
        keys(cache_salt="b"),
        trained(tmp_path / "one" / "x", 1, "of one"),
        trained(tmp_path / "one" / "y", 2, "of one"),
        trained(tmp_path / "two" / "x", 1, "of two"),
        trained(tmp_path / "x", 3, "first"),
        trained(tmp_path / "x", 4, "trained again"),
        keys(prompt_embeds=embeds(1.0)),
        keys(prompt_embeds=embeds(2.0)),
    ]
    every = np.array([[bytes(one) for one in of_one] for of_one in found])
    assert every.shape == (len(found), 4) and len(np.unique(every)) == every.size


def test_an_image_changes_the_blocks_that_it_touches_and_those_after_them() -> None:
    without = keys()
    others = [keys(mm_features=[one]) for one in (image("a"), image("b"), image("a", offset=41))]
    assert all(other[0] == without[0] for other in others)
    assert len({*without, *(one for other in others for one in other)}) == 4 + 3 * 3
    two = keys(mm_features=[image("a"), replace(image("b"), mm_position=PlaceholderRange(offset=100, length=5))])
    assert two[:3] == others[0][:3] and two[3] != others[0][3]


def test_prompt_embeddings_change_the_blocks_from_where_they_differ() -> None:
    one, other = embeds(1.0), embeds(1.0)
    other[2 * BLOCK + 3] = 5.0
    first, second = keys(prompt_embeds=one), keys(prompt_embeds=other)
    assert first[:2] == second[:2] and not {*first[2:]} & {*second[2:]}
