"""An engine leaves chunks out of the pool: answers that no prompt goes on after, and chunks offered too seldom."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.pools import MIB, eventually, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, prompt, save_model

from raykv.integrations.vllm.scheduler.answers import SAMPLE
from raykv.integrations.vllm.scheduler.counters import HITS, LEFT_OUT

pytestmark = pytest.mark.timeout(600)
CHUNK, ANSWER = 32, 70  # tokens


class Asking:
    """An engine of one block a chunk, on the pool's first node."""

    def __init__(self, pool: raykv.KVPool, folder: Path, **extra: Any) -> None:
        save_model(folder / "model")
        self.pool, extra = pool, {"blocks_per_chunk": 1, **extra}
        where = pool.node_id, pool.name, str(folder / "model"), 128 * MIB
        self.engine = engine_on(*where, extra=extra)

    def ask(self, *prompts: list[int], tokens: int = ANSWER) -> tuple[list[list[int]], int]:
        """(the answers, by how many chunks the pool grew)."""
        before = self.stored()
        answers = [said for said, _ in ray.get(self.engine.answer.remote(*prompts, tokens=tokens))]
        ray.get(self.engine.answer.remote([3], tokens=1))  # in its steps vLLM stores the last chunks of the others
        eventually(lambda: ray.get(self.engine.reset.remote()))  # vLLM resets its cache once all stores have ended
        eventually(lambda: settled(self.pool))
        return answers, self.stored() - before

    def stored(self) -> int:
        return sum(node["ready"] for node in self.pool.stats()["nodes"].values())

    def metric(self, name: str) -> float:
        return float(ray.get(self.engine.metrics.remote())[name])


def test_answers_that_no_prompt_goes_on_after_are_left_out_until_one_does(
    start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    engine = Asking(start(cpu_memory=256 * MIB), tmp_path, answers="auto")
    first = [prompt(number, CHUNK + 8) for number in range(SAMPLE)]
    _, grown = engine.ask(*first)
    in_all = (CHUNK + 8 + ANSWER - 1) // CHUNK  # of a prompt with its answer
    assert grown == SAMPLE * in_all
    engine.ask(*(begun + prompt(1000 + number, CHUNK) for number, begun in enumerate(first)), tokens=1)
    answers, grown = engine.ask(prompt(2001, 2 * CHUNK + 8), prompt(2002, 2 * CHUNK + 8))
    assert grown == 4 and engine.metric(LEFT_OUT) > 0, "the prompts' chunks alone"
    engine.ask(prompt(2001, 2 * CHUNK + 8) + answers[0] + prompt(3, CHUNK), tokens=1)
    before = engine.metric(LEFT_OUT)
    _, grown = engine.ask(prompt(2003, CHUNK + 8))
    assert grown == in_all and engine.metric(LEFT_OUT) == before
    close_engines(engine.engine)


def test_a_chunk_is_stored_when_it_was_offered_often_enough(start: Callable[..., raykv.KVPool], tmp_path: Path) -> None:
    engine = Asking(start(cpu_memory=256 * MIB), tmp_path, store_threshold=3, offload_prompt_only=True)
    header = prompt(1, 3 * CHUNK)
    assert [engine.ask(header + prompt(2 + turn, 2 * CHUNK), tokens=1)[1] for turn in range(3)] == [0, 0, 3]
    assert engine.metric(LEFT_OUT) == 5 + 5 + 2 and engine.metric(HITS) == 0
    engine.ask(header + prompt(2, 2 * CHUNK), tokens=1)
    assert engine.metric(HITS) == 3
    close_engines(engine.engine)
