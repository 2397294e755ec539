"""Batch inference with Ray Data: two vLLM engines on two nodes, and a pool between them.

    python -m examples.batch_ray_data

starts two Ray nodes on this machine and asks 32 questions about 4 documents, in random order. The documents are the
system prompts. `prefix_ordered` puts questions about one document next to each other. When one engine has computed a
document, the other engine reads it from the pool, and so do the engines of the next job. The script creates the model:
a small Llama with random weights.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.data.llm import Processor, build_processor, vLLMEngineProcessorConfig
from transformers import AutoTokenizer

from examples.serve_vllm import ENVIRONMENT, make_model, words
from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB
from raykv.integrations.data import prefix_ordered
from raykv.integrations.vllm import kv_transfer_config

DOCUMENTS, ENGINES = 4, 2
SMALL = {"num_cpus": 0.1}
Row = dict[str, Any]


def build(model: str, pool: str | None, engines: int = ENGINES) -> Processor:
    """Build a processor for rows with `messages`. pool: the pool's name, or None for engines without a pool."""
    attached = {"kv_transfer_config": kv_transfer_config(pool)} if pool else {}
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={
            **attached,
            "dtype": "float32",
            "max_model_len": 2048,
            "block_size": 32,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 256 * MIB,
        },
        concurrency=(engines, engines),
        batch_size=2,  # at most the number of rows in a block of prefix_ordered
        max_concurrent_batches=1,  # an engine reserves twice this number of blocks, even if they suit another engine
        # omit the next four options on nodes with GPUs and more than two CPUs
        placement_group_config={"bundles": [{"CPU": 1}]},
        chat_template_stage=SMALL,
        tokenize_stage=SMALL,
        detokenize_stage=SMALL,
        runtime_env={"env_vars": ENVIRONMENT},
    )
    return build_processor(
        config, preprocess=_sampling, postprocess=_answer, preprocess_map_kwargs=SMALL, postprocess_map_kwargs=SMALL
    )


def _sampling(row: Row) -> Row:
    return {"sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}


def _answer(row: Row) -> Row:
    return {"id": row["id"], "answer": row["generated_text"]}


def rows(questions: range) -> list[Row]:
    """Return a row for each question about each document, in random order."""
    asked = [
        {"id": f"{document}/{question}", "messages": _messages(words(document, 1500), words(100 + question, 20))}
        for document in range(DOCUMENTS)
        for question in questions
    ]
    random.Random(0).shuffle(asked)
    return asked


def _messages(document: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": document}, {"role": "user", "content": question}]


def answers(processor: Processor, model: str, asked: list[Row]) -> dict[str, str]:
    """Return each row's answer by the row's id. model: folder of the model, whose tokenizer `prefix_ordered` uses."""
    ray.data.DataContext.get_current().wait_for_min_actors_s = 600  # start both engines before the first row
    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokens(messages: list[dict[str, str]]) -> list[int]:
        found: list[int] = tokenizer.apply_chat_template(messages, return_dict=False)
        return found

    ordered = prefix_ordered(ray.data.from_items(asked, override_num_blocks=2), tokens, ENGINES, column="messages")
    return {row["id"]: row["answer"] for row in processor(ordered).take_all()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, local_cluster(2), local_pool("default", 1024 * MIB) as pool:
        model = make_model(Path(folder))
        said = answers(build(model, "default"), model, rows(range(8)))
        stats = pool.stats()
        print(f"{len(said)} answers; {stats['keys']} chunks computed and stored, {stats['hits']} read from the pool,")
        print(f"{stats['remote_hits']} of them from the other node")


if __name__ == "__main__":
    main()
