"""Small models with random weights and real configuration classes, for each kind of KV that layers keep."""

from __future__ import annotations

from typing import Any, NamedTuple

WINDOW = 96  # tokens
VOCABULARY = 500
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": VOCABULARY, "num_hidden_layers": 4}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
OTHERS: dict[str, Any] = {"max_position_embeddings": 4096, "tie_word_embeddings": False}
OTHERS["initializer_range"] = 0.1  # with smaller weights all prompts have nearly the same answer
MANY = ["sliding_attention"] * 5 + ["full_attention"]
IN_TURN = ["sliding_attention", "full_attention"] * 2
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWENS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
QWENS["shared_expert_intermediate_size"] = 128
DEEPSEEKS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DEEPSEEKS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": None}
DELTA: dict[str, Any] = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # the kernel supports no smaller heads


class Shape(NamedTuple):
    """kind: prefix of the model's class name in transformers. more: fields of its configuration. dtype: vLLM's dtype.

    config: prefix of the configuration's class name, if it differs from `kind`.
    """

    kind: str
    more: dict[str, Any]
    dtype: str = "float32"
    config: str = ""


SHAPES = {
    "llama": Shape("Llama", {}),
    "gemma3": Shape(
        "Gemma3", {"num_hidden_layers": 6, "layer_types": MANY, "sliding_window": WINDOW}, config="Gemma3Text"
    ),
    "gpt-oss": Shape("GptOss", {**EXPERTS, "layer_types": IN_TURN, "sliding_window": WINDOW}),
    "deepseek-v3": Shape("DeepseekV3", {**DEEPSEEKS, "topk_method": "noaux_tc"}, "bfloat16"),
    "qwen3-next": Shape("Qwen3Next", {**DELTA, **QWENS}, "bfloat16"),
}


def configuration(shape: Shape, **fields: Any) -> Any:
    """A shape's transformers configuration. fields: override the fields above. `layer_types` is repeated as needed."""
    import transformers

    fields = {**SIZES, **HEADS, **OTHERS, **shape.more, **fields}
    if pattern := fields.get("layer_types"):
        layers = fields["num_hidden_layers"]
        fields["layer_types"] = (pattern * layers)[:layers]
    kind = getattr(transformers, f"{shape.config or shape.kind}Config")
    return kind(**fields, architectures=[f"{shape.kind}ForCausalLM"])
