"""A connector through which vLLM reads and stores the outputs of its encoders, such as encoded images."""

from raykv.integrations.vllm.encoder.connector import RayKVECConnector, ec_transfer_config

__all__ = ["RayKVECConnector", "ec_transfer_config"]
