"""raykv's connector for vLLM, for tests of the events that it publishes to routers."""

from typing import Any

from raykv.integrations.vllm.announce import RoutedConnector
from raykv.integrations.vllm.events import kv_events, published


class PublishingConnector(RoutedConnector):
    """Takes refresh_s, settle_s and ask_s from its configuration, in place of the modules' constants."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        kv_events.REFRESH_S = extra.get("refresh_s", kv_events.REFRESH_S)
        kv_events.ASK_S = extra.get("ask_s", kv_events.ASK_S)
        published.SETTLE_S = extra.get("settle_s", published.SETTLE_S)
        super().__init__(vllm_config, role, kv_cache_config)
