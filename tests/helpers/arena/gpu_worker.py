"""The stage `worker` of benchmarks/gpu on the stand-in for a GPU, and without vLLM, as on a machine with a GPU only."""

import sys
from typing import Any

import numpy as np

from benchmarks.gpu import worker
from helpers.arena.kv_tensor import Tensor

SIZE = 16 << 20


def made(blocks: int, page: int) -> Tensor:
    return Tensor(np.random.default_rng(page).integers(0, 256, (blocks, page), np.uint8))


def same(tensor: Tensor, some: Any, others: Any) -> bool:
    pages = tensor.array.get()
    return bool((pages[some] == pages[others]).all())


if __name__ == "__main__":
    worker.stand_in_for_vllm()
    for figures in worker.run(made, same, SIZE):
        assert figures.right and figures.store_gbps > 0 and min(figures.load_gbps) > 0, figures
        print(figures)
    assert not hasattr(sys.modules["vllm"], "__version__"), "vLLM was imported"
