"""`raykv bench pd`: one engine prefills a prompt, another decodes it. When does the decoder have its first token?"""

import statistics
import tempfile
import time
from collections import Counter
from typing import Any, NamedTuple

from raykv.bench.engines import ttft
from raykv.bench.engines.floors import BLOCK_BYTES, Bytes
from raykv.bench.testbed import local_cluster, local_pool, on_node
from raykv.bench.timing import columns
from raykv.config import MIB

POOL = "bench-pd"
PROMPT_TOKENS = 1537
BYTES = PROMPT_TOKENS * BLOCK_BYTES // ttft.BLOCK_TOKENS
ARENA_BYTES = 2048 * MIB
DELAYS_MS = (0, 10, 30, 100, 500)  # milliseconds from the prefill's answer to the decode request
TOKENS = 8
FLOOR_FACTOR = 1.3
WARM, ROUNDS = 1, 8


class Said(NamedTuple):
    """ms: milliseconds until the first token. computed: number of computed prompt tokens. tokens: generated tokens."""

    ms: float
    computed: int
    tokens: list[int]


class Engine(ttft.Engine):
    """vLLM with random weights, as prefill or decode engine."""

    def ask(self, seed: int, tokens: int = TOKENS) -> Said:
        (output,) = self.generate(seed, PROMPT_TOKENS, max_tokens=tokens)
        return Said(
            ms=output.metrics.first_token_latency * 1e3,
            computed=PROMPT_TOKENS - min(output.num_cached_tokens or 0, PROMPT_TOKENS - 1),
            tokens=list(output.outputs[0].token_ids),
        )


def run() -> dict[str, Any]:
    """Return median milliseconds until the decode engine's first token, by the delay of its request.

    The floor is the time of a hit in the decode engine's own prefix cache, plus FLOOR_FACTOR times the time that Ray
    takes to move the same number of bytes from the other node.
    """
    import ray

    ttft.require_vllm()
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(2, 512 * MIB) as (here, there),
        local_pool(POOL, ARENA_BYTES) as pool,
    ):
        model = ttft.save_model(folder)
        prefill, decode = _engine(there, model, folder, "kv_producer"), _engine(here, model, folder, "kv_consumer")
        far, near = on_node(Bytes, there, BYTES), on_node(Bytes, here, BYTES)
        rounds: list[dict[str, float]] = []
        try:
            for turn in range(WARM + ROUNDS):
                rounds.append(_round(turn, pool, prefill, decode))
                rounds[-1]["transfer"] = ray.get(near.seconds.remote(far)) * 1e3
        finally:
            ray.get([engine.close.remote() for engine in (prefill, decode)])
        lanes: Counter[str] = Counter()
        for way in pool.stats()["transports"]:
            lanes.update(way["bytes"])
    return _figures(columns(rounds[WARM:])) | {"bytes_by_transport": dict(lanes)}


def _round(turn: int, pool: Any, prefill: Any, decode: Any) -> dict[str, float]:
    import ray

    pool.clear()
    seeds = iter(range(100 * turn, 100 * turn + 100))
    figures = {"cold": ray.get(decode.ask.remote(next(seeds))).ms, "unequal": 0.0}
    own = []
    for delay in DELAYS_MS if turn % 2 else DELAYS_MS[::-1]:
        seed = next(seeds)
        ray.get(prefill.ask.remote(seed, 1))
        time.sleep(delay / 1e3)
        said, again = ray.get(decode.ask.remote(seed)), ray.get(decode.ask.remote(seed))
        figures[f"{delay}"], figures[f"{delay} computed"] = said.ms, said.computed
        figures["unequal"] += said.tokens != again.tokens
        own.append(again.ms)
    return figures | {"own": statistics.median(own)}


def _figures(found: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in found.items()}
    floor = medians["own"] + FLOOR_FACTOR * medians["transfer"]
    return {
        "results": [
            {
                "sent_after_ms": delay,
                "first_token_ms": medians[f"{delay}"],
                "of_floor": medians[f"{delay}"] / floor,
                "computed_tokens_most": int(max(found[f"{delay} computed"])),
            }
            for delay in DELAYS_MS
        ],
        "cold_ms": medians["cold"],
        "own_hit_ms": medians["own"],
        "transfer_ms": medians["transfer"],
        "floor_ms": floor,
        "unequal_answers": int(sum(found["unequal"])),
        "prompt_tokens": PROMPT_TOKENS,
        "kv_bytes": BYTES,
        "rounds": ROUNDS,
    }


def _engine(node_id: str, model: str, folder: str, role: str) -> Any:
    own = tempfile.mkdtemp(dir=folder)
    return on_node(Engine, node_id, model, own, POOL, role, runtime_env={"env_vars": ttft.ENVIRONMENT})
