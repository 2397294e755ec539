"""Batch inference with Ray Data: two vLLM engines on two nodes, and a pool between them.

    python -m examples.batch_ray_data

starts two Ray nodes on this machine and asks 32 questions about 4 documents, which are the system prompts. What one
engine has computed of a document the other one reads, and so do those of the next job. The model is a small Llama of
random weights, made on the spot.
"""

import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.data.llm import Processor, build_processor, vLLMEngineProcessorConfig

from examples.serve_vllm import ENVIRONMENT, make_model, words
from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB
from raykv.integrations.vllm import kv_transfer_config

DOCUMENTS = 4
SMALL = {"num_cpus": 0.1}
Row = dict[str, Any]


def build(model: str, pool: str | None, engines: int = 2) -> Processor:
    """A processor of rows with `document` and `question`. pool: its name; None: every engine is by itself."""
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
        batch_size=4,
        max_concurrent_batches=1,
        # with GPUs, and more than two CPUs a node, leave these out
        placement_group_config={"bundles": [{"CPU": 1}]},
        chat_template_stage=SMALL,
        tokenize_stage=SMALL,
        detokenize_stage=SMALL,
        runtime_env={"env_vars": ENVIRONMENT},
    )
    return build_processor(
        config, preprocess=_messages, postprocess=_answer, preprocess_map_kwargs=SMALL, postprocess_map_kwargs=SMALL
    )


def _messages(row: Row) -> Row:
    messages = [{"role": "system", "content": row["document"]}, {"role": "user", "content": row["question"]}]
    return {"messages": messages, "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}


def _answer(row: Row) -> Row:
    return {"id": row["id"], "answer": row["generated_text"]}


def rows(questions: range) -> list[Row]:
    """These questions about every document, one document after the other."""
    return [
        {"id": f"{document}/{question}", "document": words(document, 1500), "question": words(100 + question, 20)}
        for document in range(DOCUMENTS)
        for question in questions
    ]


def answers(processor: Processor, asked: list[Row]) -> dict[str, str]:
    """What is said to each row, by its id."""
    ray.data.DataContext.get_current().wait_for_min_actors_s = (
        600  # so few rows are answered before a second engine runs
    )
    said = processor(ray.data.from_items(asked, override_num_blocks=len(asked) // 4))
    return {row["id"]: row["answer"] for row in said.take_all()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, local_cluster(2), local_pool("default", 1024 * MIB) as pool:
        said = answers(build(make_model(Path(folder)), "default"), rows(range(8)))
        stats = pool.stats()
        print(f"{len(said)} answers; {stats['keys']} chunks computed and stored, {stats['hits']} read from the pool,")
        print(f"{stats['remote_hits']} of them from the other node")


if __name__ == "__main__":
    main()
