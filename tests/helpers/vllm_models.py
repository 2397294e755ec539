"""Small models of random weights by their real configuration classes, whose layers keep KV of several kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

WINDOW = 96  # tokens
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 500, "initializer_range": 0.1}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LONG: dict[str, Any] = {"max_position_embeddings": 4096, "tie_word_embeddings": False}


def _save(kind: str, folder: Path, config: str = "", **more: Any) -> None:
    """kind: of the model's class. config: of the configuration's, where that is another."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{config or kind}Config")(**{**SIZES, **HEADS, **LONG, **more})
    getattr(transformers, f"{kind}ForCausalLM")(made).save_pretrained(folder)


def save_gemma3(folder: Path) -> None:
    """Five layers of a window to one of full attention, as Gemma 3 has them: groups of layers alias memory."""
    pattern = ["sliding_attention"] * 5 + ["full_attention"]
    _save("Gemma3", folder, "Gemma3Text", num_hidden_layers=6, layer_types=pattern, sliding_window=WINDOW)


def save_gpt_oss(folder: Path) -> None:
    """Windows and full attention in turn, with sinks."""
    pattern = ["sliding_attention", "full_attention"] * 2
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    _save("GptOss", folder, num_hidden_layers=4, layer_types=pattern, sliding_window=WINDOW, **experts)


def save_mistral(folder: Path) -> None:
    """Windows only."""
    _save("Mistral", folder, num_hidden_layers=3, sliding_window=WINDOW)


MODELS: dict[str, Callable[[Path], None]] = {"gemma3": save_gemma3, "gpt-oss": save_gpt_oss, "mistral": save_mistral}
