"""vLLM engines of different tensor-parallel sizes read each other's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually, settled
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.vllm_engine import ENVIRONMENT, Engine, save_model

pytestmark = pytest.mark.timeout(600)
CHUNK = 512  # tokens: of four parts, a head of each layer, of 1 MiB


class Engines(NamedTuple):
    """Of tensor parallel 1, and 2, on different nodes."""

    pool: raykv.KVPool
    one: Any
    two: Any


@pytest.fixture(scope="module")
def engines(
    cluster: Any, start_for_module: Callable[..., raykv.KVPool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    pool = start_for_module(cpu_memory=256 * MIB)
    model, fault = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("vllm") / "fault"
    save_model(model)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = []
    for size, node in zip((1, 2), nodes, strict=True):
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": ENVIRONMENT}}
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        arguments = (pool.name, str(model), 64 * MIB, str(fault), size, {"canonical_layout": True})
        actors.append(ray.remote(Engine).options(**options).remote(*arguments))
    for actor in actors:
        ray.get(actor.answer.remote([3] * 40), timeout=300)
    yield Engines(pool, *actors)
    for actor in actors:
        ray.get(actor.close.remote(), timeout=60)
        ray.kill(actor)


def test_tensor_parallel_2_reads_what_1_stored_and_the_other_way_round(engines: Engines) -> None:
    for seed, writer, reader in ((1, engines.one, engines.two), (2, engines.two, engines.one)):
        known: list[int] = np.random.default_rng(seed).integers(3, 500, 4 * CHUNK + 9).tolist()
        before = engines.pool.stats()["keys"]
        computed = ray.get(writer.spell.remote(known), timeout=300)
        assert computed[2] == 0
        eventually(lambda before=before: engines.pool.stats()["keys"] == before + 4 * 4)  # type: ignore[misc]
        from_pool, own = (ray.get(reader.spell.remote(known), timeout=300) for _ in range(2))
        assert from_pool[2] == 4 * CHUNK and from_pool == own
        assert from_pool[0] == computed[0] and from_pool[1] == pytest.approx(computed[1], abs=1e-4)
    eventually(lambda: settled(engines.pool))
