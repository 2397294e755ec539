"""Engines whose weights change, or that speculate, read only KV of their own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from helpers.pools import MIB, eventually, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, prompt, save_model

from raykv.integrations.vllm.identity.weights import Weights

pytestmark = pytest.mark.timeout(600)
CHUNK = 128  # tokens


class Engines(NamedTuple):
    """Two engines on this node. The second speculates. files: hold the names of their weights."""

    pool: raykv.KVPool
    actors: tuple[Any, Any]
    files: tuple[Path, Path]

    def answer(self, number: int, prompt: list[int], **how: Any) -> tuple[list[int], int]:
        return ray.get(self.actors[number].answer.remote(prompt, **how))[0]  # type: ignore[no-any-return]

    def cached(self, number: int, prompt: list[int]) -> int:
        """How many tokens an engine reads from the pool, after it has emptied its own cache."""
        eventually(lambda: ray.get(self.actors[number].reset.remote()))
        return self.answer(number, prompt)[1]

    def stored(self, number: int, prompt: list[int]) -> list[int]:
        """An engine's answer to a prompt that it computes, once the pool has the prompt."""
        before = self.pool.stats()["keys"]
        said, cached = self.answer(number, prompt)
        assert not cached
        eventually(lambda: self.pool.stats()["keys"] >= before + len(prompt) // CHUNK)
        return said

    def name(self, number: int, weights: str) -> None:
        """Tell an engine that its weights have changed, and their new name."""
        self.files[number].write_text(weights)
        assert ray.get(self.actors[number].reset.remote(connector=True))


@pytest.fixture(scope="module")
def engines(
    start_for_module: Callable[..., raykv.KVPool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    pool, folder = start_for_module(cpu_memory=256 * MIB), tmp_path_factory.mktemp("weights")
    save_model(folder / "model")
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    options: tuple[dict[str, Any], ...] = ({}, {"speculative_config": ngram})
    files = folder / "first", folder / "second"
    actors: list[Any] = []
    for file, more in zip(files, options, strict=True):
        file.write_text("loaded")
        arguments = (pool.name, str(folder / "model"), 128 * MIB)
        actors.append(engine_on(pool.node_id, *arguments, extra={"weights": str(file)}, **more))
    engines = Engines(pool, (actors[0], actors[1]), files)
    for number in range(2):
        engines.answer(number, prompt(0, 40))
    yield engines
    close_engines(*actors)


def test_an_engine_that_speculates_says_the_same_and_shares(engines: Engines) -> None:
    """The prompt repeats itself, so that speculation succeeds."""
    repeated = prompt(1, 60) * 12
    right = engines.answer(0, repeated, cold=True, tokens=100)[0]
    assert engines.answer(1, repeated, cold=True, tokens=100)[0] == right
    metrics = ray.get(engines.actors[1].metrics.remote())
    assert metrics["vllm:spec_decode_num_draft_tokens"] > 0
    for reader in (0, 1):
        eventually(lambda reader=reader: engines.cached(reader, repeated) == 640)  # type: ignore[misc]
        assert engines.answer(reader, repeated, tokens=100)[0] == right
    turn = repeated + right  # with tokens that speculation generated
    right = engines.answer(0, turn, cold=True)[0]
    eventually(lambda: engines.cached(0, turn) == 768)
    assert engines.answer(0, turn)[0] == right
    eventually(lambda: settled(engines.pool))


def test_named_weights_are_shared_after_a_reset(engines: Engines) -> None:
    known = prompt(2, 500)
    said = engines.stored(0, known)
    assert engines.cached(1, known) == 384
    engines.name(0, "step 1")
    assert engines.stored(0, known) == said  # no KV of the former weights is read
    engines.name(1, "step 1")
    assert engines.cached(1, known) == 384
    new = prompt(3, 500)
    engines.stored(1, new)
    assert engines.cached(0, new) == 384
    engines.name(0, "")  # weights without a name
    assert not engines.cached(0, new)
    engines.name(0, "loaded")
    engines.name(1, "loaded")
    assert engines.cached(0, known) == 384 and not engines.cached(1, new)


def test_what_a_request_computed_before_a_reset_is_not_stored(engines: Engines) -> None:
    running = prompt(4, 500)
    engines.files[0].write_text("step 2")
    assert ray.get(engines.actors[0].reset_while_it_runs.remote(running))
    assert not engines.cached(0, running)
    engines.name(0, "loaded")


def test_weights_have_a_name_or_one_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    with pytest.raises(ValueError, match="write what the engine's weights are called"):
        Weights(str(file))
    file.write_text("step 1\n")
    one, other, unnamed = Weights(str(file)), Weights(str(file)), Weights(None)
    assert one.name == other.name != unnamed.name == ""
    one.reset()
    assert one.name == other.name
    file.unlink()
    for weights in (one, other, unnamed):
        weights.reset()
    assert len({one.name, other.name, unnamed.name}) == 3
