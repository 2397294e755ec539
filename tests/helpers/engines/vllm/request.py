"""A request as vLLM's scheduler hands it to a manager."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import ReqContext, get_offload_group_idx

from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.chunks.chunks import Origin
from raykv.integrations.vllm.chunks.tail import Tail


def request(
    name: str,
    keys: list[Any],
    headers: Mapping[str, str] | None = None,
    salt: str | None = None,
    tail: Tail | None = None,
) -> ReqContext:
    """A request for the chunks with these keys, of any groups. tail: the tail of its prompt."""
    context = ReqContext(name)
    groups: dict[int, list[Any]] = {}
    for key in keys:
        groups.setdefault(get_offload_group_idx(key), []).append(key)
    context.set_state(Chain(groups, Origin(name, headers, salt), tail=tail))
    return context
