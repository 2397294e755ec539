"""An engine without a model: vLLM's scheduler, and raykv's connector on each of its ranks, in one process.

In place of attention a rank writes, for each token, a digest of all tokens up to it. First the rank checks the digests
of the tokens that were cached.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from raykv.integrations.vllm.connector import RayKVConnector, kv_transfer_config

LAYERS = 4  # layers of the model
HASH = get_hash_fn_by_name("sha256")
_numbers = itertools.count()


class Shape(NamedTuple):
    """spec: KV spec of a layer on a rank. tensor, stages: tensor and pipeline parallel sizes.

    strides: over how many ranks tokens are dealt, `interleave` at a time. latent: all ranks of a stage have equal KV.
    """

    spec: Any
    tensor: int
    strides: int = 1
    interleave: int = 1
    latent: bool = False
    stages: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages


class FakeRank:
    """A rank's connector and pages. number: the rank's."""

    def __init__(self, number: int, config: Any, caches: Any, shape: Shape) -> None:
        self.shape, self.stride = shape, number % shape.strides
        self.head = 0 if shape.latent else number % shape.tensor // shape.strides
        config = copy.deepcopy(config)
        config.parallel_config.rank = number
        config.adjust_dcp_kv_cache_interleave_size(caches)  # vLLM's `ensure_kv_transfer_initialized` does this
        self.interleave = config.parallel_config.cp_kv_cache_interleave_size
        self.connector: Any = RayKVConnector(config, KVConnectorRole.WORKER, caches)
        layers = [name for group in caches.kv_cache_groups for name in group.layer_names]
        self.bytes: int = shape.spec.page_size_bytes // shape.spec.block_size  # bytes of a token in a layer
        size = (caches.num_blocks, shape.spec.block_size, self.bytes)
        self.pages = {name: torch.zeros(size, dtype=torch.int8) for name in layers}
        self.connector.register_kv_caches(self.pages)

    def slot(self, blocks: list[int], position: int) -> tuple[int, int] | None:
        """(page, row) of a token; None for a token that another rank has.

        The rule is that of `ComputeSlotMappingKernel` in vllm/v1/worker/block_table.py.
        """
        shape = self.shape
        block, offset = divmod(position, shape.spec.block_size * shape.strides)
        turn, within = divmod(offset, self.interleave)
        if turn % shape.strides != self.stride:
            return None
        return blocks[block], turn // shape.strides * self.interleave + within

    def step(self, metadata: Any, computed: dict[str, Computed], finished: set[str]) -> ModelRunnerOutput:
        connector = self.connector
        connector.bind_connector_metadata(metadata)
        connector.handle_preemptions(metadata)
        connector.start_load_kv(SimpleNamespace(attn_metadata=None))
        for request in computed.values():
            self._compute(request)
        connector.wait_for_save()
        sent, received = connector.get_finished(finished)
        told = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=list(computed),
            req_id_to_index={name: place for place, name in enumerate(computed)},
            sampled_token_ids=[request.sampled for request in computed.values()],
            kv_connector_output=told,
        )

    def _compute(self, request: Computed) -> None:
        for position in range(request.stop):
            if slot := self.slot(request.blocks, position):
                for name, pages in self.pages.items():
                    right = self._kv(name, request.tokens, position)
                    if position < request.start:
                        assert bytes(pages[slot].numpy()) == right, f"token {position} of {name} on {self.stride}"
                    pages[slot] = torch.frombuffer(bytearray(right), dtype=torch.int8)

    def _kv(self, layer: str, tokens: list[int], position: int) -> bytes:
        seen = hashlib.blake2b(repr((layer, self.head, tokens[: position + 1])).encode()).digest()
        return (seen * (self.bytes // len(seen) + 1))[: self.bytes]


class Computed(NamedTuple):
    """A request in a step, which computes tokens [start, stop). sampled: the next token, if the prompt is done."""

    tokens: list[int]
    blocks: list[int]
    start: int
    stop: int
    sampled: list[int]


class FakeEngine:
    """An engine that forgets its own cache after each request. model: a folder with the model's configuration."""

    def __init__(
        self, pool: str, model: Path, shape: Shape, layers: int = LAYERS, blocks: int = 64, **options: Any
    ) -> None:
        transfer = kv_transfer_config(pool)
        transfer["kv_connector_extra_config"] |= {"blocks_per_chunk": 2}
        config = EngineArgs(
            str(model),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            max_model_len=1024,
            block_size=shape.spec.block_size,
            tensor_parallel_size=shape.tensor,
            pipeline_parallel_size=shape.stages,
            distributed_executor_backend="mp",
            decode_context_parallel_size=shape.strides,
            cp_kv_cache_interleave_size=shape.interleave,
            kv_transfer_config=transfer,
            **options,
        ).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        # On CPUs vLLM turns both off for a latent, and without AMX sets another block size.
        config.cache_config.enable_prefix_caching = config.scheduler_config.enable_chunked_prefill = True
        config.cache_config.block_size = shape.spec.block_size
        each = layers // shape.stages
        names = [
            [f"model.layers.{each * stage + n}.self_attn.attn" for n in range(each)] for stage in range(shape.stages)
        ]
        specs = [dict.fromkeys(of_stage, shape.spec) for of_stage in names for _ in range(shape.tensor)]
        caches = get_kv_cache_configs(config, specs, [each * blocks * shape.spec.page_size_bytes] * shape.ranks)
        of_scheduler = generate_scheduler_kv_cache_config(caches)
        config.cache_config.num_gpu_blocks = of_scheduler.num_blocks
        block, self._hashed = resolve_kv_cache_block_sizes(of_scheduler, config)
        self.ranks = [FakeRank(number, config, of_rank, shape) for number, of_rank in enumerate(caches)]
        outputs = StructuredOutputManager(config)
        self.scheduler = Scheduler(
            config, of_scheduler, outputs, block_size=block, hash_block_size=self._hashed, log_stats=False
        )
        self._cached = dict[str, int]()  # by request, how many tokens were not computed
        self._outputs = KVOutputAggregator.from_connector(self.scheduler.connector, shape.ranks)

    def ask(self, prompt: list[int]) -> int:
        """Compute a prompt, and store it. Returns how many of its tokens came from the pool."""
        init_none_hash(HASH)
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        hasher = get_request_block_hasher(self._hashed, HASH)
        request = Request(f"r{next(_numbers)}", prompt, sampling, None, block_hasher=hasher)
        self.scheduler.add_request(request)
        connector = self.scheduler.connector.connector_scheduler
        while self.scheduler.requests or self.scheduler.finished_req_ids or connector._jobs:
            self.step()
        assert self.scheduler.reset_prefix_cache()
        return self._cached.pop(request.request_id)

    def step(self) -> None:
        step = self.scheduler.schedule()
        computed = {name: self._computed(name, tokens) for name, tokens in step.num_scheduled_tokens.items()}
        metadata, finished = step.kv_connector_metadata, step.finished_req_ids
        said = [rank.step(copy.deepcopy(metadata), computed, finished) for rank in self.ranks]
        self.scheduler.update_from_output(step, self._outputs.aggregate(said))

    def _computed(self, name: str, tokens: int) -> Computed:
        request = self.scheduler.requests[name]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        stop = request.num_computed_tokens  # vLLM's scheduler counts the step's tokens already
        self._cached.setdefault(name, stop - tokens)
        done = stop >= request.num_prompt_tokens
        return Computed(request.prompt_token_ids, list(blocks), stop - tokens, stop, [7] if done else [])

    def close(self) -> None:
        for connector in (self.scheduler.connector, *(rank.connector for rank in self.ranks)):
            connector.shutdown()
