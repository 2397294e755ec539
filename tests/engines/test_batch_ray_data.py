"""examples/batch_ray_data.py: engines of Ray Data share documents by way of a pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.pools import MIB, eventually, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from examples import batch_ray_data, serve_vllm

pytestmark = pytest.mark.timeout(600)
CHUNK, DOCUMENTS = 32, 4  # a chunk of 1 MiB, in tokens


def test_two_engines_read_what_the_other_has_computed(start: Callable[..., raykv.KVPool], tmp_path: Path) -> None:
    pool, model = start(cpu_memory=512 * MIB), serve_vllm.make_model(tmp_path)
    asked = batch_ray_data.rows(DOCUMENTS, questions=4)
    apart = batch_ray_data.answers(batch_ray_data.build(model, None, engines=1), asked)
    assert len(set(apart.values())) > DOCUMENTS, "the questions have an influence"
    together = batch_ray_data.answers(batch_ray_data.build(model, pool.name), asked)
    assert together == apart
    eventually(lambda: settled(pool))
    assert pool.stats()["hits"] >= DOCUMENTS * (1500 // CHUNK), "each engine was asked about every document"
