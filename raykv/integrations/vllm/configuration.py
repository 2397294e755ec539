"""Options that raykv sets in an engine's configuration: for vLLM's offloading, and for the names of the caches."""

from __future__ import annotations

from typing import Any

from raykv.config import MIB
from raykv.integrations.vllm.compat import kv_replicas
from raykv.integrations.vllm.identity.drafters import draft_layers, drafter_name, has_drafter, target_layers
from raykv.integrations.vllm.identity.groups import blocks_within, in_strides, is_latent
from raykv.integrations.vllm.identity.identity import identity
from raykv.integrations.vllm.scheduler.threshold import threshold_of
from raykv.integrations.vllm.scheduler.waiting import patience_of
from raykv.integrations.vllm.spec import RayKVOffloadingSpec
from raykv.integrations.vllm.worker.ranks import Cut, cut

CHUNK_BYTES = 1 * MIB  # default size of a pool block, rounded up to whole engine blocks


def configure(vllm_config: Any) -> None:
    """Set options of vLLM's offloading that the user need not know."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra["spec_name"], extra["spec_module_path"] = RayKVOffloadingSpec.__name__, RayKVOffloadingSpec.__module__
    extra.setdefault("offload_prompt_only", False)  # False: a chat's next turn also hits generated tokens
    if extra.get("answers", "all") not in ("all", "auto"):
        raise ValueError(f'answers={extra["answers"]!r} in kv_connector_extra_config: give "all" or "auto"')
    extra.setdefault("kv_events", extra.get("self_describing_kv_events", True))
    extra["self_describing_kv_events"] = False  # turns off vLLM's tracker, as raykv has KVEvents
    extra["patience"] = patience_of(extra)
    if threshold_of(extra) and vllm_config.kv_transfer_config.kv_role == "kv_producer":
        raise ValueError("store_threshold for a kv_producer, whose chunks a consumer waits for: leave it out")
    extra.setdefault("verify_tokens", False)
    for name in ("offload_prompt_only", "verify_tokens"):
        if not isinstance(extra[name], bool):
            raise ValueError(f"{name}={extra[name]!r} in kv_connector_extra_config: set it to true or false")
    extra["sync_load_budget_bytes"] = 0  # no loads within a step: vLLM could not compute missing blocks there


def identify(vllm_config: Any, kv_cache_config: Any) -> None:
    """Set the identity by which engines share blocks, and how many engine blocks make a pool block."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    parts = cut_of(vllm_config, kv_cache_config)
    role = vllm_config.kv_transfer_config.kv_role
    extra["parts"], extra["stores"] = parts.parts, [role != "kv_consumer" and of_rank for of_rank in parts.stores]
    extra["produces"] = role == "kv_producer"
    if not extra.keys() & {"blocks_per_chunk", "block_size"}:
        part_bytes = block_bytes(vllm_config, kv_cache_config) // len(parts.parts[0])
        most = [blocks_within(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        extra["blocks_per_chunk"] = min([-(-CHUNK_BYTES // part_bytes), *filter(None, most)])
    tenant = {"tenant": extra["tenant"]} if "tenant" in extra else {}
    extra["cache"] = identity(vllm_config, kv_cache_config, parts.name) | tenant
    extra["drafts"] = draft_layers(vllm_config, kv_cache_config.kv_cache_groups)
    if has_drafter(vllm_config):
        revision = f"{extra['cache']['revision']}/{drafter_name(vllm_config)}"
        extra["drafter"] = extra["cache"] | {"revision": revision}
        if not any(map(any, extra["drafts"])):  # layer names do not show which layers are the drafter's
            extra["cache"] = extra["drafter"]


def cut_of(vllm_config: Any, kv_cache_config: Any) -> Cut:
    """Return how this engine's chunks are cut into parts."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    groups, tensor = kv_cache_config.kv_cache_groups, parallel.tensor_parallel_size
    latent = all(is_latent(group.kv_cache_spec) for group in groups)
    if parallel.decode_context_parallel_size > 1:
        latent = latent and all(in_strides(group.kv_cache_spec) for group in groups)
    else:
        latent = latent and kv_replicas(kv_cache_config, tensor) == tensor
    heads, wanted = 0, vllm_config.kv_transfer_config.kv_connector_extra_config.get("canonical_layout")
    if wanted and not latent and len(groups) == 1:
        heads = model.get_total_num_kv_heads()
    return cut(parallel, heads, latent)


def block_bytes(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the bytes of an engine block on a rank of the pipeline's shortest stage, without a drafter's layers."""
    here = kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks
    groups = kv_cache_config.kv_cache_groups
    if has_drafter(vllm_config):
        of_target = max((len(names) for _, names in target_layers(vllm_config, groups)), default=1)
        return int(here // max(len(group.layer_names) for group in groups) * of_target)
    layers = len(groups[0].layer_names)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return int(here)
    return int(here // layers * (vllm_config.model_config.get_total_num_hidden_layers() // stages))
