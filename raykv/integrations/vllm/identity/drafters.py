"""The layers of a drafter: the model or the heads that guess tokens in speculative decoding, and keep KV of their own.

The target, the model that is served, verifies each guess. So no KV of a drafter changes an answer; other KV than the
drafter's own has fewer guesses accepted. A drafter's layers are a part of the pool's chunks beside the target's:
engines with other drafters, or without any, share the target's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raykv.integrations.vllm.identity.digests import config_digest, digest

WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa")  # methods that keep nothing of a prompt
# what the name of a drafter's layer has where its numbers begin at 0; other drafters count on from the target's layers
PREFIXES = ("draft_model", "mtp")


def has_drafter(vllm_config: Any) -> bool:
    """Whether the engine has a drafter that may keep KV."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in WITHOUT_KV


def draft_layers(vllm_config: Any, groups: Sequence[Any]) -> list[list[bool]]:
    """By group, whether each layer is a drafter's. groups: vLLM's KV cache groups."""
    layers = vllm_config.model_config.get_total_num_hidden_layers() if has_drafter(vllm_config) else None
    return [[layers is not None and _is_draft(name, layers) for name in group.layer_names] for group in groups]


def target_layers(vllm_config: Any, groups: Sequence[Any]) -> list[tuple[Any, list[str]]]:
    """The groups that have layers of the target: the spec of each, and the names of these layers."""
    drafts = draft_layers(vllm_config, groups)
    found = [
        (group.kv_cache_spec, [name for name, draft in zip(group.layer_names, of_group, strict=True) if not draft])
        for group, of_group in zip(groups, drafts, strict=True)
    ]
    return [(spec, names) for spec, names in found if names]


def _is_draft(layer: str, target_layers: int) -> bool:
    """layer: its name in vLLM. target_layers: number of the target's layers."""
    words = layer.split(".")
    number = next((int(word) for word in words if word.isdigit()), 0)
    return not set(PREFIXES).isdisjoint(words) or number >= target_layers


def drafter_name(vllm_config: Any) -> str:
    """Text that covers everything by which the KV of two drafters of the same target differs, except tokens.

    The number of guesses is not part of it: KV is kept of what the target computed.
    """
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    found = (
        speculative.method,
        getattr(speculative, "disable_eagle_block_drop", False),
        speculative.draft_tensor_parallel_size,
        draft.model,
        draft.revision,
        draft.code_revision,
        str(draft.dtype),
        draft.quantization,
        config_digest(draft.hf_config),
        (speculative.draft_load_config or vllm_config.load_config).load_format,
    )
    return f"drafter-{digest(repr(found))}"
