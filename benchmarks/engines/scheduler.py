"""Milliseconds that a step of vLLM's scheduler takes under load, and the connector's share of this time.

    python benchmarks/engines/scheduler.py [--rounds 4] [--json]

The engine's loop runs in this process, so that each call of the scheduler and of its connector can be timed. One engine
has no pool; its scheduler's time is the floor (baseline). The other engine has a pool and KV events, and is timed
twice. In the first timing, the directory always answers. In the second timing, a SIGSTOP stops the directory in charge
before each round, and the other directory takes over. A round consists of 24 concurrent requests, with prompts of 300
to 1,500 tokens and answers of 30 tokens. Half of the prompts have a common prefix.
"""

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import ray

from raykv.bench.engines import one_process, ttft
from raykv.bench.testbed import local_cluster, local_pool
from raykv.bench.timing import timed
from raykv.cluster import named_actors
from raykv.config import MIB

POOL, ARENA_BYTES = "bench-scheduler", 512 * MIB
REQUESTS, TOKENS = 24, 30
TRIES, TRY_S = 60, 5.0  # maximum number of tries to reach both directories; seconds for their answers
STEP = ("schedule", "update_from_output")  # the scheduler's methods that a step calls
CONNECTOR = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "take_events", "request_finished", "has_pending_push_work"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(ttft.ENVIRONMENT | one_process.ENVIRONMENT)
    one_process.prepare()
    with tempfile.TemporaryDirectory() as folder, local_cluster(1) as _, local_pool(POOL, ARENA_BYTES) as pool:
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # else vLLM may join another cluster
        model = ttft.save_model(folder)
        found = {"without": measured(engine(model, None), arguments.rounds, 0)}
        pooled = engine(model, POOL)
        found["answers"] = measured(pooled, arguments.rounds, 1000)
        found["stopped"] = measured(pooled, arguments.rounds, 2000, before_round=partial(stop_directory, pool.name, []))
    if arguments.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(name, " ".join(f"{what} {value:.3f}" for what, value in figures.items()))


def engine(model: str, pool: str | None) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig

    from raykv.integrations.vllm import kv_transfer_config

    events = KVEventsConfig(enable_kv_cache_events=True, endpoint="inproc://events", buffer_steps=1000)
    return LLM(
        model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        block_size=32,
        distributed_executor_backend="mp",
        enforce_eager=True,
        disable_log_stats=False,
        kv_cache_memory_bytes=512 * MIB,
        kv_transfer_config=kv_transfer_config(pool) if pool else None,
        kv_events_config=events if pool else None,
    )


def stop_directory(pool: str, last: list[int]) -> None:
    """Kill the process in `last`, if any. Then stop the directory in charge, and add its process id to `last`."""
    if last:
        with contextlib.suppress(ProcessLookupError):
            os.kill(last.pop(), signal.SIGKILL)
    for _ in range(TRIES):
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # the directory is being restarted
            both = [named_actors.find(named_actors.directory_name(pool, number)) for number in (1, 2)]
            ray.get([each.ping.remote() for each in both], timeout=TRY_S)
            last.append(ray.get(named_actors.find_directory(pool).ping.remote(), timeout=TRY_S))
            return os.kill(last[0], signal.SIGSTOP)
        time.sleep(1.0)
    raise TimeoutError(f"{TRIES} times pool {pool!r} had no two directories that answer")


def measured(llm: Any, rounds: int, seed: int, before_round: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Return milliseconds of the scheduler's and the connector's calls: median, 99th percentile, maximum, sum."""
    from vllm import SamplingParams

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    times: dict[str, list[float]] = defaultdict(list)
    random = np.random.default_rng(seed)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        for name in STEP:
            stack.enter_context(timed(scheduler, name, times["step"]))
        for name in CONNECTOR if scheduler.connector is not None else ():
            stack.enter_context(timed(scheduler.connector, name, times["connector"]))
        begin = time.perf_counter()
        for number in range(rounds + 1):
            if number == 1:  # round 0 is a warm-up
                begin = time.perf_counter()
                for spent in times.values():
                    spent.clear()
            before_round()
            common = random.integers(3, 8000, 600).tolist()
            prompts: list[Any] = []
            for i in range(REQUESTS):
                own = random.integers(3, 8000, int(random.integers(300, 900))).tolist()
                prompts.append({"prompt_token_ids": common + own if i % 2 else own})
            llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
    found = {"seconds": seconds, "steps": float(len(times["step"]) // len(STEP))}
    for name, spent in times.items():
        median, last = np.percentile(spent, (50, 99)) * 1e3
        found |= {f"{name}_p50": median, f"{name}_p99": last, f"{name}_max": max(spent) * 1e3}
        found[f"{name}_sum"] = sum(spent) * 1e3
    return found


if __name__ == "__main__":
    main()
