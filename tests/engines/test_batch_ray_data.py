"""Engines of Ray Data share documents through a pool: with LLMPredictor, and in examples/batch_ray_data.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.engines import left_over
from helpers.pools import MIB, eventually, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import ENVIRONMENT
from ray.data import ActorPoolStrategy, Dataset
from transformers import AutoTokenizer

from examples import batch_ray_data, serve_vllm
from examples.serve_vllm import words
from raykv.integrations.data import LLMPredictor, prefix_ordered
from raykv.integrations.vllm import kv_transfer_config

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
HEADERS, HEADER_TOKENS, QUESTION_TOKENS, ENGINES = 3, 512, 32, 2
CHUNK = 64  # tokens in 1 MiB; in float32 half as many
Row = dict[str, Any]


def questions(numbers: range) -> list[Row]:
    """A row for each number, each with one of the headers, in an order that separates equal headers."""
    return [
        {"id": i, "prompt": f"{words(i % HEADERS, HEADER_TOKENS)} {words(100 + i, QUESTION_TOKENS)}"} for i in numbers
    ]


def predicted(dataset: Dataset, pool: str, model: str, engines: int) -> list[Row]:
    engine = {
        "kv_transfer_config": kv_transfer_config(pool),
        "block_size": CHUNK,
        "max_model_len": 1024,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 * MIB,
    }
    sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answered = dataset.map_batches(
        LLMPredictor,
        fn_constructor_kwargs={"model": model, "sampling_params": sampling, "engine_kwargs": engine},
        compute=ActorPoolStrategy(size=engines),
        num_cpus=0.1,
        runtime_env={"env_vars": ENVIRONMENT},
    )
    rows: list[Row] = answered.take_all()
    return rows


def test_engines_of_map_batches_read_what_those_of_another_job_have_computed(
    start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    pool, model = start(cpu_memory=256 * MIB), serve_vllm.make_model(tmp_path)
    asked = ray.data.from_items(questions(range(24)), override_num_blocks=2)
    ordered = prefix_ordered(asked, AutoTokenizer.from_pretrained(model), ENGINES)
    with left_over.removed():
        first = predicted(ordered, pool.name, model, ENGINES)
    assert sorted(row["id"] for row in first) == list(range(24))
    assert all(len(row["generated_text"].split()) == 4 for row in first)
    assert len({row["generated_text"] for row in first}) > HEADERS, "the questions have an influence"
    new = [row for row in first if row["num_cached_tokens"] < HEADER_TOKENS]
    assert len(new) <= len(first) / 2
    eventually(lambda: settled(pool))
    hits = pool.stats()["hits"]
    others = ray.data.from_items(questions(range(24, 30)), override_num_blocks=1)
    with left_over.removed():
        second = predicted(others, pool.name, model, engines=1)
    assert [row["num_cached_tokens"] for row in second] == [HEADER_TOKENS] * len(second)
    assert pool.stats()["hits"] >= hits + HEADERS * (HEADER_TOKENS // CHUNK)


def test_engines_read_what_those_of_another_job_have_computed(
    start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    pool, model = start(cpu_memory=512 * MIB), serve_vllm.make_model(tmp_path)
    first, second = batch_ray_data.rows(range(2)), batch_ray_data.rows(range(2, 6))
    with left_over.removed():
        batch_ray_data.answers(batch_ray_data.build(model, pool.name), model, first)
        eventually(lambda: settled(pool))
        hits = pool.stats()["hits"]
        together = batch_ray_data.answers(batch_ray_data.build(model, pool.name), model, second)
        assert pool.stats()["hits"] >= hits + batch_ray_data.DOCUMENTS * (1500 // (CHUNK // 2))
        apart = batch_ray_data.answers(batch_ray_data.build(model, None, engines=1), model, second)
        assert together == apart
        assert len(set(apart.values())) > batch_ray_data.DOCUMENTS, "the questions have an influence"
