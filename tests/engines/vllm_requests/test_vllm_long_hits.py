"""A vLLM engine loads whole prompts from another node that are ten times as long as its staging window."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually, node_store, other_node, pid, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, save_model

from raykv.integrations.vllm.scheduler.counters import FAILED, HITS

pytestmark = pytest.mark.timeout(600)
CHUNK = 128  # tokens: 1 MiB
CHUNKS = 20  # of a prompt, 20 MiB; the staging window is an eighth of 16 MiB


class Engines(NamedTuple):
    """reader: on this node, whose memory is full except for the staging window. writer: on the other node."""

    pool: raykv.KVPool
    reader: Any
    writer: Any

    def answer(self, engine: Any, *prompts: list[int], **how: Any) -> list[tuple[list[int], int]]:
        return ray.get(engine.answer.remote(*prompts, **how))  # type: ignore[no-any-return]

    def forget(self, engine: Any) -> None:
        eventually(lambda: ray.get(engine.reset.remote()))

    def stored(self, *prompts: list[int]) -> list[list[int]]:
        """Have the writer compute prompts, so that the pool has them. Returns the answers."""
        before = self.pool.stats()["keys"]
        right = [said for said, _ in self.answer(self.writer, *prompts, cold=True)]
        eventually(lambda: self.pool.stats()["keys"] == before + CHUNKS * len(prompts))
        return right


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, CHUNK * CHUNKS + 20).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["tcp", "object_store"])
def engines(
    request: pytest.FixtureRequest,
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    pool = start_for_module(cpu_memory=16 * MIB, transport=request.param)
    pool.resize(other_node(pool), 256 * MIB)
    filler = pool.cache(model="filler", dtype="uint8", layout="rows", block_tokens=16, block_bytes=MIB)
    assert filler.store(filler.keys(np.arange(14 * 16)), np.ones((14, MIB), np.uint8), wait=True) == 14
    model = tmp_path_factory.mktemp("model")
    save_model(model)

    nodes = pool.node_id, other_node(pool)
    reader, writer = (engine_on(node, pool.name, str(model), 128 * MIB) for node in nodes)
    ray.get([reader.__ray_ready__.remote(), writer.__ray_ready__.remote()])
    yield Engines(pool, reader, writer)
    close_engines(reader, writer)


def test_every_chunk_is_read_by_the_first_request_and_by_the_second(engines: Engines) -> None:
    prompts = [prompt(seed) for seed in range(3)]
    right = engines.stored(*prompts)
    hit = [(said, CHUNK * CHUNKS) for said in right]
    before = ray.get(engines.reader.metrics.remote()).get(HITS, 0.0)
    for _ in range(2):
        assert engines.answer(engines.reader, prompts[0])[0] == hit[0]
        engines.forget(engines.reader)
    assert engines.answer(engines.reader, *prompts) == hit, "several at a time"
    engines.forget(engines.reader)
    metrics = ray.get(engines.reader.metrics.remote())
    assert (metrics[HITS] - before, metrics.get(FAILED, 0.0)) == (5 * CHUNKS, 0.0)
    eventually(lambda: settled(engines.pool))


def test_the_leases_of_an_aborted_load_are_released(engines: Engines) -> None:
    known = prompt(10)
    (right,) = engines.stored(known)
    for steps in (1, 3, 10, 30):
        ray.get(engines.reader.abort.remote(known, steps))
        engines.forget(engines.reader)
    eventually(lambda: settled(engines.pool))
    assert engines.answer(engines.reader, known) == [(right, CHUNK * CHUNKS)]
    engines.forget(engines.reader)


def test_a_load_whose_source_dies_in_the_middle_is_computed(engines: Engines) -> None:
    known = prompt(20)
    (right,) = engines.stored(known)
    pool = engines.pool
    for after in (0.01, 0.05, 0.1):
        store = pid(node_store(pool, other_node(pool)))
        killer = threading.Timer(after, os.kill, (store, signal.SIGKILL))
        killer.start()
        assert engines.answer(engines.reader, known)[0][0] == right
        killer.join()
        engines.forget(engines.reader)
        eventually(lambda store=store: _pid(pool) not in (0, store))  # type: ignore[misc]
    eventually(
        lambda: engines.answer(engines.reader, known)[0] == (right, CHUNK * CHUNKS) or engines.forget(engines.reader)
    )
    eventually(lambda: settled(pool))


def _pid(pool: raykv.KVPool) -> int:
    try:
        return pid(node_store(pool, other_node(pool)))
    except (ValueError, ray.exceptions.RayError):
        return 0
