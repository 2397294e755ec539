"""Small models of random weights, and drafters that guess some of their tokens right and others wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config

HIDDEN, VOCABULARY, LAYERS = 256, 500, 4
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 512, "vocab_size": VOCABULARY}
SIZES |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 4096, "tie_word_embeddings": False}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.2}
EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
EXPERTS |= {"n_shared_experts": 1, "first_k_dense_replace": LAYERS - 1, "n_group": 1, "topk_group": 1}


def save(method: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Save a target and its drafter. Returns the target's folder, and vLLM's `speculative_config`."""
    torch.manual_seed(0)
    return SAVES[method](folder)


def _draft_model(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The drafter is the target's first layer."""
    target, drafter = folder / "target", folder / "drafter"
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    _make_predictable(model, deciding=0)
    model.save_pretrained(target)
    LlamaForCausalLM.from_pretrained(target, num_hidden_layers=1).save_pretrained(drafter)
    return target, {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3}


def _eagle(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The target's first layer, on a token's embedding plus a tenth of the target's output for the token before."""
    target, speculative = _draft_model(folder)
    drafter = Path(speculative["model"]) / "model.safetensors"
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(drafter).items()
        if "layers.0" in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.cat([torch.eye(HIDDEN), 0.1 * torch.eye(HIDDEN)], 1)
    save_file(weights, drafter, metadata={"format": "pt"})
    return target, speculative | {"method": "eagle"}


def _eagle3(folder: Path) -> tuple[Path, dict[str, Any]]:
    """One layer, in which a token mostly attends to equal tokens: their queries and keys are alike."""
    target, speculative = _draft_model(folder)
    drafter = Path(speculative["model"])
    saved, nothing = load_file(drafter / "model.safetensors"), torch.zeros(HIDDEN, HIDDEN)
    weights = {
        name.replace("model.layers.0.", "midlayer."): tensor for name, tensor in saved.items() if "layers.0" in name
    }
    weights["lm_head.weight"] = saved["lm_head.weight"]
    weights |= {f"{norm}.weight": torch.ones(HIDDEN) for norm in ("norm", "midlayer.hidden_norm")}
    alike = torch.cat([torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0], nothing], 1)
    weights |= {f"midlayer.self_attn.{name}_proj.weight": alike.clone() for name in "qk"}
    weights["midlayer.self_attn.v_proj.weight"] = torch.cat([torch.eye(HIDDEN), nothing], 1)
    weights["midlayer.self_attn.o_proj.weight"] = torch.eye(HIDDEN)
    weights["fc.weight"] = 0.01 * torch.randn(HIDDEN, 3 * HIDDEN)
    save_file(weights, drafter / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((drafter / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY}
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (drafter / "config.json").write_text(json.dumps(config))
    return target, speculative | {"method": "eagle3"}


def _dflash(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The target's first layer. Its keys and values of earlier tokens come from the target's hidden states.

    It guesses each masked token by the token's own embedding, so hardly any guess is right.
    """
    target, speculative = _draft_model(folder)
    drafter = Path(speculative["model"])
    saved = load_file(drafter / "model.safetensors")
    weights = {name.removeprefix("model."): tensor for name, tensor in saved.items() if "layers.0" in name}
    weights |= {f"layers.0.self_attn.{name}_norm.weight": torch.ones(64) for name in "qk"}
    weights |= {f"{norm}.weight": torch.ones(HIDDEN) for norm in ("norm", "hidden_norm")}
    weights["fc.weight"] = torch.eye(HIDDEN, 3 * HIDDEN)
    save_file(weights, drafter / "model.safetensors", metadata={"format": "pt"})
    config = Qwen3Config(**SIZES | {"num_hidden_layers": 1}, **HEADS, architectures=["DFlashDraftModel"]).to_dict()
    config["dflash_config"] = {"target_layer_ids": [0, 1, 2], "mask_token_id": VOCABULARY - 1, "causal": True}
    (drafter / "config.json").write_text(json.dumps(config))
    return target, speculative | {"method": "dflash"}


def _mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The drafter is a further layer with the weights of the target's last layer."""
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **HEADS, **EXPERTS, pad_token_id=0, eos_token_id=None))
    _make_predictable(model, deciding=LAYERS - 1)
    model.save_pretrained(folder)
    weights, last, after = load_file(folder / "model.safetensors"), f"layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    weights |= {
        name.replace(f"model.{last}", after): weight.clone() for name, weight in weights.items() if last in name
    }
    weights |= {f"{after}{norm}.weight": torch.ones(HIDDEN) for norm in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{after}eh_proj.weight"] = torch.cat([torch.eye(HIDDEN), 0.1 * torch.eye(HIDDEN)], 1)
    weights[f"{after}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{after}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder, {"method": "mtp", "num_speculative_tokens": 1}


def _make_predictable(model: Any, deciding: int) -> None:
    """Have each token decide the next one, except for what one layer's attention adds from earlier tokens."""
    with torch.no_grad():
        embeddings = torch.randn(VOCABULARY, HIDDEN)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(embeddings[torch.randperm(VOCABULARY)] / 16)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.mul_(0.5 if number == deciding else 0.05)
            for name, weight in layer.mlp.named_parameters():
                weight.mul_(0.05 if "down_proj" in name else 1)


SAVES: dict[str, Callable[[Path], tuple[Path, dict[str, Any]]]] = {
    "draft_model": _draft_model,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "dflash": _dflash,
    "mtp": _mtp,
}
