"""Engines of ray.serve.llm in data parallel on a pool, over HTTP. Each rank is a replica on a node of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.engines import left_over
from helpers.pools import ROUTED_S, eventually, free_port, settled
from ray import serve

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.serve import llm_app
from helpers.engines.serve.llm_app import CHUNK, Answer, Replica, replicas
from helpers.engines.vllm.engine import save_model_of_experts
from ray.serve.llm import build_dp_openai_app

from examples import serve_vllm

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
MODEL, RANKS, PARTS = "ranked", 2, 4  # a part for each KV head
CHUNKS = 3
LONG = CHUNKS * CHUNK + 20  # tokens of a prompt


class App(NamedTuple):
    pool: raykv.KVPool
    url: str

    def ask(self, document: int, max_tokens: int = 6) -> Answer:
        return llm_app.ask(self.url, MODEL, serve_vllm.words(document, LONG), max_tokens)

    def computed(self, document: int) -> Answer:
        """The answer to a new document, once all of its chunks are in the pool."""
        before = self.pool.stats()["keys"]
        answer = self.ask(document)
        assert answer.cached == 0
        eventually(lambda: self.pool.stats()["keys"] == before + CHUNKS * PARTS)
        return answer

    def crossed(self) -> int:
        """How many blocks were read from another node."""
        return int(self.pool.stats()["remote_hits"])


@pytest.fixture(scope="module")
def app(
    third_node_for_module: Callable[..., Any],
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[App]:
    for _ in range(RANKS):
        third_node_for_module(num_gpus=1)
    pool = start_for_module(cpu_memory=128 << 20, deadline=ROUTED_S)
    port, folder = free_port(), Path(serve_vllm.make_model(tmp_path_factory.mktemp("model")))
    save_model_of_experts(folder, serve_vllm.VOCABULARY)
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    config = llm_app.data_parallel(MODEL, str(folder), pool.name, RANKS)
    ingress = {"ray_actor_options": {"num_cpus": 0}}
    with left_over.removed():
        try:
            serve.run(build_dp_openai_app({"llm_config": config, "ingress_deployment_config": ingress}))
            yield App(pool, f"http://127.0.0.1:{port}/")
        finally:
            serve_vllm.shutdown()


def test_a_request_goes_to_the_rank_whose_node_has_its_prompt(app: App) -> None:
    assert len({rank.node for rank in ranks()}) == RANKS
    for document in range(4):
        answer = app.computed(document)
        assert [app.ask(document) for _ in range(RANKS)] == [Answer(answer.text, CHUNKS * CHUNK)] * RANKS
    assert app.crossed() == 0


def test_the_other_rank_reads_it_when_there_are_many_requests(app: App) -> None:
    answer, before = app.computed(10), app.crossed()

    def spread() -> bool:
        with ThreadPoolExecutor(16) as threads:
            said = set(threads.map(lambda _: app.ask(10), range(16)))
        assert said == {Answer(answer.text, CHUNKS * CHUNK)}
        return app.crossed() >= before + CHUNKS * PARTS

    eventually(spread)


def test_ranks_that_start_anew_read_what_the_killed_ones_computed(app: App) -> None:
    """If one rank is killed, Ray Serve starts all ranks again."""
    answers = {document: app.computed(document) for document in range(20, 24)}
    old = {rank.pid for rank in ranks()}
    os.kill(min(old), signal.SIGKILL)
    eventually(lambda: len(new := {rank.pid for rank in ranks()}) == RANKS and not new & old, deadline=180)
    assert {document: app.ask(document) for document in answers} == {
        document: Answer(answer.text, CHUNKS * CHUNK) for document, answer in answers.items()
    }
    eventually(lambda: settled(app.pool))


def ranks() -> list[Replica]:
    return replicas(MODEL, "DPServer")
