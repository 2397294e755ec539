"""Ray Serve's LLM applications on a pool: a request goes to the vLLM replica whose node has its prompt's blocks.

LLMConfig(
    model_loading_config={"model_id": "my-model", ...},
    engine_kwargs={"kv_transfer_config": routed_config("default"), ...},
    deployment_config={"request_router_config": RequestRouterConfig(
        request_router_class=VLLMPrefixRouter, request_router_kwargs={"model": "my-model", "pool": "default"}
    )},
)
"""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.serve.request_router import PendingRequest
from transformers import AutoTokenizer
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

from raykv import keys
from raykv.integrations.serve import NO_KEYS, PrefixRouter
from raykv.integrations.vllm.chunks.hints import hint_of
from raykv.integrations.vllm.connector import kv_transfer_config
from raykv.integrations.vllm.serve_llm import register

ROUTED = "RoutedConnector"
register(ROUTED)  # also here, as a YAML application imports only the router before the engines start


def routed_config(pool: str = "default", role: str = "kv_both") -> dict[str, Any]:
    """Return the value of `kv_transfer_config` for engines behind a VLLMPrefixRouter.

    pool, role: as in `kv_transfer_config`.
    """
    register(ROUTED)
    own = {"kv_connector": ROUTED, "kv_connector_module_path": "raykv.integrations.vllm.announce"}
    return kv_transfer_config(pool, role) | own


class VLLMPrefixRouter(PrefixRouter):
    """A PrefixRouter for OpenAI requests: completions with one prompt, and text chats.

    The router tokenizes prompts like the engine, with the model's tokenizer and chat template. For requests with images
    or several prompts, Ray Serve chooses the replica. Requests for a LoRA adapter go to replicas that have loaded it.
    request_router_kwargs: `model`, which is LLMConfig's model_id, and `pool`. The name of a request's session is the
    header x-session-id, or `raykv_session` in its kv_transfer_params.
    """

    def announced(self, request: PendingRequest) -> dict[str, Any] | None:
        adapter = request.metadata.multiplexed_model_id
        return self.lookup.announced_of(adapter) if adapter else super().announced(request)

    def session(self, request: PendingRequest) -> str:
        params = getattr(request.args[0], "kv_transfer_params", None) if request.args else None
        return super().session(request) or hint_of(params).session or ""

    async def keys(self, request: PendingRequest, announced: dict[str, Any]) -> NDArray[np.uint8]:
        body = request.args[0] if request.args else None
        if body is None:
            return NO_KEYS
        return await asyncio.to_thread(prompt_keys, body, announced)


def prompt_keys(body: Any, announced: dict[str, Any]) -> NDArray[np.uint8]:
    """Compute the keys of an OpenAI request's prompt, (chunks, 16) uint8, equal to the engine's keys.

    body: the request. announced: the engine's announcement. Raises ValueError unless the body has exactly one prompt.
    """
    token_ids = _token_ids(body, announced)
    hashes = block_hashes(token_ids, announced, getattr(body, "cache_salt", None))
    last = announced["block_tokens"] // announced["hash_tokens"] - 1
    weights = bytes.fromhex((announced.get("lora") or {}).get("weights", ""))
    return keys.rekey(bytes.fromhex(announced["root"]), [one + weights for one in hashes[last :: last + 1]])


def block_hashes(token_ids: list[int], announced: dict[str, Any], salt: str | None = None) -> list[bytes]:
    """Compute vLLM's hashes of a prompt's full blocks. announced: as in `prompt_keys`. salt: the request's salt."""
    function, size = get_hash_fn_by_name(announced["hash_algorithm"]), announced["hash_tokens"]
    hashes, parent, lora = [], function(announced["hash_seed"]), announced.get("lora")
    adapter = LoRARequest(lora["name"], 1, lora["path"]) if lora else None
    request: Any = SimpleNamespace(mm_features=[], lora_request=adapter, cache_salt=salt, prompt_embeds=None)
    for start in range(0, len(token_ids) - size + 1, size):
        extra, _ = generate_block_hash_extra_keys(request, start, start + size, 0)
        parent = hash_block_tokens(function, parent, token_ids[start : start + size], extra)
        hashes.append(parent)
    return hashes


def _token_ids(body: Any, announced: dict[str, Any]) -> list[int]:
    """Tokenize a request's prompt. Raises ValueError unless the request has exactly one prompt of text or token ids."""
    tokenizer = _tokenizer(announced["tokenizer"], announced["tokenizer_revision"], announced["trust_remote_code"])
    if messages := getattr(body, "messages", None):
        return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            [{**message, "content": _text(message.get("content"))} for message in messages],
            tools=body.tools and [tool.model_dump() for tool in body.tools],
            chat_template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            return_dict=False,
            **(body.chat_template_kwargs or {}),
        )
    prompt = getattr(body, "prompt", None)
    if isinstance(prompt, str):
        return tokenizer(prompt, add_special_tokens=body.add_special_tokens).input_ids  # type: ignore[no-any-return]
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise ValueError("no single prompt")


def _text(content: Any) -> Any:
    """Return the text of a message. content: a string, or a list of parts. Raises ValueError if a part is not text."""
    if not isinstance(content, list):
        return content
    if any(part.get("type") != "text" for part in content):
        raise ValueError("a prompt with more than text")
    return "\n".join(part["text"] for part in content)


@functools.cache
def _tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
