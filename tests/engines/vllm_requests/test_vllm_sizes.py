"""vLLM engines of different tensor-parallel sizes read each other's blocks if their ranks keep the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

import torch
from helpers.engines.vllm.engine import close_engines, engine_on, save_mla_model, save_model

from raykv.integrations.vllm.scheduler.counters import HITS

pytestmark = pytest.mark.timeout(600)


class Kind(NamedTuple):
    """A model. chunk: tokens of a chunk. parts: blocks of the pool that make a chunk of 1 MiB or a little more."""

    save: Callable[[Path], None]
    dtype: str
    extra: dict[str, Any]
    chunk: int
    parts: int


KINDS = {
    "heads": Kind(save_model, "float32", {"canonical_layout": True}, 512, 4),
}
if torch.cpu._is_amx_tile_supported():  # without AMX, vLLM can't go on from a prefix of such a model
    KINDS["latent"] = Kind(save_mla_model, "bfloat16", {}, 480, 1)


# one model is enough for `make test`
PARAMS = [pytest.param(name, marks=[pytest.mark.promise] if name == "heads" else []) for name in KINDS]


class Engines(NamedTuple):
    """Engines with tensor parallel 1 and 2, on different nodes."""

    pool: raykv.KVPool
    kind: Kind
    one: Any
    two: Any


@pytest.fixture(scope="module", params=PARAMS)
def engines(
    request: pytest.FixtureRequest,
    cluster: Any,
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    pool, kind = start_for_module(cpu_memory=256 * MIB), KINDS[request.param]
    model = tmp_path_factory.mktemp("model")
    kind.save(model)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    arguments = (pool.name, str(model), 64 * MIB)
    actors = [
        engine_on(node, *arguments, size, kind.extra, dtype=kind.dtype, apart=size > 1)
        for size, node in zip((1, 2), nodes, strict=True)
    ]
    for actor in actors:
        ray.get(actor.answer.remote([3] * 40))
    yield Engines(pool, kind, *actors)
    close_engines(*actors)


def test_tensor_parallel_2_reads_what_1_stored_and_the_other_way_round(engines: Engines) -> None:
    pool, kind = engines.pool, engines.kind
    for seed, writer, reader in ((1, engines.one, engines.two), (2, engines.two, engines.one)):
        known: list[int] = np.random.default_rng(seed).integers(3, 500, 4 * kind.chunk + 9).tolist()
        before = pool.stats()["keys"]
        computed = ray.get(writer.spell.remote(known))
        assert computed[2] == 0
        eventually(lambda before=before: pool.stats()["keys"] == before + 4 * kind.parts)  # type: ignore[misc]
        from_pool, own = (ray.get(reader.spell.remote(known)) for _ in range(2))
        assert from_pool[2] == 4 * kind.chunk and from_pool == own
        exact = kind.dtype == "float32"  # in other dtypes rounding depends on the sizes of pieces and ranks
        alike = slice(None if exact else 1)
        assert from_pool[0][alike] == computed[0][alike]
        assert from_pool[1][alike] == pytest.approx(computed[1][alike], abs=1e-4 if exact else 0.05)
    assert ray.get(engines.two.metrics.remote())[HITS] == 4
    eventually(lambda: settled(pool))
