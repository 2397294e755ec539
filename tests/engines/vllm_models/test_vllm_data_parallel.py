"""Engines in data parallel: a rank reads what another rank, or another engine, has computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import ray
from helpers.engines import left_over
from helpers.pools import MIB, eventually, free_port, node_store, other_node, pid, settled, stopped
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import (
    ENVIRONMENT,
    close_engines,
    engine_on,
    prompt,
    save_model,
    save_model_of_experts,
)
from helpers.engines.vllm.kv_index import KVIndex
from helpers.engines.vllm.ray_engine import with_platform
from helpers.engines.vllm.session import StreamedEngine

pytestmark = pytest.mark.timeout(600)
RANKS, CHUNK = 2, 128
MODELS = {"experts": save_model_of_experts, "dense": save_model}


class Engines(NamedTuple):
    """ranked: an engine in data parallel. alone: one with one rank, on the other node. heard: each rank's KV events."""

    pool: raykv.KVPool
    ranked: Any
    alone: Any
    heard: list[KVIndex]

    def ask(self, asked: list[int], rank: int) -> Any:
        return self.ranked.answer.remote(asked, rank=rank)

    def reset(self) -> None:
        """Empty the own caches of all engines."""
        for engine in (self.ranked, self.alone):
            eventually(lambda engine=engine: ray.get(engine.reset.remote()))  # type: ignore[misc]
        eventually(lambda: settled(self.pool))

    def afresh(self, asked: list[int], rank: int) -> tuple[list[int], int]:
        self.reset()
        return ray.get(self.ask(asked, rank))  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=MODELS)
def engines(
    request: pytest.FixtureRequest,
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    model, port = tmp_path_factory.mktemp("model"), free_port()
    MODELS[request.param](model)
    pool = start_for_module(cpu_memory=64 * MIB)
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    environment = ENVIRONMENT | with_platform()
    kind = ray.remote(StreamedEngine).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(pool.node_id, soft=False),
        runtime_env={"env_vars": environment},
    )
    arguments = (pool.name, str(model), 64 * MIB)
    with left_over.removed():
        ranked: Any = kind.remote(*arguments, data_parallel_size=RANKS, kv_events_config=told)
        alone = engine_on(other_node(pool), *arguments)
        ray.get([ranked.answer.remote(prompt(0, 40), rank=rank) for rank in range(RANKS)])
        heard = [KVIndex(f"tcp://127.0.0.1:{port + rank}") for rank in range(RANKS)]
        yield Engines(pool, ranked, alone, heard)
        for index in heard:
            index.close()
        ray.get(ranked.close.remote())
        ray.kill(ranked)
        close_engines(alone)


def test_a_rank_and_an_engine_alone_read_what_another_rank_computed(engines: Engines) -> None:
    asked = prompt(1, 3 * CHUNK + 20)
    right, cached = ray.get(engines.ask(asked, 0))
    assert cached == 0
    eventually(lambda: engines.afresh(asked, 1) == (right, 3 * CHUNK))
    assert ray.get(engines.alone.answer.remote(asked)) == [(right, 3 * CHUNK)]
    asked = prompt(2, 3 * CHUNK + 20)
    ((right, cached),) = ray.get(engines.alone.answer.remote(asked))
    assert cached == 0
    eventually(lambda: engines.afresh(asked, 0) == (right, 3 * CHUNK))


def test_ranks_that_compute_and_read_in_the_same_steps(engines: Engines) -> None:
    asked = [prompt(seed, 2 * CHUNK + 20) for seed in range(10, 18)]
    right = [said for said, _ in ray.get(engines.alone.answer.remote(*asked, cold=True))]
    first = ray.get([engines.ask(one, number % RANKS) for number, one in enumerate(asked)])
    assert [said for said, _ in first] == right
    for one in asked:
        eventually(lambda one=one: engines.afresh(one, 0)[1] == 2 * CHUNK)  # type: ignore[misc]
    engines.reset()
    new = [prompt(seed, 2 * CHUNK + 20) for seed in range(20, 24)]
    computing = [engines.ask(one, number % RANKS) for number, one in enumerate(new)]
    crosswise = [engines.ask(one, (number + 1) % RANKS) for number, one in enumerate(asked)]
    assert ray.get(crosswise) == [(said, 2 * CHUNK) for said in right]
    assert [said for said, _ in ray.get(computing)] == [
        said for said, _ in ray.get(engines.alone.answer.remote(*new, cold=True))
    ]


def test_a_rank_that_waits_for_the_pool_holds_no_other(engines: Engines) -> None:
    """The rank asks for blocks on a node whose store hangs."""
    asked, other = prompt(30, 3 * CHUNK + 20), prompt(31, 3 * CHUNK + 20)
    before = engines.pool.stats()["keys"]
    ((right, _),) = ray.get(engines.alone.answer.remote(asked))
    eventually(lambda: engines.pool.stats()["keys"] == before + 3)
    with stopped(pid(node_store(engines.pool, other_node(engines.pool)))):
        waits = engines.ask(asked, 1)
        assert ray.get(engines.ask(other, 0))[1] == 0
        assert not ray.wait([waits], timeout=0)[0], "rank 1 still waits"
    assert ray.get(waits)[0] == right


def test_kv_events_tell_ranks_apart(engines: Engines) -> None:
    asked = prompt(40, 2 * CHUNK + 20)
    ray.get(engines.ask(asked, 0))
    blocks = 2 * CHUNK // 32
    eventually(lambda: engines.heard[0].catch_up().blocks(asked, 32) == blocks)
    assert engines.heard[1].catch_up().blocks(asked, 32) == 0
    engines.afresh(asked, 1)
    eventually(lambda: engines.heard[1].catch_up().blocks(asked, 32) == blocks)
    assert [index.ranks for index in engines.heard] == [{0}, {1}]
