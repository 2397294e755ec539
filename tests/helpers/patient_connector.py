"""A vLLM connector that gives the pool time: what engines answer is tested, on a machine that may be busy."""

from typing import Any

import raykv.integrations.vllm.waiting
from helpers.pools import patient
from raykv.integrations.vllm import announce


class PatientConnector(announce.RoutedConnector):
    """patience: of its configuration; see `raykv.integrations.vllm.waiting`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        patient()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        raykv.integrations.vllm.waiting.PATIENCE = extra.get("patience", raykv.integrations.vllm.waiting.PATIENCE)
        super().__init__(vllm_config, role, kv_cache_config)


RoutedConnector = PatientConnector  # by the name that ray.serve.llm knows
