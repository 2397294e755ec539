"""raykv beside other connectors in vLLM's MultiConnector: NIXL carries prefills to decoders, the pool keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, failing_loads, save_model

pytestmark = pytest.mark.timeout(600)
CHUNK = 128  # tokens
WHOLE = 3 * CHUNK  # tokens of a prompt that can be read
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ORDERS: dict[str, Any] = {"nixl_first": ([NIXL], []), "raykv_first": ([], [NIXL])}


class Place(NamedTuple):
    """Where engines start. alone: an engine with raykv's connector only."""

    pool: raykv.KVPool
    model: Path
    alone: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.pool.name, str(self.model), 128 * MIB


def afresh(engine: Any, prompt: list[int], cold: bool = False) -> tuple[list[int], int]:
    """(answer, how many tokens were read) from an engine, after it has emptied its own cache."""
    eventually(lambda: ray.get(engine.reset.remote()))
    return ray.get(engine.answer.remote(prompt, cold=cold))[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def place(start_for_module: Callable[..., raykv.KVPool], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    pool, folder = start_for_module(cpu_memory=256 * MIB), tmp_path_factory.mktemp("multi")
    save_model(folder / "model")
    alone = engine_on(pool.node_id, pool.name, str(folder / "model"), 128 * MIB)
    yield Place(pool, folder / "model", alone)
    close_engines(alone)


@pytest.mark.parametrize("beside", ORDERS.values(), ids=ORDERS)
def test_beside_nixl_an_engine_stores_reads_and_computes_what_does_not_come(place: Place, beside: Any) -> None:
    engine = engine_on(place.pool.node_id, *place.arguments, beside=beside)
    for seed, (writer, reader) in enumerate([(engine, place.alone), (place.alone, engine)]):
        prompt = np.random.default_rng([seed, bool(beside[0])]).integers(3, 500, WHOLE + 40).tolist()
        said = afresh(writer, prompt)[0]
        eventually(lambda reader=reader, prompt=prompt: afresh(reader, prompt)[1] == WHOLE)  # type: ignore[misc]
        assert afresh(reader, prompt) == (said, WHOLE)
    with failing_loads(engine):
        assert afresh(engine, prompt) == (said, 0)
    close_engines(engine)


def test_a_policy_that_ends_requests_is_refused(place: Place) -> None:
    with pytest.raises(ray.exceptions.RayError, match='add "kv_load_failure_policy": "recompute"'):
        engine = engine_on(place.pool.node_id, *place.arguments, beside=([NIXL], []), policy="fail")
        ray.get(engine.answer.remote([7] * 40))
