"""An OpenAI-compatible application on Ray Serve: two vLLM engines on two nodes, and a pool between them.

    python examples/serve_vllm.py

starts two Ray nodes on this machine, asks over HTTP, and shows how many tokens came from a cache. In a cluster that has
a pool (`raykv start`), on nodes that can all read the model's folder:

    serve run examples.serve_vllm:build model=/path/to/model

    curl -N localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "llm", "messages": [{"role": "user", "content": "..."}], "max_tokens": 16, "stream": true}'

The first command creates its own model: a small Llama with random weights.
"""

import json
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, build_openai_app

from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB
from raykv.integrations.vllm.router import VLLMPrefixRouter, routed_config

MODEL = "llm"
URL = "http://localhost:8000/"
VOCABULARY = 1024
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine on CPUs then has one process instead of two
    "VLLM_NO_USAGE_STATS": "1",
}


def build(arguments: dict[str, str]) -> serve.Application:
    """Build the application for `serve run`. arguments: `model`, a folder; `pool` (default: "default")."""
    pool = arguments.get("pool", "default")
    router = RequestRouterConfig(
        request_router_class=VLLMPrefixRouter, request_router_kwargs={"pool": pool, "model": MODEL}
    )
    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": arguments["model"]},
        engine_kwargs={
            "kv_transfer_config": routed_config(pool),
            "max_model_len": 2048,
            "block_size": 32,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 256 * MIB,
            "enable_prompt_tokens_details": True,
        },
        deployment_config={"num_replicas": 2, "request_router_config": router},
        # A replica and its engine need two CPUs, which is a whole node. With GPUs, omit the next two arguments.
        placement_group_config={"bundles": [{"CPU": 1}]},
        accelerator_config={"kind": "cpu"},
        runtime_env={"env_vars": ENVIRONMENT},
    )
    return build_openai_app(
        {"llm_configs": [config], "ingress_deployment_config": {"ray_actor_options": {"num_cpus": 0}}}
    )


class Answer(NamedTuple):
    """An answer's text. cached: number of prompt tokens that were not computed. ttft: seconds until the first token."""

    text: str
    cached: int
    ttft: float


def ask(prompt: str, max_tokens: int = 8, url: str = URL, **more: Any) -> Answer:
    """Ask one question, and stream the answer. more: additional fields of the request, such as kv_transfer_params."""
    begin, ttft, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    for event in _stream(prompt, max_tokens, url, more):
        for choice in event["choices"]:
            ttft = ttft or time.perf_counter() - begin
            text += choice["delta"].get("content") or ""
        usage = event.get("usage") or usage
    return Answer(text, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0), ttft)


def _stream(prompt: str, max_tokens: int, url: str, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    headers = {"Content-Type": "application/json"}
    try:
        with urlopen(Request(f"{url}v1/chat/completions", json.dumps(body).encode(), headers)) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))
    except HTTPError as error:
        error.add_note(f"{error.url} answered: {error.read().decode(errors='replace')}")
        raise


def make_model(folder: Path, seed: int = 0) -> str:
    """Make a Llama with random weights. Tokens are words: t3, t4, ... Each has 16 KiB of KV. Returns the folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).bfloat16().save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for message in messages %}<s> {{ message.content }} </s> {% endfor %}",
    ).save_pretrained(folder)
    return str(folder)


def words(seed: int, count: int) -> str:
    return " ".join(f"t{number}" for number in random.Random(seed).choices(range(3, VOCABULARY), k=count))


def shutdown() -> None:
    """Shut down Serve and its replicas, wait until the replicas' vLLM processes have ended, and remove their files."""
    ours = ("LLMServer", "Prefill:", "Decode:", "OpenAiIngress", "TelemetryAgent")  # processes that import vLLM
    named = [(str(process.info["cmdline"]), process) for process in psutil.process_iter(["cmdline"])]
    replicas = [process for name, process in named if any(part in name for part in ours)]
    engines = [child for replica in replicas for child in replica.children(recursive=True)]
    files = {memory.path for process in [*replicas, *engines] for memory in process.memory_maps()}
    serve.shutdown()
    psutil.wait_procs(engines, timeout=60)
    for path in files:  # Ray has killed the process that would have removed them
        if path.startswith(("/dev/shm/psm_", "/dev/shm/sem.mp-")):
            Path(path).unlink(missing_ok=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, local_cluster(2), local_pool("default", 512 * MIB) as pool:
        serve.run(build({"model": make_model(Path(folder))}))
        document = words(0, 1500)

        def show(what: str, answers: list[Answer]) -> None:
            for answer in answers:
                print(f"{what:<12} {answer.cached:>5} tokens cached, first token after {answer.ttft * 1e3:>6,.0f} ms")
            print(f"{'':<12} {pool.stats()['remote_hits']:>5} blocks have crossed nodes so far")

        show("cold", [ask(f"{document} {words(1, 20)}")])
        show("one by one", [ask(f"{document} {words(seed, 20)}") for seed in range(2, 6)])
        with ThreadPoolExecutor(12) as threads:
            show("at once", list(threads.map(lambda seed: ask(f"{document} {words(seed, 20)}"), range(6, 18))))
        shutdown()


if __name__ == "__main__":
    main()
