"""A request as vLLM's scheduler hands it to a manager."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import ReqContext

from raykv.integrations.vllm.manager import Chain, Origin


def request(
    name: str, keys: list[Any], headers: Mapping[str, str] | None = None, salt: str | None = None
) -> ReqContext:
    """Of the chunks with these keys."""
    context = ReqContext(name)
    context.set_state(Chain(keys, Origin(name, headers, salt)))
    return context
