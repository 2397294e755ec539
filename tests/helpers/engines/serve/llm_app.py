"""An application of ray.serve.llm: models, LoRA adapters in a bucket, and its replicas."""

import json
import os
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from moto.server import ThreadedMotoServer
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.llm import LLMConfig

from examples import serve_vllm
from helpers.engines.lora import save_adapter
from helpers.engines.vllm.ray_engine import with_platform
from helpers.pools import MIB
from raykv.integrations.vllm.router import VLLMPrefixRouter, routed_config

CHUNK = 64  # tokens
PARTS = 8  # of a chunk: one for each KV head
LORA_FOLDER = Path("/tmp/ray/llm/lora/cache")  # where ray.serve.llm keeps adapters
BUCKET = "adapters"


def engine_options(pool: str) -> dict[str, Any]:
    """Options of engines in float32: so KV that was read gives the same tokens as KV that was computed."""
    transfer = routed_config(pool)
    # Then engines of any tensor-parallel size share, and only the model's name keeps engines apart.
    transfer["kv_connector_extra_config"] |= {"canonical_layout": True, "blocks_per_chunk": CHUNK // 32}
    return {
        "kv_transfer_config": transfer,
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 1024,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 128 * MIB,
        "enable_prompt_tokens_details": True,
    }


def over_two_nodes(name: str, model: str, pool: str) -> LLMConfig:
    """Tensor parallel 2 by the Ray executor, with a rank on each node."""
    environment = serve_vllm.ENVIRONMENT | with_platform()
    return LLMConfig(
        model_loading_config={"model_id": name, "model_source": model},
        engine_kwargs=engine_options(pool) | {"tensor_parallel_size": 2},
        deployment_config={"num_replicas": 1, "health_check_period_s": 1},
        placement_group_config={"bundles": [{"GPU": 1, "CPU": 1}] * 2, "strategy": "STRICT_SPREAD"},
        runtime_env={"env_vars": environment},
    )


def data_parallel(name: str, model: str, pool: str, ranks: int) -> LLMConfig:
    """For `build_dp_openai_app`: each rank is a replica, on a node of its own, by the Ray executor."""
    environment = serve_vllm.ENVIRONMENT | with_platform()
    return LLMConfig(
        model_loading_config={"model_id": name, "model_source": model},
        engine_kwargs=engine_options(pool) | {"data_parallel_size": ranks},
        deployment_config={"health_check_period_s": 1, "request_router_config": by_prefix(name, pool)},
        placement_group_config={"bundles": [{"GPU": 1, "CPU": 1}]},
        runtime_env={"env_vars": environment},
    )


def by_prefix(name: str, pool: str) -> RequestRouterConfig:
    return RequestRouterConfig(
        request_router_class=VLLMPrefixRouter, request_router_kwargs={"pool": pool, "model": name}
    )


def autoscaled(name: str, model: str, pool: str, environment: dict[str, str]) -> LLMConfig:
    """One or two replicas, with LoRA adapters. environment: variables that name the adapters' bucket."""
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "look_back_period_s": 2,
        "metrics_interval_s": 0.5,
    }
    return LLMConfig(
        model_loading_config={"model_id": name, "model_source": model},
        engine_kwargs=engine_options(pool) | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2},
        lora_config={"dynamic_lora_loading_path": f"s3://{BUCKET}"},
        deployment_config={
            "autoscaling_config": scaling,
            "request_router_config": by_prefix(name, pool),
        },
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1}]},  # a replica takes two CPUs, all of a node
        runtime_env={"env_vars": serve_vllm.ENVIRONMENT | environment},
    )


class Answer(NamedTuple):
    """text: the generated text. cached: how many tokens of the prompt were not computed."""

    text: str
    cached: int


def ask(url: str, model: str, prompt: str, max_tokens: int = 6) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)
    return Answer(said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"])


class Replica(NamedTuple):
    pid: int
    node: str


def replicas(model: str, server: str = "LLMServer") -> list[Replica]:
    """A model's running replicas. server: name of their class in Ray."""
    (app,) = _get_global_client().get_serve_details()["applications"].values()
    found = app["deployments"][f"{server}:{model}"]["replicas"]
    return [Replica(one["pid"], one["node_id"]) for one in found if one["state"] == "RUNNING"]


def logs() -> str:
    """The logs of all workers of this cluster. Serve writes its own files late."""
    node: Any = ray._private.worker._global_node
    session = Path(node.get_session_dir_path())
    return "".join(log.read_text() for log in session.glob("logs/worker-*.err"))


@contextmanager
def bucket() -> Iterator[dict[str, str]]:
    """An S3 server with an empty bucket. Yields the environment variables that name it."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    environment = {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        put(BUCKET)
        yield environment
    server.stop()


def put(what: str, content: bytes | None = None) -> None:
    """Make a bucket, or with `content` an object in a bucket."""
    url, kind = f"{os.environ['AWS_ENDPOINT_URL']}/{what}", {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(url, content, kind, method="PUT"), timeout=60).close()


@contextmanager
def adapters(folder: Path, *names: str) -> Iterator[None]:
    """Put LoRA adapters for the model of `make_model` into the bucket, each with other random weights."""
    for seed, name in enumerate(names):
        for file in save_adapter(folder / name, seed):
            put(f"{BUCKET}/{name}/{file.name}", file.read_bytes())
    yield
    for name in names:
        shutil.rmtree(LORA_FOLDER / name, ignore_errors=True)
        (LORA_FOLDER / f"{name}.lock").unlink(missing_ok=True)
