"""If two vLLM engines get the same new prompt at once, one computes the prompt and the other reads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually, other_node, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, save_model

from raykv.integrations.vllm.scheduler.counters import WAITED

pytestmark = pytest.mark.timeout(600)
CHUNK = 128  # tokens
LONG = 3000
AHEAD = 100  # wait so many times as long as computing takes, as a machine may be busy
Answers = list[tuple[list[int], int]]


class Engines(NamedTuple):
    """Two engines on two nodes, which wait long for each other, and one with the usual patience."""

    pool: raykv.KVPool
    one: Any
    two: Any
    brisk: Any


def prompt(seed: int, tokens: int = LONG) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, tokens).tolist()  # type: ignore[no-any-return]


def ask(*engines: Any, prompts: list[list[int]]) -> list[Answers]:
    """The answers of each engine to all prompts, asked at once."""
    return ray.get([engine.answer.remote(*prompts) for engine in engines])


def waits(engine: Any) -> float:
    return float(ray.get(engine.metrics.remote()).get(WAITED, 0.0))


@pytest.fixture(scope="module")
def engines(
    start_for_module: Callable[..., raykv.KVPool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    pool = start_for_module(cpu_memory=512 * MIB)
    model = tmp_path_factory.mktemp("model")
    save_model(model)

    arguments = (pool.name, str(model), 128 * MIB)
    here, there, patient = pool.node_id, other_node(pool), {"patience": AHEAD}
    one = engine_on(here, *arguments, extra=patient)
    two = engine_on(there, *arguments, extra=patient, apart=True)  # apart, because its processes are killed
    actors = one, two, engine_on(there, *arguments)
    for number, actor in enumerate(actors):  # so each engine learns how fast it computes
        ask(actor, prompts=[prompt(number)])
    yield Engines(pool, *actors)
    close_engines(*actors)


def test_eight_requests_of_two_engines_compute_a_prompt_once(engines: Engines) -> None:
    for seed in (10, 11, 12):
        new, before = prompt(seed), waits(engines.one) + waits(engines.two)
        eventually(lambda: engines.pool.stats()["intents"] == 0)
        asked = engines.two.answer.remote(*[new] * 4)
        eventually(lambda: engines.pool.stats()["intents"])  # so that one engine computes before the other is asked
        both = ray.get([engines.one.answer.remote(*[new] * 4), asked])
        said = [answer for answers in both for answer in answers]
        assert sorted(cached for _, cached in said)[:2] in ([0, LONG // CHUNK * CHUNK], [0, LONG // 32 * 32])
        assert waits(engines.one) + waits(engines.two) >= before + 1
        ((right, cached),) = ask(engines.brisk, prompts=[new])[0]
        assert cached == LONG // CHUNK * CHUNK and {tuple(tokens) for tokens, _ in said} == {tuple(right)}
    eventually(lambda: settled(engines.pool) and engines.pool.stats()["intents"] == 0)


def test_requests_of_one_engine_do_not_wait_for_each_other(engines: Engines) -> None:
    before = waits(engines.one)
    (said,) = ask(engines.one, prompts=[prompt(20)] * 8)
    assert sum(cached == 0 for _, cached in said) == 1 and waits(engines.one) == before


def test_engines_that_get_the_same_prompts_in_another_order_do_not_wait_for_ever(engines: Engines) -> None:
    prompts = [prompt(seed) for seed in range(30, 34)]
    asked = engines.one.answer.remote(*prompts), engines.two.answer.remote(*prompts[::-1])
    one, two = ray.get(list(asked))
    assert [tokens for tokens, _ in one] == [tokens for tokens, _ in two[::-1]]
    computed = sum(LONG - cached for _, cached in one + two)
    assert computed <= 1.2 * len(prompts) * LONG, "each is computed by one of them"


def test_an_engine_that_is_killed_while_it_computes_is_waited_for_no_longer_than_computing_takes(
    engines: Engines,
) -> None:
    """The directory takes ten seconds to notice that the engine's client is gone."""
    new = prompt(40)
    processes = ray.get(engines.two.processes.remote())
    ray.get(engines.two.begin.remote(new))
    eventually(lambda: engines.pool.stats()["intents"] == 1)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    before = waits(engines.brisk)
    ((said, cached),) = ask(engines.brisk, prompts=[new])[0]
    assert cached < LONG - CHUNK and waits(engines.brisk) == before + 1
    eventually(lambda: engines.pool.stats()["intents"] == 0)
    ((right, cached),) = ask(engines.one, prompts=[new])[0]
    assert said == right and cached == LONG // CHUNK * CHUNK
    eventually(lambda: settled(engines.pool))
