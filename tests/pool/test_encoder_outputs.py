"""Outputs of vLLM's encoders in a pool, which another engine reads."""

from collections.abc import Callable

import numpy as np
import pytest
from helpers.pools import MIB, eventually, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

import torch

from raykv.integrations.vllm.encoder.outputs import HEADER, PIECE_BYTES, Outputs, loaded, outputs_in

NAMES = {"model": "m", "revision": "1", "dtype": "bfloat16", "layout": "encoder"}


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=64 * MIB)


@pytest.fixture
def outputs(pool: raykv.KVPool) -> Outputs:
    pool.clear()
    return outputs_in(pool, NAMES, 512)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((20, 256), "bfloat16"),
        ((1, 1), "float32"),
        ((0, 256), "float16"),
        ((3000, 256), "bfloat16"),  # six pieces
    ],
)
def test_an_output_comes_back_as_it_was(
    pool: raykv.KVPool, outputs: Outputs, shape: tuple[int, ...], dtype: str
) -> None:
    output = torch.rand(shape).to(getattr(torch, dtype))
    outputs.store("a", output)
    file = outputs_in(pool, NAMES, 512).read("a", len(output))
    assert file is not None
    found = loaded(file, "cpu")
    assert found.dtype == output.dtype and torch.equal(found, output)
    assert outputs.read("a", len(output) + 1) is None, "another image has this name"
    assert outputs.read("b", len(output)) is None
    assert outputs_in(pool, NAMES | {"revision": "2"}, 512).read("a", len(output)) is None
    eventually(lambda: settled(pool))


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_an_output_may_fill_its_pieces_to_the_last_byte(outputs: Outputs, over: int) -> None:
    fixed = len(outputs_file(outputs, torch.zeros(PIECE_BYTES, dtype=torch.uint8))) - PIECE_BYTES
    output = torch.randint(255, (2 * PIECE_BYTES - HEADER.size - fixed + over,), dtype=torch.uint8)
    assert torch.equal(loaded(outputs_file(outputs, output), "cpu"), output)


def outputs_file(outputs: Outputs, output: torch.Tensor) -> bytes:
    name = f"{len(output)} bytes"
    outputs.store(name, output)
    file = outputs.read(name, len(output))
    assert file is not None
    return file


def test_an_output_is_a_miss_if_the_pool_lost_a_piece_of_it(outputs: Outputs) -> None:
    outputs.store("a", torch.rand(700, 256))
    keys = outputs._keys("a", 0, 3)
    with outputs._cache.match(keys) as match:
        assert match.num_blocks == 3
    outputs._cache.session.directory.forget_later(keys[2:].tobytes())
    eventually(lambda: outputs.read("a", 700) is None)
    assert outputs._fill(np.empty((2, PIECE_BYTES), np.uint8), keys[:2])


def test_pieces_of_two_writers_of_one_name_are_a_miss(outputs: Outputs, pool: raykv.KVPool) -> None:
    outputs.store("a", torch.zeros(700, 256))
    _, second, _ = outputs._keys("a", 0, 3)
    outputs._cache.session.directory.forget_later(second.tobytes())
    eventually(lambda: outputs.read("a", 700) is None)
    outputs.store("a", torch.ones(700, 256))
    assert outputs.read("a", 700) is None
    assert pool.session.directory.faults == {}
