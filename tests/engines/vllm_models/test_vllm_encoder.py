"""vLLM engines share the outputs of their encoders: an image is encoded once for the cluster."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually, kill, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on
from helpers.engines.vllm.vision import IMAGE, OPTIONS, image, save_vision_model

from raykv.integrations.vllm.encoder import ec_transfer_config

pytestmark = pytest.mark.timeout(600)


class Engines(NamedTuple):
    pool: raykv.KVPool
    nodes: list[str]
    one: Any
    two: Any
    alone: Any
    start: Callable[..., Any]


@pytest.fixture(scope="module")
def engines(
    cluster: Any, start_for_module: Callable[..., raykv.KVPool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Two engines that share outputs, and one whose encoder has no pool."""
    pool = start_for_module(cpu_memory=64 * MIB)
    model = tmp_path_factory.mktemp("model")
    save_vision_model(model)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]][:2]
    arguments = (pool.name, str(model), 64 * MIB)

    def start(node: str, encoder: dict[str, Any] | None, **options: Any) -> Any:
        options |= {"extra": {"blocks_per_chunk": 1}, "enable_mm_processor_stats": True, **OPTIONS}
        return engine_on(node, *arguments, ec_transfer_config=encoder, **options)

    shared = ec_transfer_config(pool.name)
    one, two, alone = start(nodes[0], shared), start(nodes[1], shared), start(nodes[0], None)
    yield Engines(pool, nodes, one, two, alone, start)
    close_engines(one, two, alone)


def asked(seed: int, images: int = 1) -> list[int]:
    """A prompt that begins unlike the others, so that no engine has its KV, and ends with images."""
    return [*prompt(seed, 40), *([IMAGE, 7] * images)]


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 400, tokens).tolist()  # type: ignore[no-any-return]


def look(engine: Any, images: list[Any], *prompts: list[int]) -> tuple[list[list[int]], int]:
    """(tokens of the answers, how many images were encoded)."""
    answers, encoded = ray.get(engine.look.remote(images, *prompts))
    return [said for said, _ in answers], encoded


def test_an_image_that_another_engine_has_encoded_is_not_encoded_again(engines: Engines) -> None:
    seen = [image(1)]
    assert look(engines.one, seen, asked(1))[1] == 1
    eventually(lambda: settled(engines.pool))
    said, encoded = look(engines.two, seen, asked(2))
    assert encoded == 0
    assert said == look(engines.alone, seen, asked(2))[0]
    assert said != look(engines.alone, [image(9)], asked(2))[0], "an answer depends on the image"


def test_only_the_images_that_the_pool_lacks_are_encoded(engines: Engines) -> None:
    look(engines.one, [image(2)], asked(3))
    eventually(lambda: settled(engines.pool))
    both = [image(2), image(3)]
    prompts = [asked(4, images=2), asked(5, images=2)]
    said, encoded = look(engines.two, both, *prompts)
    assert encoded == 1
    assert said == look(engines.alone, both, *prompts)[0]


def test_the_kv_of_a_prompt_is_read_with_the_same_image_only(engines: Engines) -> None:
    """The image's tokens begin in the second block of 32 tokens."""
    asked_of = [*asked(10), *prompt(11, 60)]
    ray.get(engines.one.look.remote([image(6)], asked_of))
    eventually(lambda: settled(engines.pool))
    ((said, cached),), encoded = ray.get(engines.two.look.remote([image(6)], asked_of))
    assert cached >= 96 and not encoded
    assert [said] == look(engines.alone, [image(6)], asked_of)[0]
    ((said, cached),), encoded = ray.get(engines.two.look.remote([image(7)], asked_of))
    assert cached == 32 and encoded
    assert [said] == look(engines.alone, [image(7)], asked_of)[0]


def test_ranks_in_processes_of_their_own_get_the_outputs_that_the_scheduler_read(
    engines: Engines, request: pytest.FixtureRequest
) -> None:
    shared = ec_transfer_config(engines.pool.name)
    ranks = engines.start(engines.nodes[1], shared, apart=True, tensor_parallel_size=2)
    request.addfinalizer(lambda: close_engines(ranks))
    seen = [image(5)]
    look(engines.one, seen, asked(8))
    eventually(lambda: settled(engines.pool))
    said, encoded = look(ranks, seen, asked(9))
    assert encoded == 0
    assert said == look(engines.alone, seen, asked(9))[0]


def test_encoding_runs_apart_from_the_model(engines: Engines, request: pytest.FixtureRequest) -> None:
    of_role = [ec_transfer_config(engines.pool.name, role) for role in ("ec_producer", "ec_consumer")]
    nodes = zip(engines.nodes, of_role, strict=True)
    encoder, reader = [engines.start(node, config, kv_transfer_config=None) for node, config in nodes]
    request.addfinalizer(lambda: close_engines(encoder, reader))
    seen = [image(8)]
    assert look(encoder, seen, asked(12))[1] == 1
    said, encoded = look(reader, seen, asked(13))
    assert encoded == 0, "the pool had it when the encoder's request ended"
    assert said == look(engines.alone, seen, asked(13))[0]
    assert look(reader, [image(10)], asked(14))[1] == 1, "the engine encodes what nobody has encoded"
    eventually(lambda: settled(engines.pool))
    assert look(engines.two, [image(10)], asked(15))[1] == 1, "a consumer stores nothing"


def test_what_the_pool_lost_is_encoded_again(engines: Engines) -> None:
    look(engines.one, [image(4)], asked(6))
    eventually(lambda: settled(engines.pool))
    engines.pool.clear()
    said, encoded = look(engines.two, [image(4)], asked(7))
    assert encoded == 1
    assert said == look(engines.alone, [image(4)], asked(7))[0]


def test_stores_and_a_directory_that_are_killed_cost_no_answer(engines: Engines) -> None:
    seen = [image(11), image(12)]
    look(engines.one, seen, asked(16, images=2))
    kill(engines.pool, "directory", *engines.nodes)
    said, _ = look(engines.two, seen, asked(17, images=2))
    assert said == look(engines.alone, seen, asked(17, images=2))[0]
