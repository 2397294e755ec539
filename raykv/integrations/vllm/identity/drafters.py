"""The layers of a drafter: the model or the heads that guess tokens in speculative decoding, and keep KV of their own.

The target, the model that is served, verifies each guess. So a drafter's KV never changes an answer, but fewer
guesses are right with wrong KV. The pool keeps the KV of the target's layers and of the drafter's layers apart. Engines
with other drafters, or without a drafter, share the KV of the target's layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from raykv.integrations.digests import config_digest, digest

WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")  # methods that keep no KV of a prompt
# parts of layer names that mark a drafter's layers; without them, a drafter continues the target's layer numbers
PREFIXES = ("draft_model", "mtp")


def has_drafter(vllm_config: Any) -> bool:
    """Whether the engine has a drafter that may keep KV."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in WITHOUT_KV


def draft_layers(vllm_config: Any, groups: Sequence[Any]) -> list[list[bool]]:
    """Return whether each layer is a drafter's, by group. groups: vLLM's KV cache groups."""
    if not has_drafter(vllm_config):
        return [[False] * len(group.layer_names) for group in groups]
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    unmarked = [name for group in groups for name in group.layer_names if not _is_marked(name)]
    model = _split(unmarked[0])[0] if unmarked else ""
    return [[_is_draft(name, model, layers) for name in group.layer_names] for group in groups]


def target_layers(vllm_config: Any, groups: Sequence[Any]) -> list[tuple[Any, list[str]]]:
    """Return, for each group with layers of the target, the group's spec and the names of these layers."""
    drafts = draft_layers(vllm_config, groups)
    found = [
        (group.kv_cache_spec, [name for name, draft in zip(group.layer_names, of_group, strict=True) if not draft])
        for group, of_group in zip(groups, drafts, strict=True)
    ]
    return [(spec, names) for spec, names in found if names]


def _is_draft(layer: str, model: str, layers: int) -> bool:
    """Whether a layer is a drafter's.

    layer: its name in vLLM. model: beginning of the target's layer names. layers: number of the target's layers.
    """
    begin, number = _split(layer)
    return begin != model or number >= layers or _is_marked(layer)


def _is_marked(layer: str) -> bool:
    return not set(PREFIXES).isdisjoint(layer.split("."))


def _split(layer: str) -> tuple[str, int]:
    """Return a layer's name up to its number, and the number, which is 0 for a name without a number."""
    found = re.search(r"\.(\d+)(?=\.|$)", layer)
    return (layer[: found.start()], int(found[1])) if found else (layer, 0)


def drafter_name(vllm_config: Any) -> str:
    """Return a name of the drafter. Two drafters of a target have different names if their KV of equal tokens differs.

    The name does not contain the number of guesses. This number only changes the size of pages with states, and
    the arguments of a cache contain this size.
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
        str(getattr(speculative, "attention_backend", None)),
        str(getattr(speculative, "kv_cache_dtype", None)),
        (speculative.draft_load_config or vllm_config.load_config).load_format,
    )
    return f"drafter-{digest(repr(found))}"
