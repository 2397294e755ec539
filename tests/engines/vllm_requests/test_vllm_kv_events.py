"""Routers that subscribe to vLLM's KV events know which prefixes each engine can read from the pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import ray
from helpers.engines.vllm.kv_index import KVIndex
from helpers.pools import MIB, eventually, free_port, kill, part, pid, stopped

import raykv
from raykv import keys as key_chain
from raykv.integrations.prefix_lookup import PrefixLookup

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, prompt, save_model
from vllm.config import KVEventsConfig

from raykv.integrations.vllm.router import block_hashes

pytestmark = pytest.mark.timeout(600)
CHUNK, BLOCK = 128, 32  # tokens; a chunk has 1 MiB
TOPIC = "kv@test"
KEPT = 20  # batches that an engine can replay
EVENTS = "raykv.integrations.vllm.events"
SHORT = {f"{EVENTS}.kv_events.REFRESH_S": 3.0, f"{EVENTS}.kv_events.ASK_S": 0.2, f"{EVENTS}.published.SETTLE_S": 3.0}


class Told(NamedTuple):
    """engine: an actor. events, replay: endpoints where it publishes and replays. heard: an index since its start."""

    engine: Any
    events: str
    replay: str
    heard: KVIndex

    def answer(self, *prompts: list[int]) -> list[tuple[list[int], int]]:
        return ray.get(self.engine.answer.remote(*prompts))  # type: ignore[no-any-return]

    def step(self) -> KVIndex:
        """Step the engine, which then publishes, by a prompt too short for the pool. Returns the index."""
        self.answer([7] * 10)
        return self.heard.catch_up()


class World(NamedTuple):
    """Two engines on two nodes. announced: the terms by which prompts become keys."""

    pool: raykv.KVPool
    here: Told
    there: Told
    announced: dict[str, Any]

    def blocks(self, prompt: list[int]) -> int:
        """How many leading blocks of a prompt the pool has, by its directory; -1 if the directory does not answer."""
        chunks = block_hashes(prompt, self.announced)[CHUNK // BLOCK - 1 :: CHUNK // BLOCK]
        keys = key_chain.rekey(bytes.fromhex(self.announced["root"]), chunks)
        answer = self.pool.session.directory.stored(keys.tobytes())
        return (answer.found + b"\0").index(0) * CHUNK // BLOCK if answer else -1

    def agree(self, told: Told, *prompts: list[int]) -> bool:
        """Whether an engine's events and the directory agree on each prompt."""
        index = told.step()
        return [index.blocks(prompt, BLOCK) for prompt in prompts] == [self.blocks(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def world(
    third_node_for_module: Callable[[], Any],
    start_for_module: Callable[..., raykv.KVPool],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    node = third_node_for_module()
    pool = start_for_module(cpu_memory=96 * MIB)
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)

    def engine(node: str) -> Told:
        events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=events.replace("127.0.0.1", "*"),
            replay_endpoint=replay.replace("127.0.0.1", "*"),
            buffer_steps=KEPT,
            topic=TOPIC,
        )
        connector = ("raykv.integrations.vllm.announce", "RoutedConnector")
        arguments = (pool.name, str(folder), 32 * MIB)
        made = engine_on(node, *arguments, connector=connector, constants=SHORT, kv_events_config=config)
        return Told(made, events, replay, KVIndex(events, TOPIC))

    told = engine(pool.node_id), engine(node.node_id)
    for one in told:
        one.answer(prompt(0, 40))
    lookup = PrefixLookup(pool.name, str(folder))
    announced = eventually(lambda: asyncio.run(announcement(lookup)))
    assert announced
    yield World(pool, *told, announced)
    for one in told:
        one.heard.close()
    close_engines(*(one.engine for one in told))


async def announcement(lookup: PrefixLookup) -> dict[str, Any] | None:
    lookup.look()
    await asyncio.sleep(0.5)
    return lookup.announced


def test_events_say_what_each_engine_can_have(world: World) -> None:
    mine, common = prompt(1, 1000), prompt(2, 11 * CHUNK)
    theirs = common + prompt(3, 300)
    world.here.answer(mine)
    world.here.answer(common)
    eventually(lambda: world.blocks(mine) == 28 and world.blocks(common) == 44)
    eventually(lambda: world.agree(world.here, mine, common))
    assert world.there.step().blocks(common, BLOCK) == 0
    assert world.there.answer(theirs)[0][1] == 44 * BLOCK
    eventually(lambda: world.blocks(theirs) == 52)
    eventually(lambda: world.agree(world.there, theirs, common))  # one prompt was stored there, the other read
    assert world.there.heard.blocks(mine, BLOCK) == 0
    # a router that knows only the events sends each prompt to the engine that has most of it
    best = [max((world.here, world.there), key=lambda one: one.heard.blocks(p, BLOCK)) for p in (mine, theirs)]
    assert best == [world.here, world.there]


def test_chunks_that_are_evicted_are_removed(world: World) -> None:
    prompts = [prompt(100 + i, 1024) for i in range(50)]  # 8 MiB each: more than all nodes hold
    for one in prompts:
        world.here.answer(one)
    eventually(lambda: world.agree(world.here, *prompts))
    there = [world.blocks(one) for one in prompts]
    assert 0 in there and 32 in there and world.here.heard.gone["CPU"] > 0


def test_rays_kv_aware_router_sends_a_prompt_where_the_pool_has_it(world: World) -> None:
    """Uses Ray's own router and tracker, and Dynamo's index. No engine has the prompt in its own cache."""
    pytest.importorskip("dynamo.llm", reason="no KV-aware router: pip install --no-deps ai-dynamo-runtime")
    mine, theirs = prompt(150, 1000), prompt(151, 1000)
    workers = {world.here: mine, world.there: theirs}
    for told, known in workers.items():
        told.answer(known)
    eventually(lambda: all(world.blocks(known) == 28 for known in workers.values()))
    for told, known in workers.items():
        for i in range(5):  # four of these fill an engine's own cache
            told.answer(prompt(160 + i, 1024))
        eventually(lambda told=told, known=known: world.agree(told, known))  # type: ignore[misc]
        assert world.blocks(known) == 28 and not told.heard.blocks(known, BLOCK, "GPU")
    chosen = asyncio.run(routed([*workers], [theirs, mine], 28))
    assert chosen == [("1", 28 * BLOCK), ("0", 28 * BLOCK)]


async def routed(workers: list[Told], prompts: list[list[int]], blocks: int) -> list[tuple[str, int]]:
    """For each prompt (the worker that Ray's router chooses, how many tokens of the prompt a worker has).

    blocks: how many blocks of each prompt a worker has once the router has heard all events.
    """
    from ray.llm._internal.serve.routing_policies.kv_aware.constants import REQUEST_TOKEN_IDS_KWARG
    from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter
    from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import KVTokenTracker, get_worker_id

    class Tracker(KVTokenTracker):
        """A tracker whose workers the test sets, in place of Serve's controller."""

        def _start_replica_tracking(self) -> None:
            pass

    tracker: Any = Tracker()
    overlaps: list[tuple[str, int]] = []
    tracker._register_block_size(BLOCK, "0")
    for number, told in enumerate(workers):
        described = {"endpoint": told.events, "replay_endpoint": told.replay, "block_size": BLOCK}
        described |= {"dp_rank": 0, "max_num_batched_tokens": 4096}
        await tracker._upsert_worker(get_worker_id(str(number)), str(number), described)
    router = KVAwareRouter.__new__(KVAwareRouter)
    router._kv_token_tracker = tracker
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=str(i))) for i in range(len(workers))]
    for number, asked in enumerate(prompts):
        what = {"model_name": "default", "tenant_id": "default", "token_ids": asked}
        overlap, end = 0, time.monotonic() + 60
        while overlap != blocks and time.monotonic() < end:
            for told in workers:
                told.step()
            scores = (await tracker._svc.overlap_scores(what))["workers"]
            overlap = max(score["host_pinned_blocks"] for score in scores)
        metadata = SimpleNamespace(request_id=str(number))
        request = SimpleNamespace(kwargs={REQUEST_TOKEN_IDS_KWARG: asked}, args=(), metadata=metadata)
        ((replica,),) = await router.choose_replicas(replicas, request)
        overlaps.append((replica.replica_id.unique_id, overlap * BLOCK))
    tracker._svc.shutdown()
    return overlaps


