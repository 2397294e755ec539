"""vLLM engines in actors on two Ray nodes share what they have computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually, kill, part, pid, settled, stopped

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

import torch
from helpers.engines.vllm.engine import TAKES_FUNCTIONS, close_engines, engine_on, failing_loads, prompt, save_model
from helpers.engines.vllm.request import request
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, make_offload_key

from raykv.arena.buffers import rows_of
from raykv.integrations.vllm.chunks.chunks import ChunksOfLayers, ChunksToStore
from raykv.integrations.vllm.identity.groups import Group, Layers
from raykv.integrations.vllm.scheduler.counters import FAILED, HITS
from raykv.integrations.vllm.scheduler.manager import RayKVManager
from raykv.integrations.vllm.supported import check
from raykv.integrations.vllm.worker.pages import Pages
from raykv.integrations.vllm.worker.ranks import Rank
from raykv.integrations.vllm.worker.worker import RayKVWorker

pytestmark = pytest.mark.timeout(600)
CHUNK = 128  # tokens: 8 KiB each


class Engines(NamedTuple):
    """here: an engine on this node. there: an engine on `node`, which may be killed."""

    pool: raykv.KVPool
    node: Any
    here: Any
    there: Any
    model: Path

    def answer(self, engine: Any, *prompts: list[int], **how: Any) -> list[tuple[list[int], int]]:
        return ray.get(engine.answer.remote(*prompts, **how))  # type: ignore[no-any-return]

    def afresh(self, engine: Any, prompt: list[int]) -> tuple[list[int], int]:
        """`answer`, after the engine has emptied its own cache."""
        eventually(lambda: ray.get(engine.reset.remote()))
        return self.answer(engine, prompt)[0]

    def stored(self, prompt: list[int]) -> None:
        """Have a new prompt computed here until the pool has it: after a fault the engine must store it again."""
        before = eventually(lambda: self.pool.stats().get("stored", -1) + 1) - 1

        def there() -> bool:
            self.answer(self.here, prompt)
            return bool(self.pool.stats().get("stored", 0) >= before + len(prompt) // CHUNK)

        eventually(there)


@pytest.fixture(scope="module")
def engines(
    third_node_for_module: Callable[[], Any],
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    node = third_node_for_module()
    pool = start_for_module(cpu_memory=512 * MIB)
    model = tmp_path_factory.mktemp("model")
    save_model(model)

    here = engine_on(pool.node_id, pool.name, str(model), 128 * MIB, apart=True)
    there = engine_on(node.node_id, pool.name, str(model), 128 * MIB, apart=True, environment=TAKES_FUNCTIONS)
    engines = Engines(pool, node, here, there, model)
    for actor in (here, there):
        engines.answer(actor, prompt(0, 40))
    yield engines
    close_engines(here, killed=[there])


@pytest.fixture(scope="module")
def small(engines: Engines) -> Iterator[Any]:
    """Another engine on this node, with room for one long prompt only."""
    pool = engines.pool
    engine = engine_on(pool.node_id, pool.name, str(engines.model), 26 * MIB, apart=True)
    engines.answer(engine, prompt(0, 40))
    yield engine
    close_engines(engine)


def test_engines_share_a_prefix(engines: Engines) -> None:
    long = prompt(1, 3000)
    engines.stored(long)
    cold = engines.answer(engines.here, long, cold=True)[0]
    hit = engines.answer(engines.here, long)[0]
    assert cold[1] == 0 and hit == (cold[0], 2976)
    before = engines.pool.stats()
    assert engines.answer(engines.there, long)[0] == (hit[0], 2944)
    assert engines.pool.stats()["remote_hits"] == before["remote_hits"] + 23
    eventually(lambda: settled(engines.pool))
    assert ray.get(engines.there.metrics.remote())[HITS] == 23
    assert prompt(1, 3000) != prompt(2, 3000) and engines.answer(engines.here, prompt(2, 3000))[0] != hit


def test_an_engine_on_the_same_node_reads_it_in_place(engines: Engines, small: Any) -> None:
    long = prompt(99, 3000)
    engines.stored(long)
    right = engines.answer(engines.here, long, cold=True)[0][0]
    before = engines.pool.stats()
    assert engines.answer(small, long)[0] == (right, 2944)
    assert engines.pool.stats()["remote_hits"] == before["remote_hits"]


def test_decoded_blocks_are_stored(engines: Engines) -> None:
    question = prompt(3, 200)
    answer = engines.answer(engines.here, question, tokens=100)[0][0]
    turn = question + answer + prompt(4, 20)
    right = engines.answer(engines.here, turn, cold=True)[0][0]
    eventually(lambda: engines.afresh(engines.there, turn) == (right, 256))


def test_a_chunk_whose_last_token_was_not_computed_is_not_stored(engines: Engines) -> None:
    question = prompt(70, CHUNK - 8)
    answer = engines.answer(engines.here, question, tokens=8)[0][0]  # its last token has no KV yet
    engines.stored(prompt(71, 200))  # stored after the answer
    turn = question + answer + prompt(72, 20)
    said = engines.afresh(engines.there, turn)
    assert said == (engines.answer(engines.here, turn, cold=True)[0][0], 0)


def test_a_request_whose_load_fails_is_computed(engines: Engines) -> None:
    known = prompt(5, 1000)
    engines.stored(known)
    right = engines.answer(engines.here, known, cold=True)[0][0]
    failed = ray.get(engines.there.metrics.remote()).get(FAILED, 0.0)
    with failing_loads(engines.there):
        assert engines.answer(engines.there, known)[0] == (right, 0)
    assert engines.afresh(engines.there, known) == (right, 896)
    assert ray.get(engines.there.metrics.remote())[FAILED] == failed + 1
    eventually(lambda: settled(engines.pool))


def test_a_pool_hit_gives_the_tokens_of_a_hit_in_the_engines_own_cache(engines: Engines, small: Any) -> None:
    """The pool has as many tokens of these prompts as the engine's own cache. So equal pieces are computed."""
    prompts = [prompt(100 + i, CHUNK * (1 + i % 6) + 1 + i) for i in range(20)]
    for known in prompts:
        engines.stored(known)
    for engine in (small, engines.there):
        for known in prompts:
            cached = len(known) // CHUNK * CHUNK
            from_pool, own = (ray.get(engine.spell.remote(known)) for _ in range(2))
            assert from_pool == own and from_pool[2] == cached


