"""A vLLM engine as an actor, for tests in which several engines share a pool."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm import LLM, SamplingParams
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core_client import InprocClient

from helpers.pools import free_port
from raykv.bench.engines import one_process
from raykv.integrations.vllm.chunks.chunks import ChunksToLoad
from raykv.integrations.vllm.connector import RayKVConnector, kv_transfer_config

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # with several engines, threads that spin would take the cores
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
TAKES_FUNCTIONS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # of tests, for workers in processes of their own

# Processes whose engine was closed, by (Ray job, node). A process ends with its job.
_idle: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)


def engine_on(
    node: str, *arguments: Any, apart: bool = False, environment: dict[str, str] | None = None, **options: Any
) -> Any:
    """An Engine as an actor. node: Ray node id. arguments, options: those of Engine.

    The engine takes the process of a closed engine if there is one: to import vLLM takes 6 s, to start it again 0.3.

    apart: run scheduler and worker in processes of their own, which is vLLM's default, and starts in 20 s instead of 8.
    test_vllm tests the default. Engines with several ranks need it, unless Ray starts their workers, and so do tests
    that kill processes. environment: further variables of such an engine.
    """
    if not apart and (idle := _idle[ray.get_runtime_context().get_job_id(), node]):
        actor = idle.pop()
        ray.get(actor.__ray_call__.remote(Engine.__init__, *arguments, **options))
        return actor
    actor = ray.remote(Engine).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={"env_vars": ENVIRONMENT | (environment or {}) if apart else ENVIRONMENT | one_process.ENVIRONMENT},
    )
    return actor.remote(*arguments, **options)


def close_engines(*engines: Any, killed: Sequence[Any] = ()) -> None:
    """End engines. killed: further engines, which a test may have killed along with their node."""
    closing = [engine.close.remote() for engine in (*engines, *killed)]  # all at once: each takes seconds
    for engine, closed in zip(engines, closing[: len(engines)], strict=True):
        if (node := ray.get(closed)) is None:
            ray.kill(engine)
        else:
            _idle[ray.get_runtime_context().get_job_id(), node].append(engine)
    for engine, closed in zip(killed, closing[len(engines) :], strict=True):
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(closed)
        ray.kill(engine)


def processes() -> list[psutil.Process]:
    """Processes that an engine of this process has started, except multiprocessing's resource tracker."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "resource_tracker" not in " ".join(process.cmdline())]


def prompt(seed: int, tokens: int) -> list[int]:
    """Random tokens of the small models' vocabulary."""
    return np.random.default_rng(seed).integers(3, 500, tokens).tolist()  # type: ignore[no-any-return]


