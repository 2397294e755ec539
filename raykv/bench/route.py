"""`raykv bench route`: what PrefixRouter adds to a request's way to a replica, beside an empty actor call."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

try:
    from ray import serve
    from ray.serve.config import RequestRouterConfig
except ImportError as error:
    raise ImportError("this needs Ray Serve: pip install 'raykv[serve]'") from error

import raykv
from raykv import actors
from raykv.config import MIB
from raykv.integrations.serve import PrefixRouter, announce
from raykv.testbed import local_cluster, local_pool

POOL, MODEL = "bench-route", "bench"
BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 187, 16, 4096  # a prompt of 3,000 tokens
WARM, ROUNDS = 50, 400


@serve.deployment(num_replicas=2, max_replicas_per_node=1, ray_actor_options={"num_cpus": 0})
class Replica:
    """Answers at once. Every replica's node holds the prompt, or offered to."""

    def __init__(self) -> None:
        cache = raykv.attach(POOL).cache(model=MODEL, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
        announce(cache, MODEL)
        cache.store(cache.keys(_prompt(0)), np.zeros((BLOCKS, BLOCK_BYTES), np.uint8))

    def __call__(self, **request: Any) -> None:
        pass


def run() -> dict[str, Any]:
    """Milliseconds and counts: medians over rounds in which every kind of request is sent once, one after another."""
    with local_cluster(2), local_pool(POOL, 64 * MIB):
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        try:
            return _figures(_times())
        finally:
            serve.shutdown()


def _times() -> dict[str, list[float]]:
    """Seconds of every kind of call, by round."""
    router = RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"pool": POOL, "model": MODEL}
    )
    plain = _deploy("plain")
    routed = _deploy("routed", request_router_config=router)
    directory, known, unknown = actors.find_directory(POOL), _prompt(0), _prompt(1)
    calls: dict[str, Callable[[], Any]] = {
        "empty": lambda: ray.get(directory.ping.remote()),
        "plain": lambda: plain.remote(token_ids=known).result(),
        "known": lambda: routed.remote(token_ids=known).result(),
        "unknown": lambda: routed.remote(token_ids=unknown).result(),
        "plain_without": lambda: plain.remote().result(),
        "without": lambda: routed.remote().result(),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM + ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn >= WARM:
                times[name].append(time.perf_counter() - begin)
    return times


def _figures(times: dict[str, list[float]]) -> dict[str, Any]:
    empty = statistics.median(times["empty"])

    def added(name: str, without: str) -> float:
        return statistics.median(a - b for a, b in zip(times[name], times[without], strict=True))

    return {
        "empty_call_ms": empty * 1e3,
        "request_ms": statistics.median(times["plain"]) * 1e3,
        "added_ms": added("known", "plain") * 1e3,
        "added_calls": added("known", "plain") / empty,
        "added_calls_unknown_prompt": added("unknown", "plain") / empty,
        "added_calls_no_prompt": added("without", "plain_without") / empty,
        "prompt_tokens": BLOCKS * BLOCK_TOKENS,
        "rounds": ROUNDS,
    }


def _deploy(name: str, **options: Any) -> Any:
    return serve.run(Replica.options(name=name, **options).bind(), name=name, route_prefix=None)  # type: ignore[attr-defined]


def _prompt(seed: int) -> list[int]:
    return (np.arange(BLOCKS * BLOCK_TOKENS) + 100_000 * seed).tolist()
