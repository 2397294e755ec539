"""LoRA adapters of random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_adapter(folder: Path, seed: int, layers: int = 8, size: int = 512) -> list[Path]:
    """Write an adapter's files, as PEFT does. layers, size: number of the model's layers, and its hidden size."""
    random, rank = torch.Generator().manual_seed(seed), 8
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{which}.lora_{side}.weight": torch.randn(
            (rank, size) if side == "A" else (size, rank), generator=random
        )
        for layer in range(layers)
        for which in ("q_proj", "k_proj", "v_proj")
        for side in "AB"
    }
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return list(folder.iterdir())
