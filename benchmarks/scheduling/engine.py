"""Prompt tokens that two replicas of `examples/engine.py` compute, and how long requests wait, by scheduling rule.

    pip install -e '.[test]'
    python -m benchmarks.scheduling.engine [--requests 200] [--rounds 4] [--json]

All requests arrive at once. Each begins with one of three headers of 160 tokens, followed by 48 tokens of its own, and
gets an answer of 2 tokens. The rules are `plan` and first-come-first-served. They run alternately, each with its own
replicas and pool. The floor (baseline) computes each header once, and each request's own tokens.
"""

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import numpy as np
from ray import serve

from benchmarks.scheduling.schedule import first_come
from examples.engine import build
from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB
from raykv.scheduling import plan

HEADERS, HEADER_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 3, 160, 48, 2


def in_order_of_arrival(waiting: Any, running: Any, budget: Any, now: float, patience: float) -> Any:
    return first_come(waiting, running, budget, now)


RULES = {"plan": plan, "first come": in_order_of_arrival}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = run(arguments.requests, arguments.rounds)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"at least {found['least']} tokens must be computed")
    for rule, figures in found["rules"].items():
        print(f"{rule:<12}" + "  ".join(f"{name} {figure}" for name, figure in figures.items()))


def run(requests: int, rounds: int) -> dict[str, Any]:
    """Return medians over rounds, by rule. For the figures, see `measured`."""
    least = HEADERS * HEADER_TOKENS + requests * OWN_TOKENS
    rows: dict[str, list[dict[str, float]]] = {rule: [] for rule in RULES}
    with local_cluster(2):
        serve.start(proxy_location="Disabled")
        for number in range(rounds):
            for rule, schedule in RULES.items():
                rows[rule].append(measured(prompts(requests, seed=number), schedule))
        serve.shutdown()
    medians = {
        rule: {name: round(statistics.median(row[name] for row in of_rule), 2) for name in of_rule[0]}
        for rule, of_rule in rows.items()
    }
    return {"requests": requests, "least": least, "rules": medians}


def prompts(requests: int, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    headers = random.integers(0, 256, (HEADERS, HEADER_TOKENS)).tolist()
    return [headers[i % HEADERS] + random.integers(0, 256, OWN_TOKENS).tolist() for i in range(requests)]


def measured(asked: list[list[int]], schedule: Any) -> dict[str, float]:
    """computed: number of computed prompt tokens. mean_s, p99_s, max_s: seconds until a request's answer."""
    with local_pool("bench-engine", 64 * MIB):
        engines = serve.run(build({"pool": "bench-engine", "schedule": schedule}))
        waits = asyncio.run(_waits(engines, asked))
        computed = sum(engines.broadcast("computed_tokens").results())
        serve.delete("default")
    return {
        "computed": computed,
        "mean_s": float(np.mean(waits)),
        "p99_s": float(np.quantile(waits, 0.99)),
        "max_s": max(waits),
    }


async def _waits(engines: Any, asked: list[list[int]]) -> list[float]:
    begin = time.perf_counter()

    async def wait(prompt: list[int]) -> float:
        await engines.remote(token_ids=prompt, max_tokens=ANSWER_TOKENS)
        return time.perf_counter() - begin

    return list(await asyncio.gather(*map(wait, asked)))


if __name__ == "__main__":
    main()
