"""A text generator on Ray Serve: two transformers engines on two nodes, and a pool between them.

    python examples/serve_transformers.py

starts two Ray nodes on this machine, asks over HTTP, and shows which replica answered and where the prefix came from.
In a cluster that has a pool (`raykv start`):

    serve run examples.serve_transformers:build

    curl -N localhost:8000/ -H 'Content-Type: application/json' -d '{"prompt": "...", "max_tokens": 16}'

The model is a small Llama with random weights, and each byte is a token. Put your own model in `Engine.__init__`.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request, urlopen

import ray
import torch
from fastapi import FastAPI, Header
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, model_validator
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from transformers import LlamaConfig, LlamaForCausalLM

import raykv
from raykv.bench.testbed import local_cluster, local_pool
from raykv.config import MIB
from raykv.integrations.serve import PrefixRouter, announce
from raykv.integrations.transformers import model_cache, prefill

MODEL, POSITIONS = "random-llama", 4096
URL = "http://localhost:8000/"
app = FastAPI()


@serve.deployment(num_replicas=2, max_replicas_per_node=1, ray_actor_options={"num_cpus": 1})
class Engine:
    """Streams the greedy tokens that follow a prompt."""

    def __init__(self, pool: str) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 256}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": POSITIONS}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
        self.cache = model_cache(raykv.attach(pool), self.model, name=MODEL)
        announce(self.cache, MODEL)

    async def __call__(self, token_ids: list[int], max_tokens: int) -> AsyncIterator[dict[str, Any]]:
        start = await asyncio.to_thread(prefill, self.model, self.cache, token_ids)
        node = ray.get_runtime_context().get_node_id()
        yield {"node": node, "pool_tokens": start.pool_tokens, "from": start.nodes}
        token, past = int(start.logits.argmax()), start.past_key_values
        for _ in range(max_tokens):
            yield {"token": token}
            token = await asyncio.to_thread(self._next, token, past)

    @torch.no_grad()
    def _next(self, token: int, past: Any) -> int:
        return int(self.model(torch.tensor([[token]]), past_key_values=past).logits[0, -1].argmax())


class Question(BaseModel):
    """The body of a request. FastAPI rejects invalid bodies with status 422 and the reason."""

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)

    @model_validator(mode="after")
    def fits(self) -> "Question":
        if len(self.prompt.encode()) + self.max_tokens > POSITIONS:
            raise ValueError(f"prompt and max_tokens are more than the {POSITIONS} bytes that the model takes")
        return self


async def _lines(answer: Any) -> AsyncIterator[str]:
    async for item in answer:
        yield json.dumps(item) + "\n"


@serve.deployment(max_ongoing_requests=100)  # with the default of 5, one engine would get all requests
@serve.ingress(app)
class Frontend:
    """Tokenizes text, and streams JSON lines: first the cache hit, then each token."""

    def __init__(self, engine: DeploymentHandle[Engine]) -> None:
        self.engine = engine.options(stream=True)

    @app.post("/")
    async def answer(self, question: Question, x_session_id: Annotated[str, Header()] = "") -> StreamingResponse:
        engine = self.engine.options(session_id=x_session_id)  # the router keeps a session at its replica
        answer = engine.remote(token_ids=list(question.prompt.encode()), max_tokens=question.max_tokens)
        return StreamingResponse(_lines(answer), media_type="application/x-ndjson")


def build(arguments: dict[str, str]) -> serve.Application:
    """Build the application for `serve run`. arguments: `pool` (default: "default")."""
    pool = arguments.get("pool", "default")
    router = RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"pool": pool, "model": MODEL}
    )
    engine = Engine.options(request_router_config=router).bind(pool)  # type: ignore[attr-defined]
    return Frontend.bind(engine)  # type: ignore[attr-defined]


def ask(prompt: str, max_tokens: int = 16, url: str = URL, session: str = "") -> Iterator[dict[str, Any]]:
    """Yield the lines of the application's answer as they arrive."""
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()
    with urlopen(Request(url, body, {"Content-Type": "application/json", "x-session-id": session})) as answer:
        yield from map(json.loads, answer)


def main() -> None:
    with local_cluster(2) as nodes, local_pool("default", 512 * MIB):
        serve.run(build({}))
        document = Path(os.__file__).read_text(encoding="utf-8")[:3000]

        def show(question: str) -> str:
            begin = time.perf_counter()
            lines = ask(f"{document}\n\n{question}\n")
            found, _first = next(lines), next(lines)
            ttft = time.perf_counter() - begin
            sources = ", ".join(f"node {nodes.index(node)}" for node in found["from"]) or "nowhere"
            return (
                f"{question:<14} answered by node {nodes.index(found['node'])} after {ttft * 1e3:>6,.0f} ms, "
                f"{found['pool_tokens']:>5} tokens from {sources}; {sum(1 for _ in lines) + 1} tokens streamed"
            )

        for question in ("What is this?", "Who wrote it?", "And when?"):
            print(show(question))
        print("... and twelve at once, which one node alone would take long for:")
        with ThreadPoolExecutor(12) as threads:
            print(*threads.map(show, (f"Question {number}" for number in range(12))), sep="\n")
        serve.shutdown()


if __name__ == "__main__":
    main()
