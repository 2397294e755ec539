"""Which vLLM engines can use a pool. Other engines are refused at their start, or compute without the pool."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from raykv.integrations.vllm.compat import TAKES_GROUPS, check_version, knows_strides
from raykv.integrations.vllm.identity.drafters import has_drafter
from raykv.integrations.vllm.identity.groups import unsupported

WITHOUT = "or leave kv_transfer_config out"


def check(version: str, vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError if this engine can't use a pool. The error's text says which option to set."""
    check_version(version)
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash"):
        raise ValueError(
            f"prefix_caching_hash_algo={algorithm!r} is seeded in every process and can be made to collide, so engines "
            f"can't share by it: set prefix_caching_hash_algo to 'sha256', or 'sha256_cbor' across Python versions"
        )
    check_hashes(vllm_config)
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "nnodes"):
        if getattr(parallel, name) > 1:
            raise ValueError(f"{name}={getattr(parallel, name)} is not supported by raykv: set it to 1, {WITHOUT}")
    if has_drafter(vllm_config):
        _check_drafter(vllm_config)
    strides = parallel.decode_context_parallel_size
    if strides > 1 and not knows_strides(version):
        raise ValueError(
            f"decode_context_parallel_size={strides} with a connector gives wrong tokens in vLLM {version}: install "
            f"0.30 or later, set decode_context_parallel_size to 1, {WITHOUT}"
        )
    canonical = vllm_config.kv_transfer_config.kv_connector_extra_config.get("canonical_layout")
    if canonical and strides > 1:
        raise ValueError(
            f"decode_context_parallel_size={strides} and canonical_layout: a rank has some tokens of a page, and the "
            f"canonical layout needs all: leave canonical_layout out or set decode_context_parallel_size to 1"
        )
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ValueError("this model keeps no KV of a prompt, as BERT and other encoders: leave kv_transfer_config out")
    if wrong := set().union(*(unsupported(group.kv_cache_spec) for group in groups)):
        raise ValueError(
            f"this model's KV cache has {', '.join(sorted(wrong))}, "
            f"which raykv can't reuse: leave kv_transfer_config out"
        )
    if len(groups) > 1 and not TAKES_GROUPS:
        raise ValueError(
            f"this model's KV cache has {len(groups)} groups, but vLLM {version} can't go on after a failed load: "
            f"install 0.30 or later, set disable_hybrid_kv_cache_manager=True if these are sliding windows, {WITHOUT}"
        )


def check_hashes(vllm_config: Any) -> None:
    """Raise ValueError if vLLM numbers images instead of hashing them.

    Different engines give the same number to different images.
    """
    images = vllm_config.model_config.multimodal_config
    if images is None or getattr(images, "language_model_only", False):
        return
    if not images.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "mm_processor_cache_gb=0 without vLLM's prefix cache: vLLM hashes no images then, so engines can't tell "
            "their images apart: set mm_processor_cache_gb above 0, or enable_prefix_caching to True"
        )


def _check_drafter(vllm_config: Any) -> None:
    """Raise ValueError if some rank lacks the drafter's layers, or if chunks are cut by the target's heads."""
    asked = f"speculative_config with method={vllm_config.speculative_config.method!r}"
    if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise ValueError(
            f"{asked} and pipeline_parallel_size={stages}: only the last stage has the drafter's layers, which raykv "
            f"does not support: set pipeline_parallel_size to 1, leave speculative_config out, {WITHOUT}"
        )
    if vllm_config.kv_transfer_config.kv_connector_extra_config.get("canonical_layout"):
        raise ValueError(
            f"{asked} and canonical_layout: a drafter's KV can't be cut by the target's heads: leave canonical_layout "
            f"or speculative_config out"
        )


def check_policy(vllm_config: Any) -> None:
    """Raise ValueError if vLLM would end a request after a failed load, as it does by default.

    Inside MultiConnector each connector has its own configuration, but the scheduler reads the outer configuration.
    """
    around = getattr(get_current_vllm_config_or_none(), "kv_transfer_config", None)
    if around is None or around is vllm_config.kv_transfer_config:
        return
    if (policy := around.kv_load_failure_policy) != "recompute":
        raise ValueError(
            f'kv_load_failure_policy={policy!r} beside "connectors": a request whose load fails would end with an '
            f'error: add "kv_load_failure_policy": "recompute" to the kv_transfer_config of MultiConnector itself'
        )


def why_computed(vllm_config: Any) -> str:
    """Return why vLLM can't continue from a cached prefix, or "" if it can.

    A user may turn vLLM's own prefix cache off and still use the pool.
    """
    model = vllm_config.model_config
    if vllm_config.cache_config.enable_prefix_caching:
        return ""
    if not model.is_prefix_caching_supported:
        return "vLLM can't reuse the KV of this model"
    if model.use_mla and current_platform.is_cpu():
        return "vLLM can't go on from a prefix of an MLA model on this CPU, and has turned its own prefix cache off"
    return ""
