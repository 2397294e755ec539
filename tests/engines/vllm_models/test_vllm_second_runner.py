"""An engine whose connector is called as vLLM's second model runner, the default on CUDA, does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm import second_runner
from helpers.engines.vllm.engine import close_engines, engine_on, save_model

pytestmark = pytest.mark.timeout(300)


def test_no_step_that_computes_pauses(cluster: Any, start: Callable[..., raykv.KVPool], tmp_path: Path) -> None:
    """Steps that only wait for a load pause. Loaded KV is right."""
    pool, model = start(cpu_memory=256 * MIB), tmp_path / "model"
    save_model(model)
    prompt = np.random.default_rng(0).integers(3, 500, 1000).tolist()
    engine = engine_on(pool.node_id, pool.name, str(model), 64 * MIB)
    ray.get(engine.__ray_call__.remote(second_runner.take_over))
    ((computed, _),) = ray.get(engine.answer.remote(prompt, tokens=20))

    def stored() -> bool:
        ray.get(engine.answer.remote(prompt[:5], tokens=1))
        return bool(pool.stats().get("stored", 0) >= len(prompt) // 128)

    eventually(stored)
    steps = ray.get(engine.__ray_call__.remote(second_runner.steps))
    assert len(steps) >= 21 and all(computes is not paused for computes, paused, _ in steps), steps
    assert {how for computes, _, how in steps if computes} == {"FULL", "PIECEWISE", "NONE"}
    ray.get(engine.reset.remote())
    ((said, hit),) = ray.get(engine.answer.remote(prompt, tokens=20))
    assert said == computed and hit >= 896
    steps = ray.get(engine.__ray_call__.remote(second_runner.steps))
    assert all(computes is not paused for computes, paused, _ in steps), steps
    assert not all(computes for computes, *_ in steps), "it waited for the load"
    ray.get(engine.__ray_call__.remote(second_runner.give_back))
    close_engines(engine)
