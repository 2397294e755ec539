"""An OpenAI-compatible application on Ray Serve: prefill engines and a decode engine of vLLM, and a pool between them.

    python -m examples.serve_pd

starts two Ray nodes on this machine, asks over HTTP, and shows how much of each prompt the second engine computed. In a
cluster that has a pool (`raykv start`), on nodes that can all read the model's folder:

    serve run examples.serve_pd:build model=/path/to/model

    curl -N localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "llm", "messages": [{"role": "user", "content": "..."}], "max_tokens": 16, "stream": true}'

All engines are attached to the pool, and do not know each other. So there are no ports to choose, and no engine
prefills a prompt that another engine has prefilled. Among several prefill engines (`prefills=2`), the router chooses
the engine with the least work to do. The first command creates its own model: a small Llama with random weights.
"""

import tempfile
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, build_pd_openai_app

from examples.serve_vllm import ENVIRONMENT, MODEL, ask, make_model, shutdown, words
from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB
from raykv.integrations.vllm import kv_transfer_config
from raykv.integrations.vllm.router import VLLMPrefixRouter, routed_config


def build(arguments: dict[str, str]) -> serve.Application:
    """Build the application for `serve run`.

    arguments: `model`, a folder; `pool` (default: "default"); `prefills` (default: "1").
    """
    pool = arguments.get("pool", "default")

    def config(transfer: dict[str, Any], **deployment: Any) -> LLMConfig:
        return LLMConfig(
            model_loading_config={"model_id": MODEL, "model_source": arguments["model"]},
            engine_kwargs={
                "kv_transfer_config": transfer,
                "dtype": "float32",  # with bfloat16, some CPUs answer differently if less of a prompt is computed
                "max_model_len": 2048,
                "block_size": 32,
                "enforce_eager": True,
                "kv_cache_memory_bytes": 256 * MIB,
                "enable_prompt_tokens_details": True,
            },
            deployment_config={"num_replicas": 1} | deployment,
            # A replica and its engine need two CPUs, which is a whole node. With GPUs, omit the next two arguments.
            placement_group_config={"bundles": [{"CPU": 1}]},
            accelerator_config={"kind": "cpu"},
            runtime_env={"env_vars": ENVIRONMENT},
        )

    router = RequestRouterConfig(
        request_router_class=VLLMPrefixRouter, request_router_kwargs={"model": MODEL, "pool": pool}
    )
    prefills = int(arguments.get("prefills", 1))
    ingress: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}}
    return build_pd_openai_app(
        {
            "prefill_config": config(
                routed_config(pool, "kv_producer"), num_replicas=prefills, request_router_config=router
            ),
            "decode_config": config(kv_transfer_config(pool, "kv_consumer")),
            "ingress_deployment_config": ingress,
        }
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, local_cluster(2), local_pool("default", 512 * MIB) as pool:
        serve.run(build({"model": make_model(Path(folder))}))
        for seed in range(4):
            prompt = words(seed, 1500 + seed)
            answer = ask(prompt)
            tokens = len(prompt.split()) + 2  # the chat template adds two tokens
            computed = max(1, tokens - answer.cached)  # the last token is always computed
            print(f"{tokens:>5} tokens, of which the decode engine computed {computed:>4}")
        print(f"{pool.stats()['remote_hits']:>5} blocks have crossed nodes")
        shutdown()


if __name__ == "__main__":
    main()
