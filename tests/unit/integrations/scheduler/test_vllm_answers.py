"""An engine that learns whether later prompts go on after its answers."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from raykv.integrations.vllm.scheduler import answers
from raykv.integrations.vllm.scheduler.answers import SAMPLE, Answers


def chunks(*names: object) -> list[bytes]:
    return [str(name).encode() for name in names]


def ask(learned: Answers, number: int, goes_on: bool) -> None:
    """A chat of two turns. goes_on: the second prompt has the first answer."""
    learned.learn(chunks("system", number, f"{number} answer"), prompt=2)
    following = f"{number} answer" if goes_on else f"{number} without reasoning"
    learned.learn(chunks("system", number, following, "more", "last answer"), prompt=4)


def test_answers_are_dropped_once_no_prompt_has_gone_on_after_one_for_long() -> None:
    learned = Answers()
    for number in range(SAMPLE):
        assert not learned.are_dropped
        ask(learned, number, goes_on=False)
    assert learned.are_dropped
    ask(learned, SAMPLE, goes_on=True)
    assert not learned.are_dropped
    for number in range(SAMPLE + 1, 2 * SAMPLE + 1):
        assert not learned.are_dropped
        ask(learned, number, goes_on=False)
    assert learned.are_dropped


def test_prompts_that_are_asked_again_or_never_go_on_say_nothing() -> None:
    learned = Answers()
    for number in range(2 * SAMPLE):
        for _ in range(2):
            learned.learn(chunks(number, f"{number} answer"), prompt=1)
        learned.learn(chunks(f"{number} alone", "answer"), prompt=0)
        learned.learn(chunks(f"{number} whole"), prompt=1)
    assert not learned.are_dropped


def test_old_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST", SAMPLE)
    learned = Answers()
    for number in range(2 * SAMPLE):
        learned.learn(chunks(number, "answer"), prompt=1)
    for number in range(2 * SAMPLE):
        assert not learned.are_dropped
        learned.learn(chunks(number, "another turn"), prompt=2)
    assert learned.are_dropped, "the last answers are remembered"
