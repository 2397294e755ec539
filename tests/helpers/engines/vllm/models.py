"""Models of `benchmarks.engines.shapes` whose layers keep KV of several kinds."""

from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.engines.shapes import SHAPES, save
from raykv.integrations.vllm.compat import TAKES_GROUPS


class Model(NamedTuple):
    """chunk: tokens of a chunk: those of a window, or of a block as large as a layer's state."""

    name: str
    chunk: int = 96

    @property
    def dtype(self) -> str:
        return SHAPES[self.name].dtype

    def save(self, folder: Path) -> None:
        save(self.name, folder)


MODELS = {"mistral": Model("mistral")}
if TAKES_GROUPS:
    MODELS |= {name: Model(name) for name in ("gemma3", "gpt-oss")}
    if torch.cpu._is_amx_tile_supported():  # vLLM's kernels for its states need AMX
        MODELS["qwen3-next"] = Model("qwen3-next", 288)
