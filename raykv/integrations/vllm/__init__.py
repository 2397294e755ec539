"""A connector through which vLLM reads and stores prefixes, loaded by configuration alone."""

from typing import Any

from raykv.integrations.vllm.compat import missing
from raykv.integrations.vllm.connector import RayKVConnector, kv_transfer_config

__all__ = ["RayKVConnector", "kv_transfer_config"]


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
