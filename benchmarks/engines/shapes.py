"""More small models with random weights, besides those of `raykv/bench/engines/shapes.py`."""

from pathlib import Path
from typing import Any

from raykv.bench.engines import shapes
from raykv.bench.engines.shapes import DEEPSEEKS, EXPERTS, IN_TURN, QWENS, WINDOW, Shape, configuration

SHAPES = shapes.SHAPES | {
    "qwen3": Shape("Qwen3", {}),
    "qwen3-moe": Shape("Qwen3Moe", {**QWENS, "norm_topk_prob": True}),  # as in the released model
    "mixtral": Shape("Mixtral", EXPERTS),
    "gemma2": Shape("Gemma2", {"layer_types": IN_TURN, "sliding_window": WINDOW, "tie_word_embeddings": True}),
    "mistral": Shape("Mistral", {"num_hidden_layers": 3, "sliding_window": WINDOW}),
    "llama4": Shape(
        "Llama4",
        {**EXPERTS, "num_experts_per_tok": 1, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 512},
        config="Llama4Text",
    ),
    "deepseek-v2": Shape("DeepseekV2", DEEPSEEKS, "bfloat16"),
    "lfm2": Shape("Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "conv_dim": 256}),
}


def save(name: str, folder: Path) -> dict[str, Any]:
    """Write a model's configuration and weights into a folder. Returns vLLM's options for it."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape = SHAPES[name]
    getattr(transformers, f"{shape.kind}ForCausalLM")(configuration(shape)).save_pretrained(folder)
    return {"dtype": shape.dtype}