def test_500_mixed_requests_get_the_right_tokens(engines: Engines, small: Any) -> None:
    """Common prefixes, aborts and resets, in an engine with room for a tenth of the prompts at a time."""
    random = np.random.default_rng(6)
    common = [prompt(200 + i, 60 + 60 * i) for i in range(5)]
    prompts = [common[random.integers(5)] + prompt(300 + i, int(random.integers(10, 120))) for i in range(500)]
    right = [answer[0] for answer in engines.answer(engines.here, *prompts, tokens=20, cold=True)]
    before = ray.get(small.metrics.remote())
    finished = 0
    for first in range(0, 500, 100):
        engine = engines.there if first == 200 else small  # for `there`, the blocks are on another node
        wave = ray.get(engine.mix.remote(*prompts[first : first + 100], tokens=20))
        assert wave == {i: right[first + i] for i in wave}
        finished += len(wave)
        eventually(lambda engine=engine: ray.get(engine.reset.remote()))  # type: ignore[misc]
    after = ray.get(small.metrics.remote())
    assert finished == 5 * 83
    assert after["vllm:num_preemptions"] > before["vllm:num_preemptions"] and after[HITS] > before[HITS] + 100
    eventually(lambda: settled(engines.pool))


def test_other_weights_share_nothing(engines: Engines, small: Any) -> None:
    known = prompt(50, 500)
    engines.stored(known)
    assert ray.get(small.reset.remote(connector=True))
    assert engines.answer(small, known)[0][1] == 0
    eventually(lambda: engines.afresh(small, known)[1] == 384)  # it stores and finds blocks by its new weights
    eventually(lambda: settled(engines.pool))


def test_an_engine_does_not_wait_for_the_directory(start: Callable[..., raykv.KVPool]) -> None:
    pool = start()
    pages = torch.zeros((8, MIB), dtype=torch.int8)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=MIB)
    worker = RayKVWorker(pool, [{0: cache}], 0, [Pages(Layers(0), rows_of([pages.view(torch.uint8)]))], 1)
    source = GPULoadStoreSpec([*range(4)], [4], [0])
    with stopped(pid(part(pool, "directory"))):
        assert worker.submit_store(
            1, source, ChunksToStore({0: ChunksOfLayers({0: cache.keys(np.arange(64)).tobytes()}, 0)})
        )
        job = worker._jobs[1]
        worker.wait({1})
        assert job.future is not None and not job.future.done(), "it still asks"
        assert [(result.job_id, result.success, result.transfer_size) for result in worker.get_finished()] == [
            (1, True, 0)
        ]
    worker.shutdown()


EAGLE = SimpleNamespace(method="eagle")
NUMBERED = SimpleNamespace(mm_processor_cache_gb=0)  # images


