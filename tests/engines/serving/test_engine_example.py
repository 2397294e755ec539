"""`examples/engine.py` gives the tokens of `model.generate`, and computes no cached token."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pools import MIB, eventually, settled
from ray import serve

import raykv
from examples.engine import MODEL, BlockPool, Engine, build, load_model
from raykv.integrations.transformers import model_cache

BLOCK_TOKENS = 16


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()  # type: ignore[no-any-return]


@functools.cache
def right(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    """The tokens that the model itself generates."""
    asked = torch.tensor([prompt])
    said = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=count, do_sample=False)
    return said[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def served(engine: Engine, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    answers = [engine.add(prompt, count) for prompt in prompts]
    while engine.step():
        pass
    return [answer.result(0) for answer in answers]


@pytest.fixture(scope="module")
def model() -> Any:
    model = load_model()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=64 * MIB)


@pytest.fixture
def cache(pool: raykv.KVPool, model: Any, request: pytest.FixtureRequest) -> raykv.KVCache:
    """A cache with a model name that no other test has."""
    return model_cache(pool, model, name=f"{MODEL} {request.node.name}")


@pytest.mark.parametrize(
    "blocks", [200, 30]
)  # with 30 blocks, some leave while they are wanted, and requests are preempted
def test_tokens_are_those_of_the_model_however_few_blocks_there_are(
    cache: raykv.KVCache, model: Any, blocks: int
) -> None:
    header = tokens(0, 6 * BLOCK_TOKENS)
    prompts = [header + tokens(i, 1 + 25 * i) for i in range(8)] + [tokens(50, 1), header]
    engine = Engine(model, cache, blocks)
    assert served(engine, prompts, 20) == [right(model, tuple(prompt), 20) for prompt in prompts]
    assert engine.pool.free == blocks and not engine.running


def test_what_the_engine_has_and_what_the_pool_has_is_not_computed(cache: raykv.KVCache, model: Any) -> None:
    header = tokens(0, 10 * BLOCK_TOKENS)
    prompts = [header + tokens(i, 20) for i in range(1, 9)]
    engine = Engine(model, cache, 200)
    said = served(engine, prompts, 4)
    assert engine.computed_tokens == len(header) + 8 * 20, "requests that come at once compute what they share once"
    assert served(engine, prompts[:1], 4) == said[:1]
    assert engine.computed_tokens == len(header) + 8 * 20 + 4, "its last block is not full"
    eventually(lambda: settled(raykv.attach(cache.session.name)))
    other = Engine(model, cache, 200)
    assert served(other, prompts, 4) == said
    assert other.computed_tokens == 8 * 4


def test_what_does_not_fit_is_refused(cache: raykv.KVCache, model: Any) -> None:
    engine = Engine(model, cache, 4)
    with pytest.raises(ValueError, match=r"60 \+ 5 tokens do not fit into 4 blocks"):
        engine.add(tokens(0, 60), 5)
    for odd in ([], [256], [-1]):
        with pytest.raises(ValueError, match="token ids below 256"):
            engine.add(odd, 1)
    assert served(engine, [tokens(0, 60)], 4) == [right(model, tuple(tokens(0, 60)), 4)]


def test_blocks_that_rest_behind_one_that_is_gone_are_not_held() -> None:
    pool, names = BlockPool(4), [bytes([i]) for i in range(3)]
    one, two = pool.take(1), pool.take(2)
    pool.name(one + two, names)
    pool.release(one)
    assert pool.find(names) == one + two and pool.held(one + two) == 0 and pool.free == 2
    pool.take(2)
    assert pool.find(names) == [] and pool.free == 0


def test_a_request_that_fails_ends_no_other(cache: raykv.KVCache, model: Any) -> None:
    engine = Engine(model, cache, 100)
    forward, asked = engine._forward, tokens(60, 50)

    def fail(*_: Any) -> list[int]:
        engine._forward = forward  # type: ignore[method-assign]
        raise RuntimeError("a step that fails")

    engine._forward = fail  # type: ignore[assignment,method-assign]
    threading.Thread(target=engine.run, daemon=True).start()
    with pytest.raises(RuntimeError, match="a step that fails"):
        engine.add(asked, 4).result(60)
    answer = engine.add(asked, 4)
    assert not answer.cancel() and answer.result(60) == right(model, tuple(asked), 4)
    assert engine.pool.free == 100


def test_replicas_compute_little_more_than_the_least(pool: raykv.KVPool) -> None:
    headers = [tokens(i, 10 * BLOCK_TOKENS) for i in range(3)]
    prompts = [headers[i % 3] + tokens(100 + i, 48) for i in range(200)]
    serve.start(proxy_location="Disabled")
    try:
        engines = serve.run(build({"pool": pool.name}))
        answers = [engines.remote(token_ids=prompt, max_tokens=2) for prompt in prompts]
        assert all(len(answer.result(timeout_s=280)) == 2 for answer in answers)
        computed = sum(engines.broadcast("computed_tokens").results())
    finally:
        serve.shutdown()
    least = 3 * 10 * BLOCK_TOKENS + 200 * 48
    assert least <= computed <= 1.05 * least