def test_who_joins_late_is_told_again(world: World) -> None:
    old = prompt(200, 1000)
    world.here.answer(old)
    eventually(lambda: world.agree(world.here, old))
    for i in range(2 * KEPT):  # so many batches that the engine has forgotten the first
        world.here.answer(prompt(210 + i, 64))
    replayed, late = KVIndex(world.here.events, TOPIC), KVIndex(world.here.events, TOPIC)
    try:
        assert replayed.replay(world.here.replay) == KEPT
        whole = world.blocks(old)
        assert whole == 28

        def known() -> bool:
            world.here.step()
            return late.catch_up().blocks(old, BLOCK) == whole

        eventually(known)
        for _ in range(10):  # events repeat stored blocks, so each must be removed as often
            assert world.agree(world.here, old)
        world.pool.clear()
        eventually(lambda: not world.here.step().blocks(old, BLOCK))
        eventually(lambda: not late.catch_up().blocks(old, BLOCK))
        assert not [place for place in late.counts if place[0] == "CPU"]
    finally:
        replayed.close()
        late.close()


def test_a_directory_that_stops_or_dies_removes_nothing(world: World) -> None:
    world.pool.clear()
    eventually(lambda: not any(medium == "CPU" for medium, _ in world.here.step().plain))
    known, later = prompt(300, 1000), prompt(301, 1000)
    world.here.answer(known)
    eventually(lambda: world.blocks(known) == 28 and world.agree(world.here, known))
    gone = world.here.heard.gone["CPU"]
    with stopped(pid(part(world.pool, "directory"))):
        for _ in range(20):
            assert world.here.step().gone["CPU"] == gone
    kill(world.pool, "directory")
    eventually(lambda: world.blocks(known) == 28)
    end = time.monotonic() + 5  # longer than a new directory's answers are not believed
    while time.monotonic() < end:
        assert world.here.step().gone["CPU"] == gone
    eventually(lambda: world.here.answer(later) and world.blocks(later) == 28)
    eventually(lambda: world.agree(world.here, known, later))


def test_other_weights_have_nothing(world: World) -> None:
    known = prompt(400, 1000)
    eventually(lambda: world.there.answer(known) and world.blocks(known) == 28)  # again and again, as after a fault
    eventually(lambda: world.agree(world.there, known))
    told = [place for place in world.there.heard.counts if place[0] == "CPU"]
    removed = world.there.heard.removed["CPU"]
    assert ray.get(world.there.engine.reset.remote(connector=True))
    eventually(lambda: world.there.step().removed["CPU"] >= removed + len(told))
    assert world.there.heard.blocks(known, BLOCK) == 0