def engine(**other: Any) -> tuple[str, Any, Any]:
    """Arguments with which `check` passes, except for what `other` changes."""
    spec = other.get("kind", FullAttentionSpec)(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    parallel: dict[str, Any] = {
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "nnodes": 1,
    }
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=other.get("hashes", "sha256"), enable_prefix_caching=other.get("prefixes", False)
        ),
        model_config=SimpleNamespace(multimodal_config=other.get("images")),
        parallel_config=SimpleNamespace(**{name: other.get(name, value) for name, value in parallel.items()}),
        speculative_config=other.get("speculative"),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=other.get("extra", {})),
    )
    return (
        other.get("version", "0.32.0"),
        config,
        SimpleNamespace(kv_cache_groups=other.get("groups", [SimpleNamespace(kv_cache_spec=spec)])),
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"version": "0.28.1"}, r"pip install 'vllm>=0\.29,<0\.34'"),
        ({"hashes": "xxhash_cbor"}, "set prefix_caching_hash_algo to 'sha256'"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"decode_context_parallel_size": 2, "version": "0.29.1"}, "wrong tokens in vLLM 0.29.1: install 0.30"),
        ({"decode_context_parallel_size": 2, "extra": {"canonical_layout": True}}, "=2 and canonical_layout: a rank"),
        ({"nnodes": 2}, "nnodes=2"),
        ({"speculative": EAGLE, "pipeline_parallel_size": 2}, "method='eagle' and pipeline_parallel_size=2: only the"),
        ({"speculative": EAGLE, "extra": {"canonical_layout": True}}, "method='eagle' and canonical_layout: a drafter"),
        ({"kind": CrossAttentionSpec}, "CrossAttentionSpec, which raykv can't reuse"),
        ({"groups": []}, "no KV of a prompt, as BERT"),
        ({"images": NUMBERED}, "set mm_processor_cache_gb above 0"),
    ],
)
def test_engines_that_are_not_supported_are_refused(other: dict[str, Any], said: str) -> None:
    check(*engine())
    check(*engine(pipeline_parallel_size=2, speculative=SimpleNamespace(method="ngram")))
    check(*engine(speculative=EAGLE))
    check(*engine(decode_context_parallel_size=2))
    check(*engine(images=NUMBERED, prefixes=True))
    check(*engine(images=SimpleNamespace(mm_processor_cache_gb=4)))
    with pytest.raises(ValueError, match=said):
        check(*engine(**other))


def test_how_fast_the_engine_computes_is_learned_from_what_it_computed(start: Callable[..., raykv.KVPool]) -> None:
    """Neither from tokens that the engine or the pool had cached, nor before the computation was done."""
    pool = raykv.attach(start(cpu_memory=64 * MIB).name)
    manager = RayKVManager(pool, {"model": "m", "dtype": "uint8", "layout": "rows"})
    manager.set_ranks([Rank(pool.session.memory_name, (0,), (4096,))], [Group(0, 0, 16, 0)])
    cache = manager.caches[0][0]
    unknown, keys = cache.recompute_tokens_per_s, [make_offload_key(bytes([i]) * 32, 0) for i in range(12)]
    contexts: list[ReqContext] = []

    def ask(first: int) -> bool:
        """Whether the pool has all chunks from number `first` on, for a new request."""
        context = request(f"request {len(contexts)}", keys)
        contexts.append(context)
        answers = iter(lambda: manager.lookup(keys[first], context), None)
        found = next(answer for answer in answers if answer is not LookupResult.RETRY)
        manager.prepare_store(keys, context)
        return found is LookupResult.HIT

    assert not ask(8)
    time.sleep(0.2)
    assert cache.recompute_tokens_per_s == unknown
    manager.complete_store(keys, contexts[0])
    learned = cache.recompute_tokens_per_s
    assert 0 < learned <= 4 * 16 / 0.2
    cache.store(cache.rekey([key[:32] for key in keys]), np.zeros((len(keys), 4096), np.uint8))
    eventually(lambda: ask(0))
    manager.complete_store(keys, contexts[-1])
    assert cache.recompute_tokens_per_s == learned
    for context in contexts:
        manager.on_request_finished(context)
    manager.shutdown()


# The last test of the file: until Ray notices that a raylet was killed, a new pool takes a minute to start.
def test_streams_go_on_while_parts_of_the_pool_die(engines: Engines, cluster: Any) -> None:
    pool, here, there = engines.pool, engines.here, engines.there
    for first, what in ((400, "directory"), (420, pool.node_id)):
        prompts, right = computed(engines, here, first)
        assert answers_while(engines, there, prompts, lambda what=what: kill(pool, what)) == right  # type: ignore[misc]
        eventually(lambda first=first: engines.afresh(there, prompt(first, 1000))[1] == 896)  # type: ignore[misc]
    prompts, right = computed(engines, there, 440)
    ray.get(there.close.remote())  # or the raylet's death leaves files of vLLM in /dev/shm
    answers = answers_while(engines, here, prompts, lambda: cluster.remove_node(engines.node, allow_graceful=False))
    assert answers == right
    eventually(lambda: settled(pool))


def computed(engines: Engines, writer: Any, first: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, right answers): eight prompts with a common prefix, which the pool has on the writer's node."""
    common = prompt(first, 1000)
    prompts = [common + prompt(first + 1 + i, 100) for i in range(8)]
    right = engines.answer(writer, *prompts, tokens=100, cold=True)
    eventually(lambda: engines.afresh(writer, common)[1] == 896)
    return prompts, [answer[0] for answer in right]


def answers_while(engines: Engines, reader: Any, prompts: list[list[int]], end: Callable[[], None]) -> list[list[int]]:
    """The answers of an engine with an empty cache to prompts asked together, while something ends."""
    eventually(lambda: ray.get(reader.reset.remote()))
    killer = threading.Timer(0.05, end)
    killer.start()
    answers = engines.answer(reader, *prompts, tokens=100)
    killer.join()
    return [answer[0] for answer in answers]
