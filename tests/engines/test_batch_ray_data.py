"""examples/batch_ray_data.py: engines of Ray Data share documents by way of a pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import left_over
from helpers.pools import MIB, eventually, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.patient_vllm_router import patient_config

from examples import batch_ray_data, serve_vllm

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
CHUNK = 32  # tokens, of 1 MiB


def test_engines_read_what_those_of_another_job_have_computed(
    start: Callable[..., raykv.KVPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_ray_data, "kv_transfer_config", patient_config)
    pool, model = start(cpu_memory=512 * MIB), serve_vllm.make_model(tmp_path)
    first, second = batch_ray_data.rows(range(2)), batch_ray_data.rows(range(2, 6))
    with left_over.removed():
        batch_ray_data.answers(batch_ray_data.build(model, pool.name), first)
        eventually(lambda: settled(pool))
        hits = pool.stats()["hits"]
        together = batch_ray_data.answers(batch_ray_data.build(model, pool.name), second)
        assert pool.stats()["hits"] >= hits + batch_ray_data.DOCUMENTS * (1500 // CHUNK)
        apart = batch_ray_data.answers(batch_ray_data.build(model, None, engines=1), second)
        assert together == apart
        assert len(set(apart.values())) > batch_ray_data.DOCUMENTS, "the questions have an influence"
