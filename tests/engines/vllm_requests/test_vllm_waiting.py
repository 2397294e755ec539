"""The schedulers of two vLLM engines that get the same prompt at once: one engine computes, the other waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.pools import eventually

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm import request as vllm_request
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.chunks.tail import Tail
from raykv.integrations.vllm.identity.groups import Group
from raykv.integrations.vllm.scheduler.counters import WAITED
from raykv.integrations.vllm.scheduler.manager import RayKVManager
from raykv.integrations.vllm.scheduler.waiting import PATIENCE, patience_of
from raykv.integrations.vllm.spec import RayKVOffloadingSpec
from raykv.integrations.vllm.worker.ranks import Rank

TOKENS, SIZE = 16, 4096  # of a chunk
KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(12)]
TAIL = Tail(make_offload_key(bytes([99]) * 32, 0), 12, 12 * TOKENS, 12 * TOKENS + 5)
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
FOREVER, AT_ONCE = 0.1, 1e6  # tokens a second that an engine computes: the slower, the longer it waits for others


class Engine:
    """Calls a manager as vLLM's scheduler does."""

    def __init__(self, pool: str, model: str, stores: bool = True, patience: float = PATIENCE) -> None:
        self.pool = raykv.attach(pool)
        self.manager = RayKVManager(self.pool, {"model": model, "dtype": "uint8", "layout": "rows"}, stores, patience)
        self.manager.set_ranks([Rank(self.pool.session.memory_name, (0,), (SIZE,))], [Group(0, 0, TOKENS, 0)])
        self.cache = self.manager.caches[0][0]
        self.manager._rate = FOREVER
        self.requests = 0

    def begin(self, keys: list[Any] = KEYS, tail: Tail | None = None) -> ReqContext:
        self.requests += 1
        return vllm_request.request(f"request {self.requests}", keys, tail=tail)

    def ask(self, context: ReqContext) -> LookupResult:
        """The answer for the first chunk, once the directory has answered."""
        while not (ask := self.manager._asks.get(context.req_id)) or not ask.answer.done():
            self.manager.lookup(KEYS[0], context)
        return self.manager.lookup(KEYS[0], context)

    def told(self, context: ReqContext) -> list[LookupResult]:
        """The answers for all chunks, once there is nothing to wait for."""
        eventually(lambda: self.ask(context) is not RETRY)
        return [self.manager.lookup(key, context) for key in KEYS]

    def tail(self, context: ReqContext) -> LookupResult:
        """The answer for the tail, once there is nothing to wait for."""
        eventually(lambda: self.manager.lookup(TAIL.key, context) is not RETRY)
        return self.manager.lookup(TAIL.key, context)

    def waits(self, context: ReqContext) -> bool:
        answers: list[Any] = []
        while len(answers) < 3 and self.ask(context) is RETRY:
            answer = self.manager._asks[context.req_id].answer
            answers += [] if answer in answers else [answer]
        return len(answers) == 3

    def store(self, keys: list[Any]) -> None:
        """Store chunks, as an engine's worker does."""
        self.cache.store(self.cache.rekey([key[:32] for key in keys]), np.zeros((len(keys), SIZE), np.uint8), wait=True)

    def close(self) -> None:
        self.manager.shutdown()


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module(cpu_memory=16 << 20)


