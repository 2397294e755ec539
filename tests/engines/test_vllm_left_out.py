"""An engine leaves answers out of the pool while no prompt goes on after one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from helpers.pools import MIB, eventually, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, prompt, save_model

from raykv.integrations.vllm.scheduler.answers import SAMPLE
from raykv.integrations.vllm.scheduler.counters import LEFT_OUT

pytestmark = pytest.mark.timeout(600)
CHUNK, ANSWER = 32, 70  # tokens


def test_answers_that_no_prompt_goes_on_after_are_left_out_until_one_does(
    start: Callable[..., raykv.KVPool], tmp_path: Path
) -> None:
    pool = start(cpu_memory=256 * MIB)
    save_model(tmp_path / "model")
    extra = {"answers": "auto", "blocks_per_chunk": 1}
    engine = engine_on(
        pool.node_id, pool.name, str(tmp_path / "model"), 128 * MIB, str(tmp_path / "fault"), extra=extra
    )

    def ask(*prompts: list[int], tokens: int = ANSWER) -> tuple[list[list[int]], int]:
        """(the answers, by how many chunks the pool grew)."""
        before = stored(pool)
        answers = [said for said, _ in ray.get(engine.answer.remote(*prompts, tokens=tokens))]
        ray.get(engine.answer.remote([3], tokens=1))  # in its steps vLLM stores the last chunks of the others
        eventually(lambda: ray.get(engine.reset.remote()))  # vLLM resets its cache once all stores have ended
        eventually(lambda: settled(pool))
        return answers, stored(pool) - before

    def left_out() -> float:
        return float(ray.get(engine.metrics.remote())[LEFT_OUT])

    first = [prompt(number, CHUNK + 8) for number in range(SAMPLE)]
    _, grown = ask(*first)
    in_all = (CHUNK + 8 + ANSWER - 1) // CHUNK  # of a prompt with its answer
    assert grown == SAMPLE * in_all
    ask(*(begun + prompt(1000 + number, CHUNK) for number, begun in enumerate(first)), tokens=1)
    answers, grown = ask(prompt(2001, 2 * CHUNK + 8), prompt(2002, 2 * CHUNK + 8))
    assert grown == 4 and left_out() > 0, "the prompts' chunks alone"
    ask(prompt(2001, 2 * CHUNK + 8) + answers[0] + prompt(3, CHUNK), tokens=1)
    before = left_out()
    _, grown = ask(prompt(2003, CHUNK + 8))
    assert grown == in_all and left_out() == before
    close_engines(engine)


def stored(pool: raykv.KVPool) -> int:
    return sum(node["ready"] for node in pool.stats()["nodes"].values())
