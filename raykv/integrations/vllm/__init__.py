"""vLLM reads and stores prefixes by way of a connector, loaded by configuration alone."""

from raykv.integrations.vllm.connector import RayKVConnector, kv_transfer_config

__all__ = ["RayKVConnector", "kv_transfer_config"]
