"""Tokens that an engine computes for a trace in Mooncake's format, and how long requests wait, by scheduling rule.

    python -m benchmarks.scheduling.schedule TRACE [--blocks 5000] [--tokens-per-s 20000] [--slower 1] [--offset 0]

The simulated engine has a prefix cache, but no pool. The rules: `first_come` starts requests in order of arrival, and
allocates blocks and tokens for whole prompts before it learns which blocks are cached. `vllm` starts requests in the
same order, but allocates only tokens that it has to compute. `plan` is `raykv.scheduling.plan`.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any

import numpy as np

from benchmarks.scheduling.simulated_engine import Job, Policy, SimulatedEngine, Speed
from raykv.bench.trace import formats
from raykv.bench.trace.formats import MOONCAKE_TOKENS as BLOCK_TOKENS
from raykv.scheduling import Budget, Request, Scheduled, plan

PATIENCE_S = 60.0


def run(path: str | PathLike[str], blocks: int, tokens_per_s: float, slower: float, offset: int) -> dict[str, Any]:
    """Return one row for each rule: computed tokens, and seconds to the first token (mean, p50, p99, max).

    blocks: number of blocks of the engine's cache, each of 512 tokens. tokens_per_s: the engine's speed. slower: factor
    for the trace's times. offset: number of the first request.
    """
    jobs = read(path, slower)[offset:]
    jobs = [job._replace(arrival=job.arrival - jobs[0].arrival) for job in jobs]
    results = []
    for name, policy in policies().items():
        engine = SimulatedEngine(jobs, blocks, BLOCK_TOKENS, policy, Speed(token_s=1 / tokens_per_s))
        engine.run()
        results.append({"rule": name, "computed_tokens": engine.computed, **summary(engine.waits)})
    return {"requests": len(jobs), "prompt_tokens": sum(job.tokens for job in jobs), "results": results}


def summary(waits: Sequence[float]) -> dict[str, float]:
    """Return the mean, p50, p99 and maximum of waits, in seconds."""
    p50, p99 = np.quantile(waits, [0.5, 0.99])
    row = {"mean_s": np.mean(waits), "p50_s": p50, "p99_s": p99, "max_s": max(waits)}
    return {figure: round(float(value), 2) for figure, value in row.items()}


def policies() -> dict[str, Policy]:
    return {
        "first_come": first_come,
        "vllm": partial(plan, patience=0.0),
        "plan": partial(plan, patience=PATIENCE_S),
    }


def first_come(waiting: list[Request], running: list[Request], budget: Budget, now: float) -> list[Scheduled]:
    """Schedule in order of arrival, and allocate tokens and blocks for whole prompts, as if no block were cached."""
    scheduled = plan([], running, budget, now, 0.0)
    tokens, blocks = budget.tokens - sum(each.num_new_tokens for each in scheduled), budget.blocks
    blocks -= sum(
        _blocks(request.num_tokens, budget) - _blocks(request.num_computed_tokens, budget) for request in running
    )
    for request in sorted(waiting, key=lambda request: request.arrival):
        blocks -= _blocks(request.num_tokens, budget)
        if not tokens or blocks < 0:
            break
        taken = min(request.num_tokens, tokens)
        tokens -= taken
        scheduled.append(Scheduled(request, min(taken, request.num_new_tokens)))
    return scheduled


def read(path: str | PathLike[str], slower: float = 1.0) -> list[Job]:
    """Return a trace's requests. Raises ValueError for a malformed line, or if times or answer lengths are missing."""
    trace = read_trace(path)
    if len(trace.requests) > 1 and not any(request.at for request in trace.requests):
        raise ValueError(f"{path}: no request has a `timestamp`, so all would come at once: give a trace with times")
    if not any(request.output for request in trace.requests):
        raise ValueError(f"{path}: no request has an `output_length`: give a trace with the lengths of answers")
    jobs = []
    for request in trace.requests:
        blocks = request.tokens // BLOCK_TOKENS
        keys = np.array(request.ids[:blocks], np.uint64).view(np.uint8).reshape(blocks, 8)
        jobs.append(Job(keys, request.tokens, request.at * slower, max(1, request.output)))
    return jobs


def read_trace(path: str | PathLike[str]) -> formats.Trace:
    """Read a trace with blocks of BLOCK_TOKENS tokens. Raises ValueError for another block size or a malformed line."""
    trace = formats.read(path)
    if trace.block_tokens != BLOCK_TOKENS:
        raise ValueError(f"{path}: blocks of {trace.block_tokens} tokens, and the engine has blocks of {BLOCK_TOKENS}")
    return trace


def _blocks(tokens: int, budget: Budget) -> int:
    return -(-tokens // budget.block_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--blocks", type=int, default=5000, help="of the engine, of 512 tokens")
    parser.add_argument("--tokens-per-s", type=float, default=20_000.0, help="that the engine computes")
    parser.add_argument("--slower", type=float, default=1.0, help="how many times as long the trace takes")
    parser.add_argument("--offset", type=int, default=0, help="the request to begin with")
    given = parser.parse_args()
    print(json.dumps(run(given.trace, given.blocks, given.tokens_per_s, given.slower, given.offset), indent=2))


if __name__ == "__main__":
    main()
