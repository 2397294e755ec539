"""Engines with drafters read the drafter's KV from the pool too. Engines without one share the target's KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from helpers.pools import MIB, eventually, other_node, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.drafters import SAVES, save
from helpers.engines.vllm.engine import close_engines, engine_on, prompt

pytestmark = pytest.mark.timeout(600)
CHUNK = 128  # tokens
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class Engines(NamedTuple):
    """one, two: engines that draft, on two raylets. plain: an engine that does not, on the first's raylet."""

    method: str
    pool: raykv.KVPool
    one: Any
    two: Any
    plain: Any

    def reset(self, engine: Any) -> None:
        eventually(lambda: ray.get(engine.reset.remote()))
        eventually(lambda: settled(self.pool))

    def cached(self, engine: Any, prompt: list[int]) -> int:
        """How many tokens an engine reads from the pool."""
        self.reset(engine)
        return ask(engine, prompt, 1)[1]

    def stored(self, engine: Any, prompt: list[int]) -> list[int]:
        """An engine's answer to a new prompt, once the pool has the prompt."""
        said, cached, _ = ask(engine, prompt)
        assert cached == 0
        eventually(lambda: self.cached(engine, prompt) == len(prompt) // CHUNK * CHUNK)
        return said


def ask(engine: Any, asked: list[int], tokens: int = 100, **how: Any) -> tuple[list[int], int, float]:
    """(tokens that follow, how many of the prompt's tokens were cached, how many guesses were accepted)."""
    before = ray.get(engine.metrics.remote()).get(ACCEPTED, 0.0)
    ((said, cached),) = ray.get(engine.answer.remote(asked, tokens=tokens, **how))
    return said, cached, ray.get(engine.metrics.remote()).get(ACCEPTED, 0.0) - before


@pytest.fixture(scope="module", params=SAVES)
def engines(
    request: pytest.FixtureRequest,
    cluster: Any,
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    pool, folder = start_for_module(cpu_memory=64 * MIB), tmp_path_factory.mktemp("model")
    target, speculative = save(request.param, folder)
    drafts: dict[str, Any] = {"speculative_config": speculative}
    arguments = (pool.name, str(target), 64 * MIB)
    one, two = (engine_on(node, *arguments, **drafts) for node in (pool.node_id, other_node(pool)))
    plain = engine_on(pool.node_id, *arguments)
    yield Engines(request.param, pool, one, two, plain)
    close_engines(one, two, plain)


def test_a_hit_drafts_as_well_as_the_engines_own_cache(engines: Engines) -> None:
    """Compares accepted guesses: with wrong KV of the drafter the tokens would still be right."""
    total = {"own": 0.0, "pool": 0.0, "computed": 0.0}
    for seed in range(1, 4):
        asked = prompt(seed, 500)
        right = ask(engines.plain, asked, cold=True)[0]
        said, cached, computed = ask(engines.one, asked)
        assert (said, cached) == (right, 0)
        said, cached, own = ask(engines.one, asked)
        assert said == right and cached >= 448
        eventually(lambda asked=asked: engines.cached(engines.two, asked) == 384)  # type: ignore[misc]
        engines.reset(engines.two)
        said, cached, pool = ask(engines.two, asked)
        assert (said, cached) == (right, 384)
        for name, count in (("own", own), ("pool", pool), ("computed", computed)):
            total[name] += count
    assert total["computed"] > (0 if engines.method == "dflash" else 50), "some guesses are right"
    assert abs(total["pool"] - total["own"]) <= 2, "zeros in the place of the drafter's KV make 4 to 56 of difference"


def test_engines_without_a_drafter_read_what_engines_with_one_stored(engines: Engines) -> None:
    asked = prompt(11, 500)
    right = engines.stored(engines.one, asked)
    engines.reset(engines.plain)
    assert ask(engines.plain, asked)[:2] == (right, 384)


def test_what_an_engine_without_a_drafter_stored_lacks_the_drafters_part(engines: Engines) -> None:
    """So the prompt is computed once with the drafter, and stored."""
    asked = prompt(12, 500)
    right = engines.stored(engines.plain, asked)
    said, cached, _ = ask(engines.one, asked)
    assert (said, cached) == (right, 0)
    eventually(lambda: engines.cached(engines.two, asked) == 384)
    engines.reset(engines.two)
    assert ask(engines.two, asked)[:2] == (right, 384)


def test_what_was_drafted_is_read_in_the_next_turn(engines: Engines) -> None:
    """Aborts come in between, and more requests than the engine has blocks for."""
    first = prompt(13, 500)
    turn = first + ask(engines.one, first, 200)[0]
    ray.get(engines.one.abort.remote(prompt(14, 500), 6))
    many = [prompt(seed, 300) for seed in range(20, 38)]
    right = ray.get(engines.plain.mix.remote(*many, tokens=60))
    assert ray.get(engines.one.mix.remote(*many, tokens=60)) == right
    eventually(lambda: engines.cached(engines.two, turn) == len(turn) // CHUNK * CHUNK)
    engines.reset(engines.two)
    assert ask(engines.two, turn)[0] == ask(engines.plain, turn, cold=True)[0]


def test_ranks_have_a_part_of_the_drafters_layers_each(
    cluster: Any, start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    pool, (target, speculative) = start(cpu_memory=64 * MIB), save("draft_model", tmp_path)
    drafts: dict[str, Any] = {"speculative_config": speculative, "tensor_parallel_size": 2}
    engine = engine_on(pool.node_id, pool.name, str(target), 64 * MIB, apart=True, **drafts)
    engines, asked = Engines("draft_model", pool, engine, engine, engine), prompt(1, 500)
    right = ask(engine, asked, 8)[0]
    chunk = 2 * CHUNK  # twice the tokens, as a rank has half of each block
    eventually(lambda: engines.cached(engine, asked) == chunk)
    assert pool.stats()["keys"] == 2 * 2, "of each rank, the target's layers and the drafter's"
    engines.reset(engine)
    assert ask(engine, asked, 8)[:2] == (right, chunk)
    close_engines(engine)