def save_model(folder: Path) -> None:
    """Save a small Llama of random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=4096)).save_pretrained(folder)


def save_mla_model(folder: Path) -> None:
    """Save a small DeepSeek of random weights. All its ranks have the same latent."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "initializer_range": 0.1}
    dense = {"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = DeepseekV2Config(**sizes, **heads, **dense, max_position_embeddings=4096)
    DeepseekV2ForCausalLM(config).save_pretrained(folder)


def save_model_of_experts(folder: Path, vocabulary: int = 500) -> None:
    """Save a small Qwen3 of random weights. Its data-parallel ranks exchange tokens in every layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig(**sizes, **heads, **experts, max_position_embeddings=4096)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


Answer = tuple[list[int], int]  # (greedy tokens, how many of the prompt's tokens were cached)


@contextlib.contextmanager
def failing_loads(engine: Any) -> Iterator[None]:
    """In the block, all loads of an engine fail, and leave garbage in its KV."""
    ray.get(engine.fail_loads.remote(True))
    try:
        yield
    finally:
        ray.get(engine.fail_loads.remote(False))


def _fail_loads(_: Any, fail: bool) -> None:
    """In a worker's process. MultiConnector has ours among its connectors."""
    group = get_kv_transfer_group()
    (ours,) = [one for one in getattr(group, "_connectors", [group]) if isinstance(one, RayKVConnector)]
    worker = ours.connector_worker.worker

    def broken(source: ChunksToLoad, target: Any, after: Any) -> int:
        for of_group in worker._pages:
            for pages in of_group.memory:
                pages[target.block_ids] = 7
        return 0

    if fail:
        worker._read = broken
    else:
        del worker._read


class Engine:
    """An engine in float32: so a prompt gives the same tokens whatever it is computed together with."""

    def __init__(
        self,
        pool: str,
        model: str,
        cache_bytes: int,
        tensor_parallel_size: int = 1,
        extra: dict[str, Any] | None = None,
        connector: tuple[str, str] = ("raykv.integrations.vllm", "RayKVConnector"),
        role: str = "kv_both",
        beside: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], []),
        policy: str = "recompute",
        constants: dict[str, float] | None = None,
        **options: Any,
    ) -> None:
        """extra, role: for the connector's configuration. connector: its module and name. options: vLLM's.

        Chunks are verified (`verify_tokens`) by default.
        beside: configurations of connectors before and after it in a MultiConnector. policy: the MultiConnector's, for
        failed loads. constants: values for modules' constants, by name, in this process.
        """
        one_process.prepare()
        for constant in (constants or {}).items():
            pytest.MonkeyPatch().setattr(*constant)
        transfer = kv_transfer_config(pool, role)
        transfer |= dict(zip(("kv_connector_module_path", "kv_connector"), connector, strict=True))
        transfer["kv_connector_extra_config"].update({"verify_tokens": True} | (extra or {}))
        if any(beside):
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            before, after = beside
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {"connectors": [*before, transfer, *after]},
            }
        defaults = {"dtype": "float32", "max_model_len": 3200, "max_num_batched_tokens": 4096, "block_size": 32}
        self.llm = LLM(
            model,
            enforce_eager=True,
            disable_log_stats=False,
            kv_cache_memory_bytes=cache_bytes,
            tensor_parallel_size=tensor_parallel_size,
            **(defaults | {"skip_tokenizer_init": True, "kv_transfer_config": transfer} | options),
        )
        self.open = True

    def _generate(self, asked: Any, sampling: SamplingParams, lora: LoRARequest | None = None) -> list[Any]:
        outputs: list[Any] = self.llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        self.go_on()
        return outputs

    def go_on(self) -> None:
        """Step while requests are left, between calls of this actor: an engine in a process of its own would."""
        core = self.llm.llm_engine.engine_core
        if isinstance(core, InprocClient) and self.open and core.engine_core.scheduler.has_requests():
            self.llm.llm_engine.step()
            ray.get_runtime_context().current_actor.go_on.remote()

    def answer(
        self,
        *prompts: list[int],
        tokens: int = 8,
        cold: bool = False,
        lora: LoRARequest | None = None,
        params: dict[str, Any] | None = None,
    ) -> list[Answer]:
        """The answers to prompts that are asked together. cold: compute the prompts, even if they are cached.

        params: the requests' kv_transfer_params.
        """
        sampling = SamplingParams(
            **{"max_tokens": tokens, "temperature": 0, "detokenize": False, "ignore_eos": True},
            skip_reading_prefix_cache=cold,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._generate(asked, sampling, lora)
        return [(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]

    def look(self, images: list[Any], *prompts: list[int]) -> tuple[list[Answer], int]:
        """(answers to prompts about the images, asked together; how many images the engine encoded for them).

        Returns after the engine has offered their outputs. The engine has `enable_mm_processor_stats`.
        """
        sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
        asked: Any = [{"prompt_token_ids": prompt, "multi_modal_data": {"image": images}} for prompt in prompts]
        outputs = self._generate(asked, sampling)
        if has_ec_transfer() and (storing := get_ec_transfer()._storing):
            storing._thread.submit(int).result()  # behind the outputs that are stored
        of_requests, *_ = self.llm.collective_rpc("get_encoder_timing_stats")  # other ranks encode the same images
        said = [(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]
        return said, sum(of["num_encoder_calls"] for of in of_requests.values())

    def spell(
        self, prompt: list[int], tokens: int = 8, cold: bool = False, salt: str | None = None
    ) -> tuple[list[int], list[float], int]:
        """(tokens that follow, logprob of each, how many of the prompt's tokens were cached). cold: see `answer`."""
        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            logprobs=0,
            skip_reading_prefix_cache=cold,
        )
        asked: Any = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        output = self._generate(asked, sampling)[0]
        said: Any = output.outputs[0]
        logprobs = [step[token].logprob for step, token in zip(said.logprobs, said.token_ids, strict=True)]
        return list(said.token_ids), logprobs, output.num_cached_tokens or 0

    def mix(self, *prompts: list[int], tokens: int) -> dict[int, list[int]]:
        """Ask all prompts at once, and abort every sixth after some steps. Returns tokens by the prompt's number."""
        engine = self.llm.llm_engine
        sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        done, unwanted = {}, iter(range(0, len(prompts), 6))
        while engine.has_unfinished_requests():
            for output in engine.step():
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
            engine.abort_request([str(next(unwanted, ""))])
        self.go_on()
        return {i: said for i, said in done.items() if i % 6}

    def abort(self, prompt: list[int], steps: int) -> None:
        engine, sampling = self.llm.llm_engine, SamplingParams(max_tokens=100, detokenize=False, ignore_eos=True)
        engine.add_request("aborted", {"prompt_token_ids": prompt}, sampling)
        for _ in range(steps):
            engine.step()
        engine.abort_request(["aborted"])
        self.go_on()

    def processes(self) -> list[int]:
        """Ids of the processes that this engine has started. The actor's own process is not among them."""
        return [process.pid for process in processes()]

    def begin(self, prompt: list[int], name: str = "begun", tokens: int = 8) -> None:
        """Begin a prompt, and do not wait: if the engine is killed, vLLM's client would wait for ever."""
        sampling = SamplingParams(max_tokens=tokens, detokenize=False, ignore_eos=True)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self.go_on()

    def unfinished(self) -> int:
        """How many requests are not answered yet."""
        return int(self.llm.llm_engine.get_num_unfinished_requests())

    def end(self, name: str) -> None:
        """Abort a request that was begun."""
        self.llm.llm_engine.abort_request([name])

    def reset(self, connector: bool = False) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def reset_while_it_runs(self, prompt: list[int]) -> bool:
        """Reset, as after a change of weights, while a request runs. Returns whether the request ended afterwards."""
        engine, sampling = self.llm.llm_engine, SamplingParams(max_tokens=40, detokenize=False, ignore_eos=True)
        engine.add_request("running", {"prompt_token_ids": prompt}, sampling)
        while not (outputs := engine.step()):  # until the prompt is computed
            pass
        self.llm.reset_prefix_cache(reset_connector=True)
        began = not outputs[0].finished
        while engine.has_unfinished_requests():
            engine.step()
        self.go_on()
        return began

    def fail_loads(self, fail: bool) -> None:
        """See `failing_loads`."""
        self.llm.collective_rpc(_fail_loads, args=(fail,))

    def load(self, lora: LoRARequest) -> bool:
        return bool(self.llm.llm_engine.add_lora(lora))

    def close(self) -> str | None:
        """End the engine and its processes in order, or they leave files in /dev/shm.

        Returns this process's Ray node if the process can run another engine; else None.
        """
        core = self.llm.llm_engine.engine_core
        self.open = False
        one_process.end(self.llm)
        return ray.get_runtime_context().get_node_id() if isinstance(core, InprocClient) else None

    def metrics(self) -> dict[str, float]:
        return {metric.name: getattr(metric, "value", 0.0) for metric in self.llm.get_metrics()}
