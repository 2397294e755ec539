"""ray.serve.llm on a pool, over HTTP: ranks on two nodes, replicas that come and go, two models, LoRA adapters."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psutil
import pytest
from helpers.engines import left_over
from helpers.pools import ROUTED_S, eventually, free_port, settled
from ray import serve

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.serve import llm_app
from helpers.engines.serve.llm_app import CHUNK, PARTS, Answer, replicas
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.utils.registry import ComponentRegistry
from ray.serve.llm import build_openai_app
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from examples import serve_vllm
from raykv.integrations.prefix_lookup import PrefixLookup
from raykv.integrations.vllm import kv_transfer_config
from raykv.integrations.vllm.router import prompt_keys
from raykv.protocol.clients import Located

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
WIDE, SCALED = "wide", "scaled"
CHUNKS = 3
LONG = CHUNKS * CHUNK + 20  # tokens of a prompt


class App(NamedTuple):
    pool: raykv.KVPool
    url: str
    adapters: list[str]  # names of models that are adapters of SCALED
    places: list[str]  # nodes with a GPU

    def ask(self, model: str, document: int, max_tokens: int = 6) -> Answer:
        return llm_app.ask(self.url, model, serve_vllm.words(document, LONG), max_tokens)

    def computed(self, model: str, document: int) -> Answer:
        """The answer to a new document, once all of its chunks are in the pool."""
        before = self.pool.stats()["keys"]
        answer = self.ask(model, document)
        assert answer.cached == 0
        eventually(lambda: self.pool.stats()["keys"] == before + CHUNKS * PARTS)
        return answer

    def ready(self, nodes: list[str]) -> list[int]:
        stats = self.pool.stats()["nodes"]
        return [stats[node]["ready"] for node in nodes]

    def forget(self, model: str, document: int) -> None:
        """Empty the engine's own cache; the engine refuses while it stores. document: one that it has computed."""
        eventually(lambda: self._reads(model, document))

    def _reads(self, model: str, document: int) -> bool:
        handle = serve.get_deployment_handle(f"LLMServer:{model}", "default")
        handle.reset_prefix_cache.remote().result(timeout_s=60)
        hits = self.pool.stats()["hits"]
        self.ask(model, document)
        return bool(self.pool.stats()["hits"] == hits + CHUNKS * PARTS)


