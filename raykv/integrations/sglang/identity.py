"""The names of an engine's caches in the pool. They cover everything that changes the bytes of KV, except tokens.

SGLang's page hashes cover the adapter and `cache_salt`. The module `pages` adds the layout of a page to the names.
"""

from typing import Any

from sglang.srt.runtime_context import get_server_args
from sglang.version import __version__

from raykv.integrations.digests import digest

RANK_SHARDED = ("mamba", "draft", "draft_swa")  # host pools that differ by rank even if all ranks have the same KV
# SGLang's server arguments that change KV or its layout
OPTIONS = (
    *("revision", "quantization", "quantization_param_path", "dtype", "kv_cache_dtype", "load_format", "model_impl"),
    *("json_model_override_args", "context_length", "mamba_ssm_dtype"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("speculative_draft_model_path", "speculative_draft_model_revision"),
)


def identity(config: Any, name: str) -> dict[str, Any]:
    """Return arguments of `KVPool.cache` for the caches of a host pool, without the layout of its pages.

    config: SGLang's HiCacheStorageConfig. name: the host pool's name. Data-parallel engines share caches, as their KV
    is the same. Raises ValueError for a model without a name.
    """
    if not config.model_name:
        raise ValueError("SGLang gives its storage no model name: start it with --model-path, or --served-model-name")
    sizes = [config.pp_size, config.attn_cp_size, config.dcp_size, config.tp_size]
    ranks = [config.pp_rank, config.attn_cp_rank, config.dcp_rank, config.tp_rank]
    if config.is_mla_model and name not in RANK_SHARDED:  # all tensor ranks have this KV, and one rank stores it
        sizes, ranks = sizes[:-1], ranks[:-1]
    part = 0
    for size, rank in zip(sizes, ranks, strict=True):
        part = part * size + rank
    shape = "/".join(f"{axis}{size}" for axis, size in zip(("pp", "cp", "dcp", "tp"), sizes, strict=False))
    return {"model": config.model_name, "revision": _options(), "parallel": f"sglang/{shape}", "part": part}


def _options() -> str:
    """Return a digest of OPTIONS. An option that this version of SGLang lacks counts as None."""
    arguments = get_server_args()
    found = [(name, str(getattr(arguments, name, None))) for name in OPTIONS]
    return f"{__version__}/{digest(repr(found))}"