@pytest.fixture
def engines(pool: raykv.KVPool, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of a model that no other test has."""
    pair = Engine(pool.name, request.node.name), Engine(pool.name, request.node.name)
    yield pair
    for engine in pair:
        engine.close()
    eventually(lambda: pool.stats()["intents"] == 0)


def test_one_computes_and_the_other_reads(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    first, second = one.begin(), two.begin()
    assert one.told(first) == [MISS] * 12 and two.waits(second)
    one.manager.prepare_store(KEYS, first)
    one.manager.on_request_finished(first)
    assert two.waits(second), "the first one's worker is still to store them"
    one.store(KEYS)
    assert two.told(second) == [HIT] * 12
    one.manager.complete_store(KEYS, first)
    assert two.manager._counts[WAITED] == 1
    two.manager.on_request_finished(second)
    eventually(lambda: one.pool.stats()["intents"] == 0)


def test_an_engine_without_patience_waits_for_nobody(
    engines: tuple[Engine, Engine], pool: raykv.KVPool, request: pytest.FixtureRequest
) -> None:
    one, hasty = engines[0], Engine(pool.name, request.node.name, patience=0.0)
    first, second = one.begin(), hasty.begin()
    assert one.told(first) == [MISS] * 12
    assert hasty.told(second) == [MISS] * 12 and not hasty.manager._counts[WAITED]
    for engine, asked in ((one, first), (hasty, second)):
        engine.manager.on_request_finished(asked)
    hasty.close()


def test_how_patient_an_engine_is_comes_from_its_configuration() -> None:
    assert patience_of({}) == PATIENCE and patience_of({"patience": 3}) == 3.0
    for wrong in ("3", -1, True, float("nan"), float("inf"), 10**400, None):
        with pytest.raises(ValueError, match=r"patience=.*: give how many times as long"):
            patience_of({"patience": wrong})


def test_the_connector_hands_its_patience_to_the_manager(pool: raykv.KVPool) -> None:
    spec: Any = object.__new__(RayKVOffloadingSpec)
    spec.extra_config, spec._pool, spec._manager = {"stores": [True], "patience": 3}, pool.name, None
    spec._arguments = spec._drafter = {"model": "m"}
    manager = spec.get_manager()
    assert manager._patience == 3.0
    manager.shutdown()


def test_what_another_request_of_the_engine_computes_is_waited_for_until_it_is_stored(
    engines: tuple[Engine, Engine],
) -> None:
    """The first request announced the intent, and then finds the blocks in the engine's own cache."""
    one, two = engines
    first, second, theirs = one.begin(), one.begin(), two.begin()
    asked = one.manager._asks[first.req_id] = one.manager._ask(0, 0, first.get_state(Chain), first.req_id)
    eventually(asked.answer.done)  # but the scheduler does not look the request up again
    assert one.told(second) == [MISS] * 12
    one.manager.prepare_store(KEYS, second)
    one.manager.release_unused(first.req_id)
    one.pool.session.directory.heartbeat()  # tells the directory which intents have ended
    assert two.waits(theirs), "the worker has not reserved anything yet"
    one.manager.prepare_store(KEYS, first)
    one.store(KEYS)
    one.manager.complete_store(KEYS, second)
    measured = one.manager._rate
    one.manager.complete_store(KEYS, first)
    assert one.manager._rate == measured, "it computed nothing"
    assert two.told(theirs) == [HIT] * 12
    eventually(lambda: one.pool.stats()["intents"] == 0)


@pytest.mark.parametrize("why", ["it began before a reset", "it is limited"])
def test_nobody_waits_for_what_is_not_offered(engines: tuple[Engine, Engine], why: str) -> None:
    one, _ = engines
    request = one.begin()
    if why == "it is limited":
        request.get_state(Chain).limited = True
    else:
        one.manager.reset_cache()  # the weights may have changed
    assert one.told(request) == [MISS] * 12
    assert one.pool.stats()["intents"] == 0
    other = one.begin()
    other.get_state(Chain).resets = one.manager.resets
    assert one.told(other) == [MISS] * 12
    assert one.pool.stats()["intents"] == 1


def test_a_request_whose_chunks_are_not_offered_waits_as_others_do(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    first, second = one.begin(), two.begin()
    assert one.told(first) == [MISS] * 12
    second.get_state(Chain).limited = True
    assert two.waits(second)
    one.manager.on_request_finished(first)
    assert two.told(second) == [MISS] * 12
    assert two.pool.stats()["intents"] == 0, "also asked again, others are not to wait for it"


def test_who_waited_computes_what_the_other_does_not(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    first, second = one.begin(KEYS[:5]), two.begin()
    assert one.told(first)[:5] == [MISS] * 5 and two.waits(second)
    one.store(KEYS[:5])
    assert two.told(second) == [HIT] * 5 + [MISS] * 7
    assert one.waits(one.begin()), "the rest is the other one's"


@pytest.mark.parametrize("end", ["aborted", "not stored", "reset", "asks again", "closed"])
def test_nobody_waits_for_what_is_not_computed_any_more(engines: tuple[Engine, Engine], end: str) -> None:
    one, two = engines
    first, second = one.begin(), two.begin()
    assert one.told(first) == [MISS] * 12 and two.waits(second)
    if end == "aborted":
        one.manager.on_request_finished(first)
    elif end == "not stored":  # the pool had no room
        one.manager.prepare_store(KEYS, first)
        one.manager.complete_store(KEYS[:6], first)
        one.manager.complete_store(KEYS[6:], first)
    elif end == "reset":
        one.manager.reset_cache()
    elif end == "asks again":  # the request was preempted, and asks for other keys now
        one.manager.release_unused(first.req_id)
        one.manager.lookup(KEYS[0], vllm_request.request(first.req_id, KEYS[:1]))
    else:
        one.close()
    if end == "asks again":
        eventually(
            lambda: two.ask(second) is RETRY and two.manager._asks[second.req_id].answer.result().match.pending == 1
        )
    else:
        assert two.told(second) == [MISS] * 12


def test_an_engine_that_says_nothing_is_waited_for_as_long_as_computing_takes(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    assert one.told(one.begin()) == [MISS] * 12
    two.manager._rate = AT_ONCE
    second = two.begin()
    assert two.told(second) == [MISS] * 12
    assert one.pool.stats()["intents"] == 1, "it is still the first one's"


def test_a_key_that_is_no_chunks_is_a_miss_at_once(engines: tuple[Engine, Engine]) -> None:
    """For models with states vLLM also asks for ends within a chunk, which must not start the request's question."""
    one, _ = engines
    one.store(KEYS)
    context = one.begin(KEYS)
    assert one.manager.lookup(make_offload_key(b"within a chunk".ljust(32), 0), context) is MISS
    assert one.told(context) == [HIT] * 12


def test_engines_that_are_asked_in_another_order_do_not_wait_for_each_other(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    others = [make_offload_key(bytes([100 + i]) * 32, 0) for i in range(12)]
    one.told(one.begin())
    theirs = two.begin(others)
    eventually(lambda: two.manager.lookup(others[0], theirs) is MISS)
    mine, again = one.begin(others), two.begin()
    eventually(lambda: one.manager.lookup(others[0], mine) is RETRY and one.manager._asks[mine.req_id].wait is not None)
    assert two.waits(again)
    one.store(KEYS)
    two.store(others)
    assert two.told(again) == [HIT] * 12
    eventually(lambda: one.manager.lookup(others[0], mine) is HIT)


@pytest.fixture
def reader(engines: tuple[Engine, Engine], request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine that stores nothing."""
    engine = Engine(engines[0].pool.name, request.node.name, stores=False)
    yield engine
    engine.close()


def test_a_tail_is_waited_for_and_read_as_one_chunk_more(engines: tuple[Engine, Engine], reader: Engine) -> None:
    one, _ = engines
    first, second = one.begin(tail=TAIL), reader.begin(tail=TAIL)
    assert one.told(first) == [MISS] * 12 and reader.waits(second)
    for keys in (KEYS, [TAIL.key]):
        assert one.manager.prepare_store(keys, first).keys_to_store == keys
    one.store(KEYS)
    one.manager.complete_store(KEYS, first)
    assert reader.waits(second), "the tail is still to be stored"
    one.store([TAIL.key])
    one.manager.complete_store([TAIL.key], first)
    assert reader.told(second) == [HIT] * 12 and reader.tail(second) is HIT
    assert reader.tail(reader.begin(tail=TAIL)) is HIT, "asked for alone"
    assert reader.tail(reader.begin(tail=TAIL._replace(number=11))) is MISS, "its request has outgrown it"
    eventually(lambda: one.pool.stats()["intents"] == 0)


def test_nobody_waits_for_an_engine_that_stores_nothing(engines: tuple[Engine, Engine], reader: Engine) -> None:
    one, _ = engines
    assert reader.told(reader.begin()) == [MISS] * 12
    assert one.told(one.begin()) == [MISS] * 12 and one.manager._counts[WAITED] == 0
