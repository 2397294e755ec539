"""Calls a connector as vLLM's second model runner does. That runner itself needs a GPU."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.forward_context import get_forward_context, override_forward_context, set_forward_context
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin


def take_over(engine: Any) -> None:
    """Have the engine's worker call its connector as the second runner does: after the forward context has ended.

    engine: a helpers.engines.vllm.engine.Engine. `engine.steps` gets (whether it computed, whether it paused, how) for
    each step. how: as the runner begins a step whose model is one CUDA graph ("FULL"), pieces, or no graph, in turn.
    """
    connector = get_kv_transfer_group()
    active = ActiveKVConnector.__new__(ActiveKVConnector)  # its constructor would register the KV caches again
    active.vllm_config, active.kv_connector = connector._vllm_config, connector
    active._pending_load_kwargs, active._disabled = None, False
    worker, paused = connector.connector_worker.worker, []
    pause = worker.pause
    engine.steps = []

    def counted() -> None:
        paused.append(True)
        pause()

    worker.pause = counted
    modes = itertools.cycle([CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE])

    def begin(scheduler_output: Any, mode: CUDAGraphMode) -> None:
        metadata = get_forward_context().attn_metadata
        scheduled = scheduler_output.num_scheduled_tokens
        batch = SimpleNamespace(idx_mapping=None, req_ids=list(scheduled), num_tokens=sum(scheduled.values()))
        if mode is CUDAGraphMode.FULL:
            with override_forward_context(None):
                active.pre_forward(scheduler_output, batch, attn_metadata=metadata)
        else:
            with set_forward_context(metadata, active.vllm_config, cudagraph_runtime_mode=mode):
                active.pre_forward(scheduler_output, batch)

    @contextmanager
    def step(scheduler_output: Any, **_: Any) -> Iterator[KVConnectorOutput]:
        output, before, mode = KVConnectorOutput(), len(paused), next(modes)
        begin(scheduler_output, mode)
        yield output
        active.finish_forward()
        with override_forward_context(None):
            vars(output).update(vars(active.post_forward(scheduler_output.finished_req_ids)))
        engine.steps.append((scheduler_output.total_num_scheduled_tokens > 0, len(paused) > before, mode.name))

    engine.before = vars(KVConnectorModelRunnerMixin)["_get_kv_connector_output"]
    KVConnectorModelRunnerMixin._get_kv_connector_output = staticmethod(step)


def steps(engine: Any) -> list[tuple[bool, bool, str]]:
    """`engine.steps`: see `take_over`."""
    return list(engine.steps)


def give_back(engine: Any) -> None:
    """Undo `take_over`, for the next engine of this process."""
    KVConnectorModelRunnerMixin._get_kv_connector_output = engine.before
