"""vLLM engines whose ranks are on different nodes, by vLLM's own Ray executor, share KV."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from helpers.pools import MIB, eventually, node_store, pid, settled

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm import ray_engine
from helpers.engines.vllm.engine import prompt, save_model

pytestmark = pytest.mark.timeout(900)
CHUNK = 256  # tokens: each of two ranks has 4 KiB of a chunk
Spelt = tuple[list[int], list[float], int]


class Engines(NamedTuple):
    """Engines whose two ranks are on `left` and `right`. Their schedulers are on the head, `left` and `right`."""

    pool: raykv.KVPool
    left: Any
    right: Any
    one: Any
    two: Any
    swapped: Any

    def stored(self, engine: Any, prompt: list[int]) -> Spelt:
        """An engine's answer to a new prompt, once all of its chunks are in the pool."""
        before = self.pool.stats()["keys"]
        said = spell(engine, prompt)
        assert said[2] == 0
        eventually(lambda: self.pool.stats()["keys"] == before + 2 * (len(prompt) // CHUNK))
        return said

    def ready(self) -> list[int]:
        """Numbers of blocks on the head's node, the left one and the right one."""
        nodes = self.pool.stats()["nodes"]
        return [nodes[node]["ready"] for node in (self.pool.node_id, self.left.node_id, self.right.node_id)]


def spell(engine: Any, prompt: list[int]) -> Spelt:
    return ray.get(engine.spell.remote(prompt))  # type: ignore[no-any-return]


def same(said: Spelt, computed: Spelt) -> bool:
    """Whether the tokens are the same, with nearly equal logprobs: other pieces change the last bits."""
    return said[0] == computed[0] and said[1] == pytest.approx(computed[1], abs=1e-4)


@pytest.fixture(scope="module")
def engines(
    third_node_for_module: Callable[..., Any],
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    left, right = (third_node_for_module(num_gpus=3, resources={side: 1}) for side in ("left", "right"))
    pool = start_for_module(cpu_memory=128 * MIB)
    model = tmp_path_factory.mktemp("model")
    save_model(model)
    places = {ray_engine.HEAD: ("left", "right"), "left": ("left", "right"), "right": ("right", "left")}
    actors = []
    for driver, ranks in places.items():  # one by one: vLLM takes a rank for dead that answers late
        actors.append(ray_engine.start(driver, ranks, pool.name, str(model)))
        ray.get(actors[-1].answer.remote(prompt(0, 40)), timeout=600)
    shared: list[set[str]] = [ray.get(actor.files.remote()) for actor in actors]
    yield Engines(pool, left, right, *actors)
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError):  # actors of a killed node
            ray.get(actor.close.remote())
        ray.kill(actor)
    for file in set().union(*shared):
        Path(file).unlink(missing_ok=True)


def test_every_rank_reads_and_writes_the_memory_of_its_own_node(engines: Engines) -> None:
    for engine, places in (
        (engines.one, (engines.left, engines.right)),
        (engines.two, (engines.left, engines.right)),
        (engines.swapped, (engines.right, engines.left)),
    ):
        nodes = [place.node_id for place in places]
        assert ray.get(engine.ranks.remote()) == [(node, node) for node in nodes]
    long, before = prompt(1, 12 * CHUNK + 5), engines.ready()
    computed = engines.stored(engines.one, long)
    assert [now - then for now, then in zip(engines.ready(), before, strict=True)] == [0, 12, 12]
    stats = engines.pool.stats()
    from_pool, own = spell(engines.two, long), spell(engines.two, long)
    assert from_pool[2] == 12 * CHUNK and from_pool == own and same(from_pool, computed)
    after = engines.pool.stats()
    assert (after["hits"] - stats["hits"], after["remote_hits"]) == (24, stats["remote_hits"])
    assert after["transports"] == [], "nothing crossed nodes"
    eventually(lambda: settled(engines.pool))


def test_ranks_that_are_laid_out_otherwise_read_each_others_blocks(engines: Engines) -> None:
    for seed, writer, reader in ((2, engines.one, engines.swapped), (3, engines.swapped, engines.two)):
        known = prompt(seed, 5 * CHUNK + 7)
        computed, before = engines.stored(writer, known), engines.pool.stats()
        from_pool, own = spell(reader, known), spell(reader, known)
        assert from_pool[2] == 5 * CHUNK and from_pool == own and same(from_pool, computed)
        assert engines.pool.stats()["remote_hits"] == before["remote_hits"] + 10
    eventually(lambda: settled(engines.pool))


def test_a_node_store_is_killed_while_ranks_read(engines: Engines) -> None:
    known = [prompt(10 + i, 8 * CHUNK + 11) for i in range(4)]
    right = [engines.stored(engines.one, one) for one in known]
    process = pid(node_store(engines.pool, engines.left.node_id))
    killer = threading.Timer(0.1, lambda: os.kill(process, signal.SIGKILL))
    killer.start()
    said = ray.get([engines.swapped.answer.remote(*known), engines.two.answer.remote(*known)])
    killer.join()
    for answers in said:
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _, _ in right]
    eventually(lambda: pid_of_store(engines) not in (0, process))
    for engine in (engines.one, engines.swapped):
        eventually(lambda engine=engine: hits_again(engine, known[0], right[0]))  # type: ignore[misc]
    eventually(lambda: settled(engines.pool))


def pid_of_store(engines: Engines) -> int:
    try:
        return pid(node_store(engines.pool, engines.left.node_id))
    except (ValueError, ray.exceptions.RayError):
        return 0


def hits_again(engine: Any, known: list[int], right: Spelt) -> bool:
    """Whether an engine with an empty cache reads all chunks from the pool. Its answer must be right in any case."""
    eventually(lambda: ray.get(engine.reset.remote()))
    said = spell(engine, known)
    assert same(said, right)
    return said[2] == len(known) // CHUNK * CHUNK


def test_a_raylet_of_a_rank_is_killed(engines: Engines, cluster: Any) -> None:
    """The engine fails, as it would without a pool. No answer is wrong, and the other node's blocks stay."""
    known = [prompt(20 + i, 8 * CHUNK + 13) for i in range(4)]
    right = [engines.stored(engines.one, one) for one in known]
    asked = [engine.answer.remote(*known, tokens=60) for engine in (engines.one, engines.swapped)]
    cluster.remove_node(engines.right, allow_graceful=False)
    for one in asked:
        try:
            answers = ray.get(one)
        except (ray.exceptions.RayTaskError, ray.exceptions.RayActorError):
            continue
        assert [tokens[:8] for tokens, _ in answers] == [tokens for tokens, _, _ in right]
    eventually(lambda: engines.right.node_id not in engines.pool.stats().get("nodes", {engines.right.node_id}))
    assert engines.pool.stats()["nodes"][engines.left.node_id]["ready"] >= 4 * 8
    eventually(lambda: settled(engines.pool))
