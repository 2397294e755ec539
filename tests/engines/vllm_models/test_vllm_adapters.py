"""Engines read only KV of the weights from which their LoRA adapters were loaded."""

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

from helpers.engines.lora import save_adapter
from helpers.engines.vllm.engine import close_engines, engine_on, save_model
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.timeout(600)
CHUNK = 128  # tokens
WHOLE = 3 * CHUNK  # tokens of a prompt that can be read


class Engines(NamedTuple):
    """actors: two engines, called by number. folder: has their adapters."""

    actors: tuple[Any, Any]
    folder: Path

    def adapter(self, name: str, seed: int, number: int = 1, **fields: Any) -> LoRARequest:
        """Write an adapter with the weights of a seed. Returns a request for the adapter."""
        save_adapter(self.folder / name, seed, layers=4, size=256)
        return LoRARequest(name, number, str(self.folder / name), **fields)

    def load(self, engine: int, lora: LoRARequest) -> None:
        assert ray.get(self.actors[engine].load.remote(lora))

    def answer(self, engine: int, prompt: list[int], lora: LoRARequest, cold: bool = False) -> tuple[list[int], int]:
        """(tokens, how many tokens were read) from an engine, after it has emptied its own cache."""
        eventually(lambda: ray.get(self.actors[engine].reset.remote()))
        return ray.get(self.actors[engine].answer.remote(prompt, cold=cold, lora=lora))[0]  # type: ignore[no-any-return]

    def again(self, engine: int, prompt: list[int], lora: LoRARequest) -> list[int]:
        """The tokens of an engine that may use its own cache."""
        return ray.get(self.actors[engine].answer.remote(prompt, lora=lora))[0][0]  # type: ignore[no-any-return]

    def read(self, engine: int, prompt: list[int], lora: LoRARequest) -> list[int]:
        """The tokens of an engine once it reads all of the prompt, after a check that computing gives the same."""
        eventually(lambda: self.answer(engine, prompt, lora)[1] == WHOLE)
        said, found = self.answer(engine, prompt, lora)
        assert found == WHOLE and said == self.answer(engine, prompt, lora, cold=True)[0]
        return said


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, WHOLE + 40).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def engines(
    start_for_module: Callable[..., raykv.KVPool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    pool, folder = start_for_module(cpu_memory=256 * MIB), tmp_path_factory.mktemp("adapters")
    save_model(folder / "model")
    options: Any = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 2}
    arguments = (pool.name, str(folder / "model"), 128 * MIB)
    one, other = (engine_on(pool.node_id, *arguments, **options) for _ in range(2))
    yield Engines((one, other), folder)
    close_engines(one, other)


def test_engines_share_what_they_compute_for_an_adapter(engines: Engines) -> None:
    """The request that loads an adapter is stored, and one that finds the adapter loaded reads."""
    lora, asked = engines.adapter("shared", 1), prompt(1)
    said, found = engines.answer(0, asked, lora)
    assert not found
    engines.load(1, lora)
    eventually(lambda: engines.answer(1, asked, lora) == (said, WHOLE))
    assert engines.read(0, asked, lora) == said


def test_an_adapter_that_is_loaded_in_place_has_keys_of_its_own(engines: Engines) -> None:
    lora, asked = engines.adapter("inplace", 2, 2), prompt(2)
    said = engines.answer(0, asked, lora)[0]
    assert engines.read(0, asked, lora) == said
    engines.load(0, engines.adapter("inplace", 3, 2, load_inplace=True))
    other, found = engines.answer(0, asked, lora)
    assert other == engines.answer(0, asked, lora, cold=True)[0] != said
    assert not found
    engines.load(0, engines.adapter("inplace", 2, 2, load_inplace=True))
    assert engines.read(0, asked, lora) == said


def test_files_that_change_after_an_adapter_was_loaded_name_nothing(engines: Engines) -> None:
    """An engine that loads the new files reads no KV of the old ones, and the other way round."""
    lora, asked = engines.adapter("replaced", 4, 3), prompt(3)
    engines.load(0, lora)
    engines.adapter("replaced", 5, 3)
    old = engines.answer(0, asked, lora)[0]
    assert engines.read(0, asked, lora) == old
    engines.load(1, lora)
    new, found = engines.answer(1, asked, lora)
    assert not found
    assert new == engines.answer(1, asked, lora, cold=True)[0] != old
    assert engines.read(1, asked, lora) == new
    assert engines.read(0, asked, lora) == old


def test_an_adapter_that_was_let_go_is_named_by_what_is_loaded_then(engines: Engines) -> None:
    """A worker has room for two adapters. It evicts one for a third, and may load that again from new files."""
    lora, asked = engines.adapter("evicted", 6, 4), prompt(4)
    old = engines.answer(0, asked, lora)[0]
    assert engines.read(0, asked, lora) == old
    engines.adapter("evicted", 7, 4)
    for number in (5, 6):
        engines.answer(0, prompt(5), engines.adapter(f"other{number}", number, number))
    new = engines.answer(0, asked, lora)[0]
    assert new == engines.answer(0, asked, lora, cold=True)[0] != old


def test_an_engines_own_cache_gives_the_pool_no_kv_of_old_weights(engines: Engines) -> None:
    """vLLM's own cache finds blocks by an adapter's name, and is not reset here."""
    lora, asked = engines.adapter("kept", 8, 7), prompt(6)
    old = engines.again(0, asked, lora)
    assert engines.read(0, asked, lora) == old
    engines.load(0, engines.adapter("kept", 9, 7, load_inplace=True))
    new = engines.again(0, asked, lora)
    assert new != old
    engines.load(1, engines.adapter("kept", 9, 7))
    assert engines.read(1, asked, lora) == new
    renamed = engines.adapter("kept", 10, 8)  # the same name, loaded under another number
    engines.load(0, renamed)
    newest = engines.again(0, asked, renamed)
    assert newest not in (old, new)
    engines.load(1, renamed)
    assert engines.read(1, asked, renamed) == newest


def test_all_ranks_tell_what_they_loaded(engines: Engines, start: Callable[..., raykv.KVPool]) -> None:
    pool = start(cpu_memory=128 * MIB)
    lora, asked = engines.adapter("ranks", 11, 9), prompt(7)
    options: Any = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "tensor_parallel_size": 2}
    options["extra"] = {"blocks_per_chunk": CHUNK // 32}
    arguments = (pool.name, str(engines.folder / "model"), 128 * MIB)
    engine = engine_on(pool.node_id, *arguments, apart=True, **options)
    two = Engines((engine, engine), engines.folder)
    old = two.answer(0, asked, lora)[0]
    assert two.read(0, asked, lora) == old
    two.load(0, engines.adapter("ranks", 12, 9, load_inplace=True))
    new = two.answer(0, asked, lora)[0]
    assert new == two.answer(0, asked, lora, cold=True)[0] != old
    assert two.read(0, asked, lora) == new
    close_engines(engine)
