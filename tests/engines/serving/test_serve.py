"""Ray Serve on a pool: requests go where their prefix is, unless queues are long, and always get an answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import ray
from helpers.engines.serve.gated_engine import GatedEngine, start_gate
from helpers.pools import BLOCK, ROUTED_S, eventually, free_port, other_node, part, pid, stopped, store, tokens
from numpy.typing import NDArray
from ray import serve
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

import raykv
from examples import serve_transformers
from raykv import keys
from raykv.integrations.prefix_lookup import PrefixLookup
from raykv.integrations.serve import PrefixRouter, announce, ranked
from raykv.protocol.clients import Located

BLOCK_TOKENS = 4
ROOT = keys.root(b"secret", model="m")

# ---------------------------------------------------------------------- which replica is best


def replica(node: str, number: int = 0) -> Any:
    """A stand-in for a running replica, with all that a router asks of it."""

    async def get_queue_len(deadline_s: float) -> int:
        return 0

    name = ReplicaID(f"{node}{number}", DeploymentID("d"))
    return SimpleNamespace(
        replica_id=name,
        node_id=node,
        max_ongoing_requests=100,
        multiplexed_model_ids=(),
        get_queue_len=get_queue_len,
    )


A, B, C = replica("a"), replica("b"), replica("c")


def test_replicas_of_equal_costs_are_one_group() -> None:
    best, others = ranked([A, B, C], [7.0, 3.0, 7.1])
    assert best == [B] and {other.node_id for other in others} == {"a", "c"}


# ---------------------------------------------------------------------- a router by itself


class FakeLookup:
    """A stand-in for the look-up, which answers when a test says so, and counts questions."""

    def __init__(self) -> None:
        self.announced: dict[str, Any] | None = {"root": ROOT.hex(), "block_tokens": BLOCK_TOKENS}
        self.answers: dict[bytes, asyncio.Future[Located | None]] = {}

    def look(self) -> None:
        pass

    async def locate_prefix(self, asked: NDArray[np.uint8]) -> Located | None:
        answer: asyncio.Future[Located | None] = asyncio.get_running_loop().create_future()
        self.answers[asked.tobytes()] = answer
        return await answer


def router(*replicas: Any, kind: type[PrefixRouter] = PrefixRouter) -> tuple[PrefixRouter, FakeLookup]:
    router = kind(
        deployment_id=DeploymentID("d"), handle_source=DeploymentHandleSource.UNKNOWN, use_replica_queue_len_cache=True
    )
    router.initialize_state("m")
    router.lookup = lookup = FakeLookup()  # type: ignore[assignment]
    router.update_replicas(list(replicas))
    return router, lookup


def request(**kwargs: Any) -> PendingRequest:
    return PendingRequest([], kwargs, RequestMetadata("", "the same for all calls of one HTTP request"))


def keys_of(prompt: list[int]) -> bytes:
    return keys.chain(ROOT, prompt, BLOCK_TOKENS).tobytes()


def test_a_request_gets_the_replica_that_was_chosen_for_it() -> None:
    async def run() -> None:
        prefix_router, lookup = router(A, B)
        prompts = [1] * 8, [2] * 8
        first, second = (
            asyncio.create_task(prefix_router._choose_replica_for_request(request(token_ids=prompt)))
            for prompt in prompts
        )
        while len(lookup.answers) < 2:
            await asyncio.sleep(0)
        lookup.answers[keys_of(prompts[1])].set_result(Located(2, {"b": 2}))
        assert await second is B and not first.done(), "answered first, though it came second"
        lookup.answers[keys_of(prompts[0])].set_result(Located(2, {"a": 2}))
        assert await first is A

    asyncio.run(run())


@pytest.mark.parametrize(
    ("replicas", "asked"),
    [
        ((A, B), {}),
        ((A, B), {"token_ids": [1, 2, 3]}),  # less than a block
        ((A, B), {"token_ids": "text"}),  # wrong: the replica will say so
        ((A,), {"token_ids": [1] * 8}),
        ((A, replica("a", 1)), {"token_ids": [1] * 8}),  # both on one node
    ],
)
def test_the_directory_is_not_asked_about_a_request_that_it_cannot_help(replicas: Any, asked: dict[str, Any]) -> None:
    async def run() -> None:
        prefix_router, lookup = router(*replicas)
        assert await prefix_router._choose_replica_for_request(request(**asked)) in replicas
        assert not lookup.answers

    asyncio.run(run())


class WithoutTokenizer(PrefixRouter):
    async def keys(self, request: PendingRequest, announced: dict[str, Any]) -> NDArray[np.uint8]:
        raise OSError("no such tokenizer")


class WithoutSessions(PrefixRouter):
    def session(self, request: PendingRequest) -> str:
        raise KeyError("session")


@pytest.mark.parametrize("kind", [WithoutTokenizer, WithoutSessions])
def test_a_router_that_is_broken_still_routes(kind: type[PrefixRouter]) -> None:
    async def run() -> None:
        prefix_router, lookup = router(A, B, kind=kind)
        for _ in range(3):
            assert await prefix_router._choose_replica_for_request(request(token_ids=[1] * 8)) in (A, B)
        assert not lookup.answers

    asyncio.run(run())


def test_a_session_of_any_name_is_routed() -> None:
    async def run() -> None:
        prefix_router, _ = router(A, replica("a", 1))
        for name in ("\ud800", "x" * 100_000, 7, np.zeros(3)):
            chosen = set()
            for _ in range(9):
                asked = request(session=name)
                there = (await prefix_router._choose_replica_for_request(asked)).replica_id
                prefix_router.on_request_completed(there, asked.metadata.internal_request_id)
                chosen.add(there)
            assert len(chosen) == 1 or isinstance(name, np.ndarray), "which is no name"

    asyncio.run(run())


def test_a_request_that_found_no_room_is_not_asked_for_again() -> None:
    async def run() -> None:
        prefix_router, lookup = router(A, B)
        refused = request(token_ids=[1] * 8)
        choice = asyncio.create_task(prefix_router._choose_replica_for_request(refused))
        while not lookup.answers:
            await asyncio.sleep(0)
        lookup.answers.popitem()[1].set_result(Located(2, {"a": 2}))
        assert await choice is A
        assert await prefix_router._choose_replica_for_request(refused, is_retry=True) in (A, B)
        assert not lookup.answers

    asyncio.run(run())


def test_an_adapters_request_follows_its_prefix_among_replicas_that_have_loaded_it() -> None:
    loaded_a, loaded_b = replica("a", 1), replica("b", 1)
    loaded_a.multiplexed_model_ids = loaded_b.multiplexed_model_ids = {"m:x"}

    async def chosen(replicas: Any, shares: dict[str, int]) -> list[Any]:
        prefix_router, lookup = router(*replicas)
        asked = request(token_ids=[1] * 8)
        asked.metadata.multiplexed_model_id = "m:x"
        choice = asyncio.create_task(prefix_router.choose_replicas(list(replicas), asked))
        while len(replicas) > 4 and not lookup.answers:  # of fewer replicas one has loaded it, and nobody is asked
            await asyncio.sleep(0)
        for answer in lookup.answers.values():
            answer.set_result(Located(2, shares))
        return (await choice)[0]

    async def run() -> None:
        for node, loaded in (("a", loaded_a), ("b", loaded_b)):
            assert await chosen((A, B, C, loaded_a, loaded_b), {node: 2}) == [loaded]
            assert await chosen((A, B, C, loaded_a), {node: 2}) == [loaded_a], "Serve's own choice"

    asyncio.run(run())


@pytest.mark.parametrize("named", ["by the handle", "by the caller", "by no one"])
def test_a_session_stays_at_its_replica_unless_others_wait_there(named: str) -> None:
    there = [replica("a", number) for number in range(3)]

    def turn(count: int) -> PendingRequest:
        asked = request(token_ids=[*range(8 * count)], **({"session": "s"} if named == "by the caller" else {}))
        asked.metadata.session_id = "s" if named == "by the handle" else ""
        return asked

    async def run() -> None:
        prefix_router, lookup = router(*there)
        stayed = await prefix_router._choose_replica_for_request(turn(1))
        for count in range(2, 12):
            prefix_router.on_request_completed(stayed.replica_id, turn(1).metadata.internal_request_id)
            assert await prefix_router._choose_replica_for_request(turn(count)) is stayed
        others = [await prefix_router._choose_replica_for_request(request(token_ids=[n] * 800)) for n in range(3)]
        assert {other.replica_id for other in others} == {other.replica_id for other in there}, "they see each other"
        for other in others:
            if other is not stayed:
                prefix_router.on_request_completed(other.replica_id, turn(1).metadata.internal_request_id)
        assert await prefix_router._choose_replica_for_request(turn(12)) is not stayed
        assert not lookup.answers, "all replicas are on one node"

    asyncio.run(run())


def test_tenants_and_adapters_have_keys_of_their_own() -> None:
    async def run() -> None:
        prefix_router, lookup = router(A, B)
        assert lookup.announced
        names = [
            (await prefix_router.keys(request(token_ids=[1] * 8, **fields), lookup.announced)).tobytes()
            for fields in ({}, {"salt": "x"}, {"lora": "x"})
        ]
        assert names[0] == keys_of([1] * 8) and len(set(names)) == 3

    asyncio.run(run())


# ---------------------------------------------------------------------- a lookup and a pool


def test_a_lookup_finds_blocks_and_nothing_while_the_directory_is_silent(
    start: Callable[..., raykv.KVPool],
) -> None:
    pool = start(deadline=ROUTED_S)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK)
    prompt = cache.keys(tokens(0, 6))
    store(cache, prompt[:4])

    async def until(lookup: PrefixLookup, answer: Located | None) -> None:
        while await lookup.locate_prefix(prompt) != answer:
            await asyncio.sleep(0.05)

    async def run() -> None:
        lookup = PrefixLookup(pool.name, "a model")
        assert await lookup.locate_prefix(prompt) is None and lookup.announced is None
        announce(cache, "a model")
        await until(lookup, Located(4, {pool.node_id: 4}))
        assert lookup.announced == {"root": cache.root.hex(), "block_tokens": 16}
        with stopped(pid(part(pool, "directory"))):
            assert await lookup.locate_prefix(prompt) is None
        await until(lookup, Located(4, {pool.node_id: 4}))
        os.kill(pid(part(pool, "directory")), signal.SIGKILL)
        await until(lookup, None)
        await until(lookup, Located(4, {pool.node_id: 4}))

    asyncio.run(asyncio.wait_for(run(), 120))


# ---------------------------------------------------------------------- the example, over HTTP


class Answer(NamedTuple):
    node: str
    pool_tokens: int
    sources: list[str]
    tokens: list[int]


class App(NamedTuple):
    pool: raykv.KVPool
    url: str
    gate: Any

    def ask(self, prompt: str, max_tokens: int = 4, session: str = "") -> Answer:
        found, *rest = serve_transformers.ask(prompt, max_tokens, self.url, session)
        return Answer(found["node"], found["pool_tokens"], found["from"], [line["token"] for line in rest])


@pytest.fixture(scope="module")
def app(start_for_module: Callable[..., raykv.KVPool]) -> Iterator[App]:
    pool, port, gate = start_for_module(cpu_memory=256 << 20, deadline=ROUTED_S), free_port(), start_gate()
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_transformers, "Engine", serve_transformers.Engine.options(GatedEngine))  # type: ignore[attr-defined]
        serve.run(serve_transformers.build({"pool": pool.name}))
    yield App(pool, f"http://127.0.0.1:{port}/", gate)
    serve.shutdown()
    ray.kill(gate)


def text(seed: int, length: int = 1600) -> str:
    return bytes(np.random.default_rng(seed).integers(97, 123, length, np.uint8)).decode()


@pytest.mark.promise
def test_requests_follow_their_prefix(app: App) -> None:
    nodes = {}
    for seed in range(6):
        cold = app.ask(text(seed))
        assert cold.pool_tokens == 0 and len(cold.tokens) == 4
        nodes[seed] = cold.node
    for seed, node in nodes.items():
        for question in ("why?", "who?"):
            warm = app.ask(text(seed) + question)
            assert (warm.node, warm.pool_tokens, warm.sources) == (node, 1600, [node])


def test_a_hot_prefix_uses_both_nodes_and_the_pool_between_them(app: App) -> None:
    first = app.ask(text(10))
    ray.get(app.gate.close.remote(enough=2))  # or a slow machine answers before enough requests wait at once
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(app.ask, [text(10)] * 32))
    assert {answer.node for answer in answers} == {app.pool.node_id, other_node(app.pool)}
    away = [answer for answer in answers if answer.node != first.node and answer.pool_tokens]
    assert any(answer.sources == [first.node] for answer in away), "read from the other node"
    assert {tuple(answer.tokens) for answer in answers} == {tuple(first.tokens)}


def test_a_session_stays_at_its_replica_though_the_pool_has_none_of_it(app: App) -> None:
    """Its prompts are shorter than a block."""
    assert len({app.ask(f"turn {turn}", session="s").node for turn in range(8)}) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ""}, "at least 1 character"),
        ({}, "Field required"),
        ({"prompt": [1, 2]}, "valid string"),
        ({"prompt": "a", "max_tokens": 0}, "greater than or equal to 1"),
        ({"prompt": "ä" * 2048}, "4096 bytes"),
    ],
)
def test_what_is_no_question_is_answered_with_the_reason(app: App, body: dict[str, Any], says: str) -> None:
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(app.url, json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=60)
    assert refused.value.code == 422 and says in refused.value.read().decode()


def test_requests_are_answered_while_the_directory_is_down(app: App) -> None:
    known = app.ask(text(20))
    with stopped(pid(part(app.pool, "directory"))):
        for _ in range(3):
            assert app.ask(text(20)).tokens == known.tokens
    eventually(lambda: app.ask(text(20)).pool_tokens == 1584)
