"""Engines whose layers lie side by side in each block (BLHNC): a block is copied as one piece, not as one per layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import ENVIRONMENT, Engine, close_engines, engine_on, save_model
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from raykv.bench.engines import one_process

pytestmark = pytest.mark.timeout(600)
WHOLE = 3 * 128  # tokens of a prompt that can be read


class PackedEngine(Engine):
    """An engine with layout BLHNC. vLLM's attention on CPUs declares another layout, but reads this one as well."""

    def __init__(self, pool: str, model: str, cache_bytes: int) -> None:
        os.environ["VLLM_KV_CACHE_LAYOUT"] = KVCacheLayout.BLHNC.name
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda _: (KVCacheLayout.BLHNC,))
        super().__init__(pool, model, cache_bytes)


def pieces(_: Any) -> int:
    """How many pieces a block of the engine in this process has."""
    (pages,) = get_kv_transfer_group().connector_worker.worker._pages
    return len(pages.lengths)


def test_engines_of_one_layout_share_blocks_of_one_piece(start: Callable[..., raykv.KVPool], tmp_path: Path) -> None:
    pool = start(cpu_memory=256 * MIB)
    save_model(tmp_path / "model")
    arguments: Any = (pool.name, str(tmp_path / "model"), 64 * MIB)
    environment = {"env_vars": ENVIRONMENT | one_process.ENVIRONMENT}
    packed: Any = ray.remote(PackedEngine).options(num_cpus=0, runtime_env=environment)
    writer, reader = packed.remote(*arguments), packed.remote(*arguments)
    other = engine_on(pool.node_id, *arguments)
    prompt = np.random.default_rng(0).integers(3, 500, WHOLE + 40).tolist()

    def afresh(engine: Any) -> tuple[list[int], int]:
        eventually(lambda: ray.get(engine.reset.remote()))
        return ray.get(engine.answer.remote(prompt))[0]  # type: ignore[no-any-return]

    (said, cached), *_ = ray.get(writer.answer.remote(prompt))
    assert cached == 0
    eventually(lambda: afresh(reader)[1] == WHOLE)
    assert afresh(reader) == (said, WHOLE)
    assert afresh(other) == (said, 0), "its blocks have other bytes, and other keys"
    eventually(lambda: afresh(other)[1] == WHOLE)
    assert afresh(other) == afresh(writer) == (said, WHOLE)
    assert [ray.get(engine.__ray_call__.remote(pieces)) for engine in (writer, reader, other)] == [1, 1, 4]
    for engine in (writer, reader):  # their processes can't serve other engines
        ray.get(engine.close.remote())
        ray.kill(engine)
    close_engines(other)
