"""vLLM engines share a pool for models whose layers keep KV of several kinds: windows, states, sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually, kill, settled

import raykv
from raykv.bench.engines.shapes import WINDOW

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, prompt, save_mla_model
from helpers.engines.vllm.models import MODELS, Model

pytestmark = pytest.mark.timeout(600)
HYBRID = "gemma3"
PARAMS = [pytest.param(name, marks=[pytest.mark.promise] if name == HYBRID else []) for name in MODELS]
# lengths of prompts around ends of chunks and windows, in chunks and further tokens
PROMISED = [(1, 1), (1, WINDOW + 33), (0, 961)]
OTHERS = [(1, -1), (2, 0), (2, 1), (0, 960), (0, 1500)]
LENGTHS = [*PROMISED, *(pytest.param(*length, marks=pytest.mark.full) for length in OTHERS)]


class Engines(NamedTuple):
    pool: raykv.KVPool
    model: Model
    one: Any
    two: Any

    def computed(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """The first engine's answer without any cache, once the pool has the prompt."""
        right = ray.get(self.one.spell.remote(prompt))
        eventually(lambda: ray.get(self.one.reset.remote()))
        eventually(lambda: settled(self.pool))
        assert right[2] == 0
        return right[:2]  # type: ignore[no-any-return]

    def afresh(self, engine: Any, prompt: list[int]) -> tuple[list[int], list[float], int]:
        """An engine's answer, after the engine has emptied its own cache."""
        eventually(lambda: ray.get(engine.reset.remote()))
        return ray.get(engine.spell.remote(prompt))  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=PARAMS)
def engines(
    request: pytest.FixtureRequest,
    cluster: Any,
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    pool = start_for_module(cpu_memory=64 * MIB)
    model = tmp_path_factory.mktemp("model")
    kind = MODELS[request.param]
    kind.save(model)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    arguments = (pool.name, str(model), 64 * MIB)
    actors = [engine_on(node, *arguments, dtype=kind.dtype) for node in nodes]
    for actor in actors:
        ray.get(actor.answer.remote([3] * 40))
    yield Engines(pool, kind, *actors)
    close_engines(*actors)


@pytest.mark.parametrize(("chunks", "more"), LENGTHS)
def test_a_prompt_that_another_engine_computed_is_read_to_its_last_chunk(
    engines: Engines, chunks: int, more: int
) -> None:
    """Logprobs that were computed in other pieces may differ in the last bits.

    If all layers have windows, vLLM loads a prompt's last chunk even if the prompt ends with it, except the last token.
    """
    chunk = engines.model.chunk
    tokens = chunks * chunk + more
    known = prompt(tokens, tokens)
    right = engines.computed(known)
    full = (tokens - 1) // chunk * chunk
    eventually(lambda: engines.afresh(engines.two, known)[2] >= full)
    for engine in (engines.two, engines.one):  # two reads from the pool, one has the prompt in its own cache
        for found in (engines.afresh(engine, known), ray.get(engine.spell.remote(known))):
            assert found[0] == right[0] and found[1] == pytest.approx(right[1], abs=1e-3)
            assert full <= found[2] < tokens


def test_a_conversation_that_goes_on_is_read_up_to_the_turn_before(engines: Engines) -> None:
    turn = prompt(1, 400)
    for i in range(4):
        engines.computed(turn) if i == 0 else None
        said = engines.afresh(engines.one, turn)[0]
        turn = turn + said + prompt(10 + i, 150)
        right = ray.get(engines.one.answer.remote(turn, cold=True))[0][0]
        found = engines.afresh(engines.two, turn)
        assert found[0] == right and found[2] >= 288


@pytest.mark.full
def test_whatever_is_evicted_the_tokens_are_right(engines: Engines) -> None:
    """The pool has room for a third of the prompts. Of some it keeps windows without their prefix, of others the
    prefix without the window."""
    common = [prompt(100 + i, 200 + 60 * i) for i in range(5)]
    random = np.random.default_rng(7)
    prompts = [common[random.integers(5)] + prompt(200 + i, int(random.integers(10, 900))) for i in range(60)]
    right = [answer[0] for answer in ray.get(engines.one.answer.remote(*prompts, cold=True))]
    for engine in (engines.one, engines.two, engines.one):
        eventually(lambda engine=engine: ray.get(engine.reset.remote()))  # type: ignore[misc]
        said = ray.get(engine.answer.remote(*prompts))
        assert [answer[0] for answer in said] == right
    assert engines.pool.stats()["hits"] > 0
    eventually(lambda: settled(engines.pool))


def test_a_store_that_is_killed_costs_hits_and_no_token(engines: Engines) -> None:
    known = prompt(50, 1500)
    right = engines.computed(known)
    eventually(lambda: engines.afresh(engines.two, known)[2] == 1440)
    eventually(lambda: ray.get(engines.two.reset.remote()))
    asked = engines.two.spell.remote(known)
    kill(engines.pool, engines.pool.node_id)
    assert ray.get(asked)[0] == right[0]
    eventually(lambda: engines.afresh(engines.two, known)[2] == 1440)


def test_an_engine_that_can_not_go_on_from_a_prefix_is_left_alone(
    start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    """For a latent in float32 on a CPU vLLM turns its own prefix cache off, as tokens after a prefix would be wrong."""
    pool = start()
    save_mla_model(tmp_path)
    arguments = (pool.name, str(tmp_path), 16 * MIB)
    engine = engine_on(pool.node_id, *arguments, attention_backend="CPU_MLA")  # other backends may support prefixes
    said = [ray.get(engine.spell.remote(prompt(1, 1500))) for _ in range(2)]
    assert said[0] == said[1] and said[0][2] == 0
    assert (pool.stats()["lookups"], pool.stats()["keys"]) == (0, 0)
    close_engines(engine)
