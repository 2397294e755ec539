"""Which parts of a chunk the ranks of a vLLM engine have."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from raykv.integrations.vllm.worker.ranks import Cut, cut


def parallel(tensor: int, stages: int = 1, strides: int = 1, interleave: int = 1) -> Any:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "decode_context_parallel_size": strides}
    return SimpleNamespace(**sizes, cp_kv_cache_interleave_size=interleave)


@pytest.mark.parametrize(
    ("tensor", "stages", "heads", "replicated", "name", "parts", "stores"),
    [
        (1, 1, 0, False, "tp1", [[0]], [1]),
        (2, 1, 0, False, "tp2", [[0], [1]], [1, 1]),
        (2, 2, 0, False, "tp2pp2", [[0], [1], [2], [3]], [1, 1, 1, 1]),
        (1, 1, 0, True, "replicated", [[0]], [1]),
        (3, 1, 0, True, "replicated", [[0], [0], [0]], [1, 0, 0]),
        (2, 2, 0, True, "replicatedpp2", [[0], [0], [1], [1]], [1, 0, 1, 0]),
        (1, 1, 4, False, "heads4", [[0, 1, 2, 3]], [1]),
        (2, 1, 4, False, "heads4", [[0, 1], [2, 3]], [1, 1]),
        (4, 1, 4, False, "heads4", [[0], [1], [2], [3]], [1, 1, 1, 1]),
        (8, 1, 4, False, "heads4", [[0], [0], [1], [1], [2], [2], [3], [3]], [1, 0] * 4),
        (2, 2, 4, False, "heads4pp2", [[0, 1], [2, 3], [4, 5], [6, 7]], [1, 1, 1, 1]),
        (2, 1, 32, False, "heads8", [[0, 1, 2, 3], [4, 5, 6, 7]], [1, 1]),
        (16, 1, 32, False, "tp16", [[rank] for rank in range(16)], [1] * 16),
        (4, 1, 6, False, "tp4", [[0], [1], [2], [3]], [1] * 4),
    ],
)
def test_every_part_is_stored_by_one_rank_and_read_by_those_that_have_its_bytes(
    tensor: int, stages: int, heads: int, replicated: bool, name: str, parts: list[list[int]], stores: list[int]
) -> None:
    found = cut(parallel(tensor, stages), heads, replicated)
    assert found == (name, parts, [bool(one) for one in stores])
    check_stores(found)


@pytest.mark.parametrize(
    ("tensor", "stages", "strides", "interleave", "latent", "name", "parts", "stores"),
    [
        (2, 1, 2, 1, False, "tp2dcp2x1", [[0], [1]], [1, 1]),
        (4, 1, 2, 16, False, "tp4dcp2x16", [[0], [1], [2], [3]], [1, 1, 1, 1]),
        (2, 2, 2, 1, False, "tp2pp2dcp2x1", [[0], [1], [2], [3]], [1, 1, 1, 1]),
        (2, 1, 2, 1, True, "replicateddcp2x1", [[0], [1]], [1, 1]),
        (8, 1, 2, 4, True, "replicateddcp2x4", [[0], [1]] * 4, [1, 1] + [0] * 6),
        (4, 2, 2, 1, True, "replicatedpp2dcp2x1", [[0], [1]] * 2 + [[2], [3]] * 2, [1, 1, 0, 0] * 2),
    ],
)
def test_ranks_in_decode_context_parallel_have_the_tokens_of_their_strides(
    tensor: int,
    stages: int,
    strides: int,
    interleave: int,
    latent: bool,
    name: str,
    parts: list[list[int]],
    stores: list[int],
) -> None:
    found = cut(parallel(tensor, stages, strides, interleave), 0, latent)
    assert found == (name, parts, [bool(one) for one in stores])
    check_stores(found)


def check_stores(found: Cut) -> None:
    """AssertionError if a part is not stored exactly once."""
    stored = [part for of_rank, writes in zip(found.parts, found.stores, strict=True) if writes for part in of_rank]
    assert sorted(stored) == list(range(len(stored)))
    assert {part for of_rank in found.parts for part in of_rank} == set(stored)
