"""ray.serve.llm's own application for prefill apart from decode, with a pool between the engines, on two raylets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from helpers.engines import left_over
from helpers.pools import ROUTED_S, eventually, free_port, settled
from ray import serve

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from examples import serve_pd, serve_vllm
from raykv.integrations.vllm import kv_transfer_config

pytestmark = pytest.mark.timeout(600)
AHEAD = 1000  # longest wait, in multiples of the computing time: the machine may be busy


class App(NamedTuple):
    pool: raykv.KVPool
    url: str


def patient_config(pool: str, role: str) -> dict[str, Any]:
    return kv_transfer_config(pool, role) | {"kv_connector_extra_config": {"pool": pool, "patience": AHEAD}}


@pytest.fixture(scope="module")
def app(
    third_node_for_module: Callable[..., Any],
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[App]:
    third_node_for_module()
    pool, port = start_for_module(cpu_memory=512 << 20, deadline=ROUTED_S), free_port()
    model = serve_vllm.make_model(tmp_path_factory.mktemp("model"))
    with left_over.removed():
        serve.start(proxy_location="HeadOnly", http_options={"port": port})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve_pd, "kv_transfer_config", patient_config)  # of the engine that decodes
            serve.run(serve_pd.build({"pool": pool.name, "model": model, "prefills": "2"}))
        yield App(pool, f"http://127.0.0.1:{port}/")
        serve_vllm.shutdown()


def test_what_one_engine_prefills_the_other_decodes_to_the_last_token(app: App) -> None:
    for words in (1500, 1501, 1530, 100):
        crossed = app.pool.stats()["remote_hits"]
        answer = serve_vllm.ask(serve_vllm.words(words, words), url=app.url)
        tokens = words + 2  # the chat template adds two
        assert answer.cached >= tokens - 1 and len(answer.text.split()) == 8
        assert app.pool.stats()["remote_hits"] > crossed, "the engines are on two nodes"
    again = serve_vllm.ask(serve_vllm.words(100, 100), url=app.url)
    assert again.text == answer.text
    eventually(lambda: settled(app.pool) and app.pool.stats()["intents"] == 0)


def test_a_prompt_is_prefilled_where_it_was_prefilled(app: App) -> None:
    """The engines' own caches have all. An engine that prefills a prompt for the first time would read the pool."""
    documents = [serve_vllm.words(seed, 1000) for seed in range(200, 204)]
    first = [serve_vllm.ask(document, url=app.url).text for document in documents]
    eventually(lambda: settled(app.pool))
    hits = app.pool.stats()["hits"]
    for _ in range(3):
        assert [serve_vllm.ask(document, url=app.url).text for document in documents] == first
    assert app.pool.stats()["hits"] == hits
