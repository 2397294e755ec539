"""vLLM in Ray Serve: a connector that also announces to routers how prompts become keys."""

from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from raykv.integrations import prefix_lookup
from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.compat import missing
from raykv.integrations.vllm.connector import RayKVConnector


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)


class RoutedConnector(RayKVConnector):
    """RayKVConnector for engines behind a VLLMPrefixRouter. The router finds an engine by its served model name.

    The router finds a LoRA adapter by the adapter's own name, after the first request for the adapter.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._announced: dict[tuple[str, str], bytes] = {}  # digest of an adapter's weights, by name and path
        if self.connector_scheduler is not None:
            self._announce(self._vllm_config.model_config.served_model_name)

    def _name_adapter(self, status: Any) -> bool:
        named = super()._name_adapter(status)
        adapter, weights = status.req.lora_request, status.req_context.get_state(Chain).origin.weights
        if named and self._announced.get((adapter.lora_name, adapter.lora_path)) != weights:
            self._announced[adapter.lora_name, adapter.lora_path] = weights
            lora = {"name": adapter.lora_name, "path": adapter.lora_path, "weights": weights.hex()}
            self.connector_scheduler.manager.in_background(self._announce, adapter.lora_name, lora)
        return named

    def _announce(self, name: str, lora: dict[str, str] | None = None) -> None:
        cache = self.connector_scheduler.manager.first_cache
        if cache is None:  # this engine does not use the pool
            return
        vllm_config = self._vllm_config
        model, algorithm = vllm_config.model_config, vllm_config.cache_config.prefix_caching_hash_algo
        prefix_lookup.announce(
            cache.session.name,
            name,
            root=cache.root.hex(),
            block_tokens=cache.block_tokens,
            hash_tokens=self.connector_scheduler.config.tokens_per_hash,
            hash_algorithm=algorithm,
            hash_seed=resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
            tokenizer=model.tokenizer,
            tokenizer_revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
            lora=lora,
        )
