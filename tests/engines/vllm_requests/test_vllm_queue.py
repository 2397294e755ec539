"""While a request waits in an engine's queue, its chunks are fetched to the engine's node."""

from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from helpers.pools import MIB, eventually, node_store, other_node, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, prompt, save_model

pytestmark = pytest.mark.timeout(600)
CHUNK, CHUNKS = 128, 10  # tokens of a chunk, which has 1 MiB; chunks of the prompt
OWN = 2  # chunks of the prompt that the engine's own cache has
AHEAD = 8  # chunks that are fetched ahead, at most: a quarter of the staging window


def pulled(pool: raykv.KVPool) -> int:
    """How many blocks have come to this node."""
    return int(ray.get(node_store(pool, pool.node_id).stats.remote())["pulled"])


def test_chunks_are_fetched_before_the_request_is_scheduled(start: Callable[..., raykv.KVPool], tmp_path: Path) -> None:
    pool = start(cpu_memory=256 * MIB)
    save_model(tmp_path)
    arguments, extra = (pool.name, str(tmp_path), 64 * MIB), {"verify_tokens": False}
    writer = engine_on(other_node(pool), *arguments, extra=extra)
    reader = engine_on(pool.node_id, *arguments, extra=extra, max_num_seqs=1)
    known = prompt(1, CHUNKS * CHUNK + 20)
    ((right, _),) = ray.get(writer.answer.remote(known))
    eventually(lambda: settled(pool) and pool.stats()["keys"] == CHUNKS)
    before = pulled(pool)
    assert ray.get(reader.answer.remote(known[: OWN * CHUNK + 20]))[0][1] == OWN * CHUNK
    assert pulled(pool) == before + OWN

    ray.get([reader.begin.remote(prompt(3, 40), "first", 3000), reader.begin.remote(known, "second")])
    eventually(lambda: pulled(pool) == before + OWN + AHEAD)
    assert ray.get(reader.unfinished.remote()) == 2, "the engine has room for one request, and the second waited"
    ray.get(reader.end.remote("first"))
    eventually(lambda: not ray.get(reader.unfinished.remote()))
    assert pulled(pool) == before + OWN + AHEAD, "the engine read the copies on its node"

    eventually(lambda: ray.get(reader.reset.remote()))
    assert ray.get(reader.answer.remote(known)) == [(right, CHUNKS * CHUNK)]
    eventually(lambda: settled(pool))
    close_engines(writer, reader)
