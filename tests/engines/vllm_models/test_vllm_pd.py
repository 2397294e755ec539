"""A vLLM engine that decodes reads prompts that other engines prefilled, to the last token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
import torch
from helpers.pools import MIB, eventually, other_node, part, pid, settled, stopped

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, failing_loads, prompt, save_model
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from raykv.arena.buffers import rows_of
from raykv.integrations.vllm.chunks.chunks import ChunksOfLayers, ChunksToStore
from raykv.integrations.vllm.identity.groups import Layers
from raykv.integrations.vllm.worker.pages import Pages
from raykv.integrations.vllm.worker.worker import RayKVWorker

pytestmark = pytest.mark.timeout(600)
BLOCK, CHUNK = 32, 128  # tokens
AHEAD = 1000  # wait so many times as long as computing takes, as a machine may be busy
# around the ends of an engine's blocks and chunks
LENGTHS = [32, 33, 34, 63, 64, 65, 97, 127, 128, 129, 130, 159, 160, 161, 255, 256, 257, 258, 287, 289, 400, 1537]
Said = tuple[list[int], list[float], int]  # (tokens, logprob of each, how many of the prompt's tokens were cached)


class Engines(NamedTuple):
    """Two engines that prefill, on two nodes, and one that decodes, on the second."""

    pool: raykv.KVPool
    prefill: Any
    other: Any
    decode: Any


def spell(engine: Any, prompt: list[int], **options: Any) -> Said:
    return ray.get(engine.spell.remote(prompt, **options))  # type: ignore[no-any-return]


def alike(one: Said, two: Said) -> bool:
    return one[0] == two[0] and one[1] == pytest.approx(two[1], abs=1e-4)


@pytest.fixture(scope="module")
def engines(
    start_for_module: Callable[..., raykv.KVPool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    pool = start_for_module(cpu_memory=256 * MIB)
    model = tmp_path_factory.mktemp("model")
    save_model(model)

    def engine(node: str, role: str) -> Any:
        # room for 2,560 tokens: so blocks are used again, and may hold KV of other prompts
        arguments = (pool.name, str(model), 20 * MIB)
        return engine_on(node, *arguments, extra={"patience": AHEAD}, role=role, max_model_len=2048)

    here, there = pool.node_id, other_node(pool)
    actors = engine(here, "kv_producer"), engine(there, "kv_producer"), engine(there, "kv_consumer")
    for actor in actors:
        spell(actor, prompt(0, 1900))
    yield Engines(pool, *actors)
    close_engines(*actors)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_a_chunk_that_is_filled_in_part_has_nothing_else_in_it(start: Callable[..., raykv.KVPool], blocks: int) -> None:
    pool = start()
    pages = torch.randint(0, 127, (8, 4096), dtype=torch.int8)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4 * 4096)
    worker = RayKVWorker(pool, [{0: cache}], 0, [Pages(Layers(0), rows_of([pages.view(torch.uint8)]))], 4)
    ids, keys = [5, 3, 6, 1][:blocks], cache.keys(np.arange(32))
    source = GPULoadStoreSpec(ids, [blocks], [0])
    whole, tail = (ChunksOfLayers({0: keys[i : i + 1].tobytes()}, i, i * blocks) for i in range(2))
    worker.submit_store(1, source, ChunksToStore({0: whole}))  # without the number of blocks in the chunk
    worker.submit_store(2, source, ChunksToStore({0: tail}))
    eventually(lambda: pool.stats()["keys"] == 1 + (blocks == 4))
    out = np.full((1, cache.block_bytes), 7, np.uint8)
    with cache.match(keys[1:]) as match:
        assert match.read(out) == 1
    chunk = out.reshape(4, 4096)
    assert (chunk[:blocks] == pages.numpy().view(np.uint8)[ids]).all() and not chunk[blocks:].any()
    worker.shutdown()


def test_a_producer_waits_for_slots_before_its_blocks_are_used_again(start: Callable[..., raykv.KVPool]) -> None:
    """vLLM uses the last block of a prompt, which is not full, again for the next prompt."""
    pool = start(deadline=10.0)
    pages = torch.randint(0, 127, (8, 4096), dtype=torch.int8)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4096)
    worker = RayKVWorker(
        pool, [{0: cache}], 0, [Pages(Layers(0), rows_of([pages.view(torch.uint8)]))], 1, produces=True
    )
    keys = cache.keys(np.arange(64))
    with ThreadPoolExecutor(1) as threads:
        with stopped(pid(part(pool, "directory"))):
            worker.submit_store(
                1, GPULoadStoreSpec([*range(4)], [4], [0]), ChunksToStore({0: ChunksOfLayers({0: keys.tobytes()}, 0)})
            )
            waiting = threads.submit(worker.wait, {1})
            assert not wait([waiting], timeout=1.0).done, "the directory has not given slots"
        waiting.result()
    assert [result.transfer_size for result in worker.get_finished()] == [4 * cache.block_bytes]
    eventually(lambda: pool.stats()["keys"] == 4)
    worker.shutdown()


@pytest.mark.promise
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_prompt_is_decoded_at_once_from_what_was_prefilled_to_its_last_token(engines: Engines, tokens: int) -> None:
    new = prompt(1000 + tokens, tokens)
    first = spell(engines.prefill, new, tokens=1)
    said = spell(engines.decode, new)
    right = spell(engines.decode, new, cold=True)
    assert said[2] >= tokens - 1, "the last one is computed in any case"
    assert alike(said, right) and first[0] == right[0][:1] and right[2] == 0


@pytest.mark.parametrize("tokens", [90, 2 * CHUNK + 90])
def test_a_tail_is_no_others(engines: Engines, tokens: int) -> None:
    known = prompt(2000 + tokens, tokens)
    spell(engines.prefill, known, tokens=1)
    full = tokens // CHUNK * CHUNK
    longer, shorter, other = [*known, 7], known[:-1], [*known[:-1], (known[-1] + 1) % 500]
    for new in (longer, shorter, other):
        said = spell(engines.decode, new)
        assert said[2] == full or said[2] <= tokens // BLOCK * BLOCK, "nothing of the tail but what the engine computed"
        assert alike(said, spell(engines.decode, new, cold=True))
    salted = spell(engines.decode, known, salt="a tenant")
    assert salted[2] == 0 and alike(salted, spell(engines.decode, known, cold=True))


def test_who_read_a_tail_stores_the_chunk_that_it_begins_when_it_is_full(engines: Engines) -> None:
    known = prompt(3000, 2 * CHUNK + 90)
    spell(engines.prefill, known, tokens=1)
    said = spell(engines.other, known, tokens=100)
    assert said[2] == len(known)
    turn = [*known, *said[0], *prompt(3001, 50)]
    eventually(lambda: settled(engines.pool))
    again = spell(engines.decode, turn)
    assert again[2] == 3 * CHUNK and alike(again, spell(engines.decode, turn, cold=True))


def test_who_decodes_stores_nothing(engines: Engines) -> None:
    eventually(lambda: settled(engines.pool))
    before = engines.pool.stats()["keys"]
    ray.get(engines.decode.answer.remote(prompt(4000, 3 * CHUNK), tokens=2 * CHUNK))
    ray.get(engines.decode.answer.remote(prompt(4001, 50)))
    eventually(lambda: settled(engines.pool) and engines.pool.stats()["intents"] == 0)
    assert engines.pool.stats()["keys"] == before


def test_a_tail_that_does_not_arrive_is_computed(engines: Engines) -> None:
    new = prompt(5000, CHUNK + 70)
    spell(engines.prefill, new, tokens=1)
    with failing_loads(engines.decode):
        said = spell(engines.decode, new)
    assert said[2] == 0 and alike(said, spell(engines.decode, new, cold=True))


def test_many_prompts_at_once(engines: Engines) -> None:
    """Prompts of one document, of others, and some twice, with tails of all lengths."""
    document = prompt(6000, CHUNK)
    prompts = [[*document, *prompt(6001 + i % 9, 3 + 17 * (i % 9))] for i in range(12)]
    first = ray.get(engines.prefill.answer.remote(*prompts, tokens=1))
    said = ray.get(engines.decode.answer.remote(*prompts, tokens=8))
    right = ray.get(engines.decode.answer.remote(*prompts, tokens=8, cold=True))
    assert [tokens for tokens, _ in said] == [tokens for tokens, _ in right]
    assert [tokens for tokens, _ in first] == [tokens[:1] for tokens, _ in right]
    read = [(len(one), cached) for one, (_, cached) in zip(prompts, said, strict=True)]
    assert not [(tokens, cached) for tokens, cached in read if cached < tokens - BLOCK], read
    eventually(lambda: settled(engines.pool) and engines.pool.stats()["intents"] == 0)
