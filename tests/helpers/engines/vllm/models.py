"""Models whose layers keep KV of several kinds, of `raykv.bench.engines.shapes`."""

from pathlib import Path
from typing import NamedTuple

import torch

from raykv.bench.engines.shapes import SHAPES, save
from raykv.integrations.vllm.compat import TAKES_GROUPS


class Model(NamedTuple):
    """chunk: its tokens: as many as a window has, or a block whose states fill a page of the layers that have all."""

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
    if torch.cpu._is_amx_tile_supported():  # vLLM's kernels of its states want that, or AVX-512 with bfloat16
        MODELS["qwen3-next"] = Model("qwen3-next", 288)
