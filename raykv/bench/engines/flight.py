"""`raykv bench flight`: sends two engines the same prompt many times at once. How often is the prompt computed?"""

import statistics
import tempfile
import time
from typing import Any, NamedTuple

from raykv.bench.engines import ttft
from raykv.bench.testbed import local_cluster, local_pool, on_node
from raykv.bench.timing import columns
from raykv.config import MIB

POOL = "bench-flight"
PROMPT_TOKENS, REQUESTS = 3000, 8
ARENA_BYTES = 2048 * MIB
WARM, ROUNDS = 2, 8
SETTLE_S = 0.2  # seconds for the blocks of earlier prompts to be stored


class Answers(NamedTuple):
    """Answers to equal prompts. computed: computed tokens. last_ms: milliseconds until all answers have begun."""

    computed: int
    last_ms: float
    said: list[list[int]]


class Engine(ttft.Engine):
    """vLLM with random weights. It receives several requests at once."""

    def ask(self, turn: int, count: int) -> Answers:
        outputs = self.generate(turn, PROMPT_TOKENS, count)
        return Answers(
            computed=sum(PROMPT_TOKENS - (output.num_cached_tokens or 0) for output in outputs),
            last_ms=max(output.metrics.first_token_latency for output in outputs) * 1e3,
            said=[list(output.outputs[0].token_ids) for output in outputs],
        )


def run() -> dict[str, Any]:
    """Return medians: the number of computed prompts, and the milliseconds until all answers have begun.

    alone_ms: milliseconds until the first token of a single request to one engine.
    """
    import ray

    ttft.require_vllm()
    with tempfile.TemporaryDirectory() as folder, local_cluster(2) as nodes, local_pool(POOL, ARENA_BYTES) as pool:
        model = ttft.save_model(folder)
        engines = {
            "pool": [_engine(node, model, POOL, tempfile.mkdtemp(dir=folder)) for node in nodes],
            "without": [_engine(node, model) for node in nodes],
        }
        try:
            found = columns([_round(turn, pool, engines) for turn in range(WARM + ROUNDS)][WARM:])
        finally:
            ray.get([engine.close.remote() for pair in engines.values() for engine in pair])
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "computed_prompts": medians["pool"],
        "computed_prompts_most": max(found["pool"]),
        "without_pool_computed_prompts": medians["without"],
        "floor_prompts": 1,
        "last_first_token_ms": medians["pool_ms"],
        "without_pool_last_first_token_ms": medians["without_ms"],
        "alone_ms": medians["alone_ms"],
        "unequal_answers": int(sum(found["unequal"])),
        "requests": REQUESTS,
        "prompt_tokens": PROMPT_TOKENS,
        "rounds": ROUNDS,
    }


def _round(turn: int, pool: Any, engines: dict[str, list[Any]]) -> dict[str, float]:
    """Run a round. First one engine computes a prompt alone.

    In warm-up rounds, every engine computes a prompt alone, to learn its own speed.
    """
    import ray

    figures: dict[str, float] = {}
    alone = [engines["pool"][turn % 2]] if turn >= WARM else [engine for pair in engines.values() for engine in pair]
    for number, engine in enumerate(alone):
        figures["alone_ms"] = ray.get(engine.ask.remote(1000 * (turn + 1) + number, 1)).last_ms
    said = []
    for name, pair in list(engines.items())[:: 1 if turn % 2 else -1]:
        time.sleep(SETTLE_S)
        answers = ray.get([engine.ask.remote(turn, REQUESTS // len(pair)) for engine in pair])
        figures[name] = sum(answer.computed for answer in answers) / PROMPT_TOKENS
        figures[f"{name}_ms"] = max(answer.last_ms for answer in answers)
        said += [tokens for answer in answers for tokens in answer.said]
    figures["unequal"] = sum(tokens != said[0] for tokens in said)
    pool.clear()
    return figures


def _engine(node_id: str, model: str, pool: str = "", folder: str = "") -> Any:
    return on_node(Engine, node_id, model, folder, pool, runtime_env={"env_vars": ttft.ENVIRONMENT})
