"""vLLM engines read blocks that have left memory for an external tier."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.pools import MIB, PATIENCE_S, eventually, other_node
from helpers.tiers.redis_server import redis_server

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, save_model

pytestmark = pytest.mark.timeout(600)
PATIENT = {"raykv.client.leases.stream.WAIT_BUDGET_S": PATIENCE_S}  # a small model computes faster than a disk reads
CHUNKS = 7  # of a prompt of 1,000 tokens: 1 MiB each
_fillers = itertools.count()


class Engines(NamedTuple):
    pool: raykv.KVPool
    first: Any
    second: Any

    def afresh(self, engine: Any, prompt: list[int]) -> tuple[list[int], int]:
        """(answer, how many tokens were cached) from an engine, after it has emptied its own cache."""
        eventually(lambda: ray.get(engine.reset.remote()))
        return ray.get(engine.answer.remote(prompt))[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture(scope="module", params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "file":
        yield f"file://{folder}?capacity=2GiB"
    else:
        with redis_server(folder) as server:
            yield server.url()


@pytest.fixture(scope="module")
def engines(url: str, model: Path, start_for_module: Callable[..., raykv.KVPool]) -> Iterator[Engines]:
    pool = start_for_module(cpu_memory=128 * MIB, external=url, write="through", min_hits=1, secret=b"s")

    nodes = pool.node_id, other_node(pool)
    extra = {"verify_tokens": False}  # so chunks have the size of the blocks that push them out
    actors = [engine_on(node, pool.name, str(model), 64 * MIB, extra=extra, constants=PATIENT) for node in nodes]
    ray.get([actor.__ray_ready__.remote() for actor in actors])  # importing and compiling vLLM takes long
    yield Engines(pool, *actors)
    close_engines(*actors)


def fill(pool: raykv.KVPool) -> None:
    """Store more than memory holds. Nobody asks for these blocks again, so they are not demoted."""
    cache = pool.cache(model="filler", dtype="uint8", layout="rows", block_tokens=16, block_bytes=MIB)
    blocks = np.ones((32, MIB), np.uint8)
    for _ in range(8):
        cache.store(cache.keys(np.full(32 * 16, next(_fillers))), blocks)


def of_tiers(pool: raykv.KVPool, what: str) -> int:
    return sum(tier[what] for tier in pool.stats().get("tiers", {}).values())


def test_demoted_chunks_are_loaded_by_another_engine(engines: Engines) -> None:
    pool, prompt = engines.pool, np.random.default_rng(1).integers(3, 500, 1000).tolist()
    right, cached = engines.afresh(engines.first, prompt)
    assert cached == 0
    eventually(lambda: engines.afresh(engines.first, prompt) == (right, CHUNKS * 128))
    eventually(lambda: of_tiers(pool, "blocks") == CHUNKS)

    def served() -> bool:
        fill(pool)
        before = pool.stats()["external_hits"]
        answer = engines.afresh(engines.second, prompt)
        assert answer[0] == right
        return answer[1] == CHUNKS * 128 and pool.stats()["external_hits"] >= before + CHUNKS

    eventually(served)
