"""A vLLM connector that gives the pool time: what engines answer is tested, on a machine that may be busy."""

from typing import Any

from helpers.pools import patient
from raykv.integrations.vllm import announce


class PatientConnector(announce.RoutedConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        patient()
        super().__init__(vllm_config, role, kv_cache_config)


RoutedConnector = PatientConnector  # by the name that ray.serve.llm knows
