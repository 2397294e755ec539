"""vLLM reads and stores the outputs of its encoders, such as encoded images, through a connector of their own."""

from raykv.integrations.vllm.encoder.connector import RayKVECConnector, ec_transfer_config

__all__ = ["RayKVECConnector", "ec_transfer_config"]
