"""vLLM in Ray Serve: a connector that also announces to routers how prompts become keys."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from raykv.client import prefix_lookup
from raykv.integrations.vllm.connector import RayKVConnector


class RoutedConnector(RayKVConnector):
    """RayKVConnector for engines behind a VLLMPrefixRouter, which finds them by their served model name."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            cache = self.scheduler.manager._caches[0]  # all ranks store a prompt's blocks on one node
            model, algorithm = vllm_config.model_config, vllm_config.cache_config.prefix_caching_hash_algo
            prefix_lookup.announce(
                cache.session.name,
                model.served_model_name,
                root=cache.root.hex(),
                block_tokens=cache.block_tokens,
                hash_tokens=self.scheduler.config.tokens_per_hash,
                hash_algorithm=algorithm,
                hash_seed=resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
                tokenizer=model.tokenizer,
                tokenizer_revision=model.tokenizer_revision,
                trust_remote_code=model.trust_remote_code,
            )
