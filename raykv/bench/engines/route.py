"""`raykv bench route`: the time that PrefixRouter adds to the routing of a request, beside an empty actor call."""

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from raykv.system.extras import to_install

try:
    from ray import serve
    from ray.serve.config import RequestRouterConfig
except ImportError as error:
    raise ImportError(f"this needs Ray Serve: {to_install('serve')}") from error

import raykv
from raykv.bench.testbed import local_cluster, local_pool, on_node, rows_cache
from raykv.bench.timing import columns, seconds_of
from raykv.config import MIB
from raykv.integrations.serve import ASKED, PrefixRouter, announce
from raykv.protocol.location import KEY_BYTES

POOL, MODEL = "bench-route", "bench"
BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 187, 16, 4096  # a prompt of 3,000 tokens
WARM, ROUNDS = 50, 400


@serve.deployment(num_replicas=2, max_replicas_per_node=1, ray_actor_options={"num_cpus": 0})
class Replica:
    """Answers at once. It stores the prompt on its node, unless another replica has stored it."""

    def __init__(self) -> None:
        cache = rows_cache(raykv.attach(POOL), BLOCK_BYTES, BLOCK_TOKENS, MODEL)
        announce(cache, MODEL)
        cache.store(cache.keys(_prompt(0)), np.zeros((BLOCKS, BLOCK_BYTES), np.uint8))

    def __call__(self, **request: Any) -> None:
        pass


class Echo:
    """Answers as the directory answers a router, without looking anything up."""

    def call(self, keys: bytes) -> dict[str, int]:
        return {"0" * 56: len(keys)}


async def _call(actor: Any) -> float:
    """Seconds of an empty call, awaited on an event loop as by routers."""
    begin = time.perf_counter()
    await actor.call.remote(bytes(ASKED * KEY_BYTES))
    return time.perf_counter() - begin


def run() -> dict[str, Any]:
    """Return median milliseconds and counts over rounds. A round sends each kind of request once, one after another."""
    with local_cluster(2) as (here, _), local_pool(POOL, 64 * MIB):
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        try:
            return _figures(_times(on_node(Echo, here)))
        finally:
            serve.shutdown()


def _times(echo: Any) -> dict[str, list[float]]:
    """Seconds of every kind of call, by round."""
    names = {"pool": POOL, "model": MODEL}
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs=names)
    plain, routed = _deploy("plain"), _deploy("routed", request_router_config=router)
    known, unknown, loop = _prompt(0), _prompt(1), asyncio.new_event_loop()

    def request(handle: Any, **prompt: Any) -> Callable[[], float]:
        return lambda: seconds_of(lambda: handle.remote(**prompt).result())

    calls: dict[str, Callable[[], float]] = {
        "empty": lambda: loop.run_until_complete(_call(echo)),
        "plain": request(plain, token_ids=known),
        "known": request(routed, token_ids=known),
        "unknown": request(routed, token_ids=unknown),
        "plain_without": request(plain),
        "without": request(routed),
    }
    return columns([{name: call() for name, call in calls.items()} for _ in range(WARM + ROUNDS)][WARM:])


def _figures(times: dict[str, list[float]]) -> dict[str, Any]:
    empty = statistics.median(times["empty"])

    def added(name: str, without: str) -> float:
        return statistics.median(a - b for a, b in zip(times[name], times[without], strict=True))

    return {
        "empty_call_ms": empty * 1e3,  # sends as many bytes as a router's call, also on an event loop
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
