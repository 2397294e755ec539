"""vLLM in ray.serve.llm on a pool: the router makes the same keys for a prompt's blocks as the engine.

tests/documented checks over HTTP that requests go where their blocks are.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.project import pages

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from ray._common.utils import import_attr
from ray.serve._private.common import RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMServingArgs, build_openai_app
from ray.serve.request_router import PendingRequest
from ray.serve.schema import ServeDeploySchema
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_none_hash_seed, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from examples import serve_vllm
from raykv import keys
from raykv.integrations.vllm.chunks.hints import SESSION
from raykv.integrations.vllm.router import VLLMPrefixRouter, block_hashes, prompt_keys, routed_config
from raykv.integrations.vllm.worker.loads import digest_of, files_of

pytestmark = pytest.mark.timeout(600)
ROOT = keys.root(b"secret", model="m")
BLOCK, CHUNK = 32, 64  # tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return serve_vllm.make_model(tmp_path_factory.mktemp("model"))


def announced(model: str, algorithm: str = "sha256") -> dict[str, Any]:
    init_none_hash(get_hash_fn_by_name(algorithm))
    return {
        "root": ROOT.hex(),
        "block_tokens": CHUNK,
        "hash_tokens": BLOCK,
        "hash_algorithm": algorithm,
        "hash_seed": get_none_hash_seed(),
        "tokenizer": model,
        "tokenizer_revision": None,
        "trust_remote_code": False,
    }


def hashes_of_vllm(
    token_ids: list[int], algorithm: str = "sha256", salt: str | None = None, lora: LoRARequest | None = None
) -> list[bytes]:
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name(algorithm))
    sampling = SamplingParams(max_tokens=1)
    named: dict[str, Any] = {"cache_salt": salt, "lora_request": lora}
    request = Request("r", token_ids, sampling, pooling_params=None, block_hasher=hasher, **named)
    return list(request.block_hashes)


def test_serve_takes_the_configuration_of_deploy() -> None:
    given = ServeDeploySchema.model_validate(yaml.safe_load((pages.ROOT / "deploy/serve.yaml").read_text()))
    (application,) = given.applications
    assert import_attr(application.import_path) is build_openai_app
    (config,) = LLMServingArgs.model_validate(application.args).llm_configs
    assert config.engine_kwargs["kv_transfer_config"] == routed_config("default")
    router = RequestRouterConfig(**config.deployment_config["request_router_config"])
    assert router.get_request_router_class() is VLLMPrefixRouter
    assert router.request_router_kwargs == {"pool": "default", "model": config.model_id}


@pytest.mark.parametrize(
    ("header", "params", "session"),
    [("", None, ""), ("", {"other": 1}, ""), ("a", None, "a"), ("", {SESSION: "b"}, "b"), ("a", {SESSION: "b"}, "a")],
)
def test_a_router_knows_a_session_by_the_header_or_by_its_hint(
    header: str, params: dict[str, Any] | None, session: str
) -> None:
    """Ray's ingress reads the header x-session-id, and hands it on."""

    async def known() -> str:
        body = CompletionRequest(model="m", prompt="p", kv_transfer_params=params)
        asked = PendingRequest([body], {}, RequestMetadata("", "", session_id=header))
        return VLLMPrefixRouter.__new__(VLLMPrefixRouter).session(asked)

    assert asyncio.run(known()) == session


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_block_hashes_equal_the_engines_own(algorithm: str, salt: str | None) -> None:
    prompt = list(range(5 * BLOCK + 7))
    said = announced("", algorithm)
    assert block_hashes(prompt, said, salt) == hashes_of_vllm(prompt, algorithm, salt) != []


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_an_adapter_has_the_block_hashes_of_the_engine(salt: str | None) -> None:
    prompt, lora = list(range(5 * BLOCK + 7)), {"name": "llm:a", "path": "/adapters/a", "weights": ""}
    said = announced("") | {"lora": lora}
    expected = hashes_of_vllm(prompt, salt=salt, lora=LoRARequest(lora["name"], 3, lora["path"]))
    assert block_hashes(prompt, said, salt) == expected
    assert not {*expected} & {*hashes_of_vllm(prompt, salt=salt)}


def test_other_weights_of_an_adapter_have_other_keys(model: str, tmp_path: Path) -> None:
    said, request = announced(model), CompletionRequest(model="llm", prompt=list(range(3, 3 + 2 * CHUNK)))
    (tmp_path / "adapter_config.json").write_text("{}")
    found = set()
    for number, weights in enumerate((b"one", b"two"), 1):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        adapter, digest = LoRARequest("llm:a", number, str(tmp_path)), digest_of(files_of(str(tmp_path)))
        assert digest
        lora = {"name": adapter.lora_name, "path": adapter.lora_path, "weights": digest.hex()}
        found.add(prompt_keys(request, said | {"lora": lora}).tobytes())
    assert len(found) == 2


def test_openai_requests_have_the_keys_of_their_tokens(model: str) -> None:
    text, ids = serve_vllm.words(0, 200), [int(word[1:]) for word in serve_vllm.words(0, 200).split()]
    said = announced(model)

    def expected(token_ids: list[int], salt: str | None = None) -> bytes:
        return keys.rekey(ROOT, hashes_of_vllm(token_ids, salt=salt)[1::2]).tobytes()

    def got(request: Any) -> bytes:
        return prompt_keys(request, said).tobytes()

    assert got(CompletionRequest(model="llm", prompt=text)) == expected(ids)
    assert got(CompletionRequest(model="llm", prompt=ids)) == expected(ids)
    assert got(CompletionRequest(model="llm", prompt=ids, cache_salt="x")) == expected(ids, "x")
    for content in (text, [{"type": "text", "text": text}]):
        chat = ChatCompletionRequest(model="llm", messages=[{"role": "user", "content": content}])
        assert got(chat) == expected([1, *ids, 2])
    assert got(CompletionRequest(model="llm", prompt="t5 t6")) == b""
    for other in ([text, text], [ids, ids]):
        with pytest.raises(ValueError, match="no single prompt"):
            got(CompletionRequest(model="llm", prompt=other))
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(ValueError, match="more than text"):
        got(ChatCompletionRequest(model="llm", messages=[{"role": "user", "content": image}]))
