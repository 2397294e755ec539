"""vLLM reads and stores the outputs of its encoders, of images for instance, through a connector of their own."""

from raykv.integrations.vllm.encoder.connector import RayKVECConnector, ec_transfer_config

__all__ = ["RayKVECConnector", "ec_transfer_config"]
