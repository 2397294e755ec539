"""Engines on two Ray nodes, each with a real transformers model, share the KV of their prompts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
import torch
from helpers.pools import eventually, node_store, other_node, pid, worker
from transformers import LlamaConfig, LlamaForCausalLM

import raykv
from raykv.cluster import named_actors
from raykv.integrations.transformers import model_cache, prefill

PROMPT = np.random.default_rng(0).integers(0, 500, 205).tolist()  # 12 full blocks and 13 tokens


class Engine:
    """A tiny Llama. Engines with equal seeds have equal weights."""

    def __init__(self, pool: str) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 500}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
        self.pool = raykv.attach(pool)
        self.cache = model_cache(self.pool, self.model, name="tiny")

    def answer(self, prompt: list[int], **fields: Any) -> tuple[int, tuple[str, ...], list[int], list[int]]:
        """(number of tokens from the pool, their nodes, greedy tokens, greedy tokens without the pool)."""
        start = prefill(self.model, self.cache, prompt, **fields)
        plain = self.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        tokens = [int(start.logits.argmax())]
        past = start.past_key_values
        while len(tokens) < 8:
            with torch.no_grad():
                out = self.model(torch.tensor([tokens[-1:]]), past_key_values=past, use_cache=True)
            tokens.append(int(out.logits[0, -1].argmax()))
        return start.pool_tokens, start.nodes, tokens, plain.tolist()


@pytest.mark.promise
def test_engines_share_a_prefix(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    here, there = (worker(pool, node, Engine) for node in (pool.node_id, other_node(pool)))
    tokens, nodes, answer, plain = ray.get(here.answer.remote(PROMPT))
    assert (tokens, nodes) == (0, ()) and answer == plain
    assert ray.get(here.answer.remote(PROMPT)) == (192, (pool.node_id,), plain, plain), "on its own node"
    assert ray.get(there.answer.remote(PROMPT)) == (192, (pool.node_id,), plain, plain), "from the other node"
    longer = [*PROMPT, *PROMPT[:40]]
    tokens, _, answer, plain = ray.get(there.answer.remote(longer))
    assert tokens == 192 and answer == plain
    tokens, _, answer, plain = ray.get(here.answer.remote(longer))
    assert tokens == 240 and answer == plain, "what the other engine computed on top of it"
    tokens, _, answer, plain = ray.get(here.answer.remote(longer, salt="another tenant"))
    assert tokens == 0 and answer == plain


def test_an_engine_goes_on_without_the_pool(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    engine = worker(pool, pool.node_id, Engine)
    expected = ray.get(engine.answer.remote(PROMPT))[3]
    pid_before = pid(node_store(pool, pool.node_id))
    ray.kill(node_store(pool, pool.node_id), no_restart=False)
    ray.kill(named_actors.find_directory(pool.name), no_restart=False)
    for _ in range(3):
        assert ray.get(engine.answer.remote(PROMPT))[2] == expected
    eventually(lambda: ray.get(engine.answer.remote(PROMPT))[0] == 192)
    assert pid(node_store(pool, pool.node_id)) != pid_before
    pool.stop()
    tokens, _, answer, _ = ray.get(engine.answer.remote(PROMPT))
    assert (tokens, answer) == (0, expected)
