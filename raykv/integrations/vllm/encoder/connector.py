"""vLLM's encoder cache on a pool: the first engine that receives an image encodes it for the whole cluster.

Loaded by configuration alone, beside `kv_transfer_config` or without it:

    LLM(..., ec_transfer_config=ec_transfer_config("default"))
"""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.platforms import current_platform

from raykv.client.pool import KVPool
from raykv.integrations.node import attach
from raykv.integrations.vllm.compat import check_version
from raykv.integrations.vllm.encoder.outputs import Outputs, outputs_in
from raykv.integrations.vllm.encoder.scheduler import EncoderScheduler, Step
from raykv.integrations.vllm.encoder.worker import Storing, load
from raykv.integrations.vllm.identity.identity import encoder_identity
from raykv.integrations.vllm.identity.weights import Weights
from raykv.integrations.vllm.supported import check_hashes


def ec_transfer_config(pool: str = "default", role: str = "ec_both") -> dict[str, Any]:
    """Return the value of vLLM's `ec_transfer_config` that attaches an engine's encoder to a pool.

    pool: name of the pool. role: "ec_both" reads and stores. If encoding runs in separate engines, "ec_producer" only
    encodes and stores, and "ec_consumer" reads, and encodes only the outputs that the pool lacks.
    """
    return {
        "ec_connector": "RayKVECConnector",
        "ec_connector_module_path": "raykv.integrations.vllm.encoder",
        "ec_role": role,
        "ec_connector_extra_config": {"pool": pool},
    }


class RayKVECConnector(ECConnectorBase):  # type: ignore[misc]
    """An engine's encoder outputs in a raykv pool. The engine computes an output that the pool lacks."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Raises ValueError for a version or an option of vLLM that raykv does not support."""
        super().__init__(vllm_config, role)
        check(vllm.__version__, vllm_config)
        self._pool: KVPool | None = None
        self._storing: Storing | None = None
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler()
        elif self.is_producer and vllm_config.parallel_config.rank == 0:  # all ranks have equal outputs
            self._storing = Storing(self._outputs(), at_once=not self.is_consumer)

    def _make_scheduler(self) -> EncoderScheduler:
        outputs, weights = self._outputs(), self._extra.get("weights")
        background = outputs.session.background
        return EncoderScheduler(lambda name, tokens: background(outputs.read, name, tokens), Weights(weights))

    def _outputs(self) -> Outputs:
        """Attach to the pool, and return its outputs. Only the scheduler and the rank that stores call this."""
        model = self._vllm_config.model_config
        self._pool = attach(self._extra.get("pool", "default"))
        token_bytes = model.get_inputs_embeds_size() * model.dtype.itemsize
        return outputs_in(self._pool, encoder_identity(self._vllm_config), token_bytes)

    @property
    def _extra(self) -> dict[str, Any]:
        return self._vllm_config.ec_transfer_config.ec_connector_extra_config  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return not self.is_consumer or self._scheduler.is_settled(request.mm_features, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._scheduler.allocate(request.mm_features[index])

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._scheduler.step(scheduler_output)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request.mm_features)
        return False, None

    # ------------------------------------------------------------------ worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        load(encoder_cache, self._get_connector_metadata().files, current_platform.device_type)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self._storing and (name := self._get_connector_metadata().names.get(mm_hash)):
            self._storing.store(name, encoder_cache[mm_hash])

    def shutdown(self) -> None:
        if self._storing:
            self._storing.close()
        if self._pool:
            self._pool.close()


def check(version: str, vllm_config: Any) -> None:
    """Raise ValueError if this engine's encoder can't use a pool. The error's text says which option to set."""
    check_version(version)
    without = "or leave ec_transfer_config out"
    if vllm_config.model_config.is_encoder_decoder:
        raise ValueError("vLLM loads no output of an encoder-decoder model's encoder: leave ec_transfer_config out")
    check_hashes(vllm_config)
    if vllm_config.lora_config and vllm_config.lora_config.enable_tower_connector_lora:
        raise ValueError(
            "enable_tower_connector_lora names an adapter's outputs by the adapter's name, which says nothing of its "
            f"weights: set enable_tower_connector_lora to False, {without}"
        )
    if vllm_config.ec_transfer_config.ec_connector_extra_config.get("weights"):
        return
    changing = {
        "enable_sleep_mode": vllm_config.model_config.enable_sleep_mode,
        "weight_transfer_config": vllm_config.weight_transfer_config,
    }
    for option, is_set in changing.items():
        if is_set:
            raise ValueError(
                f"{option} lets the encoder's weights change, and outputs of other weights must not be read: give the "
                f'path of a file with the weights\' name as "weights" in ec_connector_extra_config, {without}'
            )
