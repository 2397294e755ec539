"""The names of an engine's caches in the pool. They cover everything that changes the bytes of KV, except tokens.

vLLM's block hashes and `adapters` cover the parts of a request that change KV: adapter, images, salt and prompt
embeddings. `KVPool.cache` covers the shape of a pool block: tokens, bytes, parts and groups.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

from raykv.integrations.digests import config_digest, digest
from raykv.integrations.vllm.identity.drafters import target_layers
from raykv.integrations.vllm.identity.groups import names

# options of vLLM that change KV or its layout, and are not in hf_config
OPTIONS = {
    "model_config": ("quantization_config", "code_revision", "model_impl", "model_class_overrides"),
    "cache_config": ("kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    "load_config": ("model_loader_extra_config",),  # some loaders find the weights or an adapter by this option
}
OF_IMAGES = ("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "video_pruning_rate", "video_pruning_method")
VIDEO_LOADER = "VLLM_VIDEO_LOADER_BACKEND"  # vLLM's variable that names a video loader; loaders choose different frames


def identity(vllm_config: Any, kv_cache_config: Any, parallel: str) -> dict[str, str]:
    """Return arguments of `KVPool.cache`. Engines share blocks of the target's layers if these arguments are equal.

    parallel: `name` of the engine's Cut (see `ranks`).
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    groups = target_layers(vllm_config, kv_cache_config.kv_cache_groups)
    return {
        "model": model.model,
        "revision": _revision(vllm_config),
        "dtype": f"{model.dtype}/{cache.cache_dtype}/{model.quantization or ''}".replace("torch.", ""),
        "layout": "/".join(
            (
                f"vllm-{vllm.__version__}",
                _processor(),
                str(vllm_config.attention_config.backend),
                str(cache.kv_cache_layout),
                # `sha256` pickles its input, and the bytes depend on the version of Python
                algorithm if algorithm == "sha256_cbor" else f"{algorithm}-{platform.python_version()}",
                str(cache.block_size),
                names(groups) if len(groups) > 1 else "",
            )
        ),
        "parallel": parallel,
    }


def encoder_identity(vllm_config: Any) -> dict[str, str]:
    """Return arguments of `KVPool.cache` for encoder outputs. Engines share outputs if these arguments are equal."""
    model = vllm_config.model_config
    return {
        "model": f"{model.model} encoder",  # metrics count outputs separately from the model's KV
        "revision": _revision(vllm_config),
        "dtype": f"{model.dtype}/{model.quantization or ''}".replace("torch.", ""),
        "layout": f"vllm-{vllm.__version__}/encoder",
    }


def _revision(vllm_config: Any) -> str:
    """Return a text that identifies the model's weights and options."""
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    return f"{model.revision or ''}/{load_format}/{config_digest(model.hf_config)}/{_options_digest(vllm_config)}"


def _options_digest(vllm_config: Any) -> str:
    """Return a digest of other options that change KV. An option that this version of vLLM lacks counts as None."""
    found = {
        f"{part}.{name}": getattr(getattr(vllm_config, part), name, None)
        for part, of_part in OPTIONS.items()
        for name in of_part
    }
    if images := vllm_config.model_config.multimodal_config:
        found |= {name: getattr(images, name, None) for name in OF_IMAGES}
        found["mm_processor_kwargs"] = _sorted(images.mm_processor_kwargs or {}, ("device",))
        found["media_io_kwargs"] = _sorted(images.media_io_kwargs or {}, ("device", "backend"))
        found[VIDEO_LOADER] = os.environ.get(VIDEO_LOADER)
    return digest(repr(sorted(found.items())) + _longest(vllm_config.model_config))


def _sorted(options: dict[str, Any], but: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return an engine's options for images and videos in a fixed order. vLLM's hashes cover only requests' options.

    but: names of options to leave out. vLLM sets these options for the device, and they change no image.
    """
    return sorted(
        (name, _sorted(value, but) if isinstance(value, dict) else value)
        for name, value in options.items()
        if name not in but
    )


def _longest(model: Any) -> str:
    """Return the maximum sequence length if it changes the KV of all positions (LongRoPE, Llama 4), else ""."""
    depends = "longrope" in model.hf_config.to_json_string() or model.hf_text_config.model_type.startswith("llama4")
    return str(model.max_model_len) if depends else ""


def _processor() -> str:
    """Return the processor, which determines vLLM's attention kernels and thus the order of bytes in a page."""
    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    amx = "amx" if torch.cpu._is_amx_tile_supported() else ""
    return f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{amx}"
