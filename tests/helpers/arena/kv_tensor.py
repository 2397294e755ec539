"""An engine's KV tensor on the stand-in for a GPU, which torch does not know."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raykv.arena.gpu import cuda


class Tensor:
    """A KV tensor on a GPU, with the attributes that vLLM's worker uses: (blocks, bytes of a page) uint8."""

    device = torch.device("cpu")  # where the worker makes memory for unwanted pages, of which there are none here

    def __init__(self, pages: NDArray[np.uint8]) -> None:
        self.page, self.array = pages.shape[1], cuda.cupy().asarray(pages)
        self.__cuda_array_interface__: Any = self.array.__cuda_array_interface__

    def view(self, dtype: torch.dtype) -> "Tensor":
        return self

    def __getitem__(self, which: tuple[slice, slice]) -> "Tensor":
        assert which == (slice(None), slice(self.page)), "the whole page"
        return self