@pytest.fixture(scope="module")
def app(
    third_node_for_module: Callable[..., Any],
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[App]:
    places = [third_node_for_module(num_gpus=1).node_id for _ in range(2)]
    pool = start_for_module(cpu_memory=256 << 20, deadline=ROUTED_S)
    port, folder = free_port(), tmp_path_factory.mktemp("llm")
    models = [serve_vllm.make_model(folder / f"model-{seed}", seed) for seed in range(2)]
    names = [f"{secrets.token_hex(4)}-{seed}" for seed in range(2)]  # other runs keep adapters in the same folder
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    with left_over.removed(), llm_app.bucket() as environment, llm_app.adapters(folder, *names):
        configs = [
            llm_app.over_two_nodes(WIDE, models[0], pool.name),
            llm_app.autoscaled(SCALED, models[1], pool.name, environment),
        ]
        ingress = {"ray_actor_options": {"num_cpus": 0}}
        try:
            serve.run(build_openai_app({"llm_configs": configs, "ingress_deployment_config": ingress}))
            yield App(pool, f"http://127.0.0.1:{port}/", [f"{SCALED}:{name}" for name in names], places)
        finally:
            serve_vllm.shutdown()


def test_ray_is_told_of_the_connectors(cluster: Any) -> None:
    in_ray = ComponentRegistry("kv_connector_backend")
    in_ray.unregister("RayKVConnector")  # as if this process had joined the cluster later
    kv_transfer_config("default")
    assert in_ray.contains("RayKVConnector")
    for name in ("RayKVConnector", "RoutedConnector"):
        assert KVConnectorBackendFactory.is_registered(name)


def test_no_replica_warns_of_the_connector(app: App) -> None:
    logs = llm_app.logs()
    assert logs.count("Started vLLM engine") >= 2
    assert "Unsupported connector backend" not in logs


def test_ranks_on_two_nodes_and_the_successor_of_a_replica_that_was_killed(app: App) -> None:
    before = app.ready(app.places)
    computed = app.computed(WIDE, 1)
    stored = [now - then for now, then in zip(app.ready(app.places), before, strict=True)]
    assert stored == [CHUNKS * PARTS // 2] * 2, "each rank stored its half on its own node"
    (killed,) = replicas(WIDE)
    engine = psutil.Process(killed.pid).children(recursive=True)
    os.kill(killed.pid, signal.SIGKILL)
    eventually(lambda: [one for one in replicas(WIDE) if one.pid != killed.pid], deadline=180)
    hits = app.pool.stats()["hits"]
    assert app.ask(WIDE, 1) == Answer(computed.text, CHUNKS * CHUNK)
    assert app.pool.stats()["hits"] == hits + CHUNKS * PARTS
    _, alive = psutil.wait_procs(engine, timeout=30)
    assert not alive, "the killed replica's engine is gone"
    eventually(lambda: settled(app.pool))


def test_models_and_adapters_of_one_application_have_keys_of_their_own(app: App) -> None:
    models = [WIDE, SCALED, *app.adapters]
    answers = {model: app.computed(model, 2) for model in models}
    assert len({answer.text for answer in answers.values()}) == len(models), "their weights differ"
    app.computed(SCALED, 3)
    app.forget(SCALED, 3)
    for model in (SCALED, *app.adapters):
        hits = app.pool.stats()["hits"]
        assert app.ask(model, 2) == Answer(answers[model].text, CHUNKS * CHUNK)
        assert app.pool.stats()["hits"] == hits + CHUNKS * PARTS


def test_a_router_finds_the_prompt_of_an_adapter(app: App) -> None:
    for adapter in app.adapters:
        app.ask(adapter, 4)
    request = CompletionRequest(model="any", prompt=serve_vllm.words(4, LONG))
    (replica,) = replicas(SCALED)

    async def found(adapter: str) -> Located | None:
        lookup = PrefixLookup(app.pool.name, SCALED)
        while (announced := lookup.announced_of(adapter)) is None:
            await asyncio.sleep(0.05)
        return await lookup.locate_prefix(prompt_keys(request, announced))

    for adapter in app.adapters:
        eventually(lambda adapter=adapter: asyncio.run(found(adapter)) == (CHUNKS, {replica.node: CHUNKS}))  # type: ignore[misc]


def test_autoscaling_loses_nothing_that_the_pool_has(app: App) -> None:
    (first,) = replicas(SCALED)
    documents, said = itertools.count(1000), dict[int, Answer]()
    with ThreadPoolExecutor(8) as threads:
        while len(replicas(SCALED)) < 2:  # ask more at once than one replica takes
            list(threads.map(lambda document: app.ask(SCALED, document, max_tokens=100), range(100, 108)))
        (second,) = {one.node for one in replicas(SCALED)} - {first.node}
        while not app.ready([second])[0]:  # until the second has computed something too
            some = list(itertools.islice(documents, 4))
            said |= zip(some, threads.map(lambda document: app.ask(SCALED, document), some), strict=True)
    eventually(lambda: settled(app.pool))
    eventually(lambda: len(replicas(SCALED)) == 1, deadline=120)
    (left,) = replicas(SCALED)
    (gone,) = {first.node, second} - {left.node}
    assert app.ready([gone])[0] >= CHUNKS * PARTS, "what the other had computed is where it was"
    app.computed(SCALED, 5)
    app.forget(SCALED, 5)
    hits = app.pool.stats()["hits"]
    for document, answer in said.items():
        assert app.ask(SCALED, document) == Answer(answer.text, CHUNKS * CHUNK)
    assert app.pool.stats()["hits"] == hits + len(said) * CHUNKS * PARTS
