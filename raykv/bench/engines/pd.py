"""`raykv bench pd`: one engine prefills a prompt, another decodes it. When does the decoder have its first token?"""

import statistics
import tempfile
import time
from collections import Counter
from typing import Any

import ray

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
FLOOR_FACTOR = 1.3
WARM, ROUNDS = 1, 8


def run() -> dict[str, Any]:
    """Return median milliseconds until the decode engine's first token, by the delay of its request.

    The floor is the time of a hit in the decode engine's own prefix cache, plus FLOOR_FACTOR times the time that Ray
    takes to move the same number of bytes from the other node.
    """
    ttft.require_vllm()
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(2, 512 * MIB) as (here, there),
        local_pool(POOL, ARENA_BYTES) as pool,
    ):
        model = ttft.save_model(folder)
        prefill = ttft.engine(there, model, folder, POOL, "kv_producer")
        decode = ttft.engine(here, model, folder, POOL, "kv_consumer")
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
    pool.clear()
    seeds = iter(range(100 * turn, 100 * turn + 100))
    figures = {"cold": _answer(decode, next(seeds)).ms, "unequal": 0.0}
    own = []
    for delay in DELAYS_MS if turn % 2 else DELAYS_MS[::-1]:
        seed = next(seeds)
        _answer(prefill, seed, max_tokens=1)
        time.sleep(delay / 1e3)
        first, again = _answer(decode, seed), _answer(decode, seed)
        figures[f"{delay}"] = first.ms
        figures[f"{delay} computed"] = PROMPT_TOKENS - min(first.cached, PROMPT_TOKENS - 1)
        figures["unequal"] += first.said[0] != again.said[0]
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


def _answer(engine: Any, seed: int, **more: int) -> ttft.Answer:
    answers: list[ttft.Answer] = ray.get(engine.answers.remote(seed, PROMPT_TOKENS, **more))
    return answers[0]
