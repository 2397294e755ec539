"""The session parameters of requests decide which chunks are evicted first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import ray
from helpers.pools import MIB, eventually

import raykv

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from helpers.engines.vllm.engine import close_engines, engine_on, prompt, save_model
from vllm import SamplingParams

from raykv.integrations.vllm import compat
from raykv.integrations.vllm.chunks.hints import AGAIN, DONE, ENVELOPE, KEEP, SESSION, SESSIONS, Hint, Sessions, hint_of
from raykv.integrations.vllm.scheduler.outbox import Outbox

pytestmark = pytest.mark.timeout(600)
CHUNK = 128  # tokens
SHARED = 2 * CHUNK  # tokens that all sessions begin with
OWN = 22  # chunks of a session's own


class World(NamedTuple):
    pool: raykv.KVPool
    engine: Any

    def answer(self, tokens: list[int], **params: Any) -> int:
        """Ask until the pool has the prompt's chunks. Returns how many tokens were cached at first."""
        found = self.ask(tokens, **params)
        eventually(lambda: self.pool.stats().get("reservations") == 0 and self.afresh(tokens) >= CHUNK * OWN)
        return found

    def ask(self, tokens: list[int], **params: Any) -> int:
        return int(ray.get(self.engine.answer.remote(tokens, params=params))[0][1])

    def afresh(self, tokens: list[int], **params: Any) -> int:
        """How many tokens of a prompt the pool has."""
        eventually(lambda: ray.get(self.engine.reset.remote()))
        return self.ask(tokens, **params)

    def done(self) -> int:
        return int(self.pool.stats().get("done", 0))


@pytest.fixture
def world(start: Callable[..., raykv.KVPool], tmp_path: Path) -> Iterator[World]:
    save_model(tmp_path)
    pool = start(cpu_memory=64 * MIB, locality=1.0)  # so the oldest block of both nodes is evicted
    engine = engine_on(pool.node_id, pool.name, str(tmp_path), 64 * MIB)
    yield World(pool, engine)
    close_engines(engine)


def session(seed: int) -> list[int]:
    return prompt(500, SHARED) + prompt(seed, CHUNK * OWN + 20)


def envelope(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    """Hints as Dynamo's and SGLang's routers write them. The first action is for somebody else."""
    actions: list[Any] = [
        {"action_id": "0", "action_type": "kv.fetch", "action_version": "1.0", "payload": {"block_hashes": [1]}},
        {"action_id": "1", "action_type": kind, "action_version": version, "payload": payload},
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


def end_by_our_params(engine: Any, tokens: list[int]) -> None:
    engine.answer(tokens, params={SESSION: "ends", DONE: True})


def end_by_vllms_fields(engine: Any, tokens: list[int]) -> None:
    """The request has vLLM's own name of its session, and vLLM's own envelope."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    hints, own = KvHintsEnvelope("0.1", "m", [KvHintAction("1", "kv.deref", "1.0", {})]), engine.llm.llm_engine
    sampling = SamplingParams(max_tokens=1, detokenize=False)
    own.add_request("last", {"prompt_token_ids": tokens}, sampling, session_id="ends", kv_hints=hints)
    while own.has_unfinished_requests():
        own.step()
    engine.go_on()


@pytest.mark.parametrize("end", [end_by_our_params, end_by_vllms_fields])
def test_a_session_that_ends_goes_before_others_and_leaves_what_they_share(
    world: World, end: Callable[[Any, list[int]], None]
) -> None:
    if end is end_by_vllms_fields:
        pytest.importorskip("vllm.v1.kv_hints", reason="vLLM has envelopes from 0.31 on")
    *older, stays, ends = map(session, range(1, 5))  # `older` ones, as the last answer may evict some of them
    for tokens in (*older, stays):
        world.answer(tokens)
    assert world.answer(ends, **{SESSION: "ends"}) == SHARED
    assert world.done() == 0
    ray.get(world.engine.__ray_call__.remote(end, ends))  # the engine's own cache has the whole prompt
    eventually(lambda: world.done() >= OWN)
    evicted = world.pool.stats()["evicted"]
    for seed in itertools.count(10):
        if world.pool.stats()["evicted"] >= evicted + OWN // 2:
            break
        world.answer(session(seed))
    assert world.afresh(stays) == SHARED + CHUNK * OWN
    assert SHARED <= world.afresh(ends) <= SHARED + CHUNK * OWN // 2


def test_chunks_that_a_request_keeps_stay_while_younger_ones_go(world: World) -> None:
    kept, own = prompt(500, SHARED) + prompt(9, CHUNK * 8 + 20), CHUNK * 8
    *older, plain = map(session, range(1, 5))
    for tokens in older:
        world.answer(tokens)
    assert world.ask(kept, **{KEEP: 600}) == SHARED
    eventually(lambda: world.pool.stats()["kept"] > 0 and world.afresh(kept) == SHARED + own)
    world.answer(plain)
    evicted = world.pool.stats()["evicted"]
    for seed in itertools.count(10):
        if world.pool.stats()["evicted"] >= evicted + 4 * OWN:
            break
        world.answer(session(seed))
    assert world.afresh(plain) <= SHARED + CHUNK * OWN // 2
    assert world.afresh(kept) == SHARED + own


def test_hints_of_a_session_that_goes_on_are_not_sent(start: Callable[..., raykv.KVPool]) -> None:
    pool = start(cpu_memory=64 * MIB)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4096)
    keys = cache.keys(np.arange(160))
    cache.store(keys, np.zeros((10, 4096), np.uint8), wait=True)
    outbox = Outbox(pool.session.directory)
    outbox.put([keys], Hint("a", True))
    outbox.put([keys], Hint("a", True), "salt")
    outbox.put([keys[:3]], Hint("a", keep_s=60))
    outbox.put([keys[:4]], Hint("", True))
    outbox.asked(Hint("a"), None)
    outbox.put([keys[:1], keys[:2]], Hint("b", keep_s=60))  # sent after all others
    eventually(lambda: pool.stats()["kept"] == 6)
    assert pool.stats()["done"] == 14, "of the sessions with a salt, and with an empty name"
    outbox.close()


@pytest.mark.parametrize("session", [None, "a"])
def test_a_hint_is_repeated_until_the_session_says_something_else(
    start: Callable[..., raykv.KVPool], session: str | None
) -> None:
    pool = start(cpu_memory=64 * MIB)
    cache = pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4096)
    keys = cache.keys(np.arange(160))
    cache.store(keys[:9], np.zeros((9, 4096), np.uint8), wait=True)  # one is never stored
    outbox = Outbox(pool.session.directory)
    outbox.put([keys], Hint(session, keep_s=60))
    eventually(lambda: pool.stats()["kept"] >= 18)
    outbox.put([keys[:9]], Hint(session, True))
    eventually(lambda: pool.stats()["done"] == 9)
    kept = pool.stats()["kept"]
    outbox.put([keys[:1]], Hint("last", True))
    eventually(lambda: pool.stats()["done"] == 10)
    assert pool.stats()["kept"] == kept, "a repeat would undo what was said later"
    outbox.close()


def test_a_bad_hint_fails_no_request(world: World) -> None:
    assert world.ask(session(1), **{SESSION: 3, DONE: "never"}) == 0
    assert world.afresh(prompt(9, 200), **{DONE: AGAIN}) == 0


@pytest.mark.parametrize(
    ("params", "hint"),
    [
        (None, Hint()),
        ({}, Hint()),
        ({SESSION: "a"}, Hint("a")),
        ({DONE: True}, Hint(None, True)),
        ({SESSION: "a", DONE: AGAIN}, Hint("a", True, True)),
        ({SESSION: 3, DONE: True}, Hint()),
        ({DONE: "soon"}, Hint()),
        ({DONE: None}, Hint()),
        ({DONE: []}, Hint()),
        ({DONE: 1}, Hint()),
        ({SESSION: "a" * 257, DONE: True}, Hint()),
        ({SESSION: "a", "max_load_tokens": 0}, Hint("a", limited=True)),
        ({KEEP: 60}, Hint(keep_s=60.0)),
        ({KEEP: 0.5, SESSION: "a", DONE: False}, Hint("a", keep_s=0.5)),
        ({SESSION: "a", KEEP: -1}, Hint()),
        ({SESSION: "a", KEEP: "60"}, Hint()),
        ({KEEP: True}, Hint()),
        ({KEEP: None}, Hint()),
        ({KEEP: float("nan")}, Hint()),
        ({KEEP: float("inf")}, Hint()),
        ({KEEP: 10**400}, Hint()),
    ],
)
def test_what_params_say(params: dict[str, Any] | None, hint: Hint) -> None:
    assert hint_of(params) == hint


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (envelope("kv.deref"), Hint("a", True)),
        (envelope("kv.demote"), Hint("a", True, True)),
        (envelope("kv.demote", session_id="a", session_generation=2), Hint("a", True, True)),
        (envelope("kv.demote", session_id="b"), Hint("a")),
        (envelope("kv.deref", "2.0"), Hint("a")),
        (envelope("kv.retain", ttl_seconds=3), Hint("a")),
        ({"actions": ["kv.deref", {"action_type": ["kv.deref"]}, None]}, Hint("a")),
        ({"actions": [{"action_type": "kv.deref", "action_version": "1.0", "payload": "all"}]}, Hint("a")),
        ({"actions": [{"action_type": "kv.deref", "action_version": "1.0"}]}, Hint("a", True)),
        (envelope("kv.deref", session_id=np.zeros(2)), Hint("a")),
        (envelope("kv.deref", block_hashes=np.zeros(2)), Hint("a", True)),
        ({"actions": {}}, Hint("a")),
        ({}, Hint("a")),
        ("kv.deref", Hint("a")),
        (None, Hint("a")),
    ],
)
def test_what_an_envelope_says(given: Any, hint: Hint) -> None:
    """In vLLM's own field, or in kv_transfer_params. Our own parameter comes first."""
    assert hint_of(None, "a", given) == hint
    assert hint_of({ENVELOPE: given}, "a") == hint
    assert hint_of({SESSION: "b", DONE: AGAIN}, "a", given) == Hint("b", True, True)
    assert hint_of({DONE: False}, "a", given) == Hint("a")


def test_a_session_without_our_name_has_vllms() -> None:
    assert hint_of({SESSION: "b"}, "a") == Hint("b")
    assert hint_of({}, "a" * 257) == hint_of({}, ["a"]) == Hint(), "too long a name is none"


def test_an_action_may_name_the_session_as_vllm_does() -> None:
    assert hint_of({SESSION: "mine"}, "a", envelope("kv.deref", session_id="a")) == Hint("mine", True)


def test_hints_of_requests_of_two_versions() -> None:
    class Action(msgspec.Struct, frozen=True):
        action_type: str
        action_version: str = "1.0"
        payload: dict[str, Any] = {}

    class Envelope(msgspec.Struct, frozen=True):
        actions: list[Action]

    newest = SimpleNamespace(kv_transfer_params=None, session_id="a", kv_hints=Envelope([Action("kv.deref")]))
    assert compat.hint_of(newest) == Hint("a", True)
    assert compat.hint_of(SimpleNamespace(kv_transfer_params=None, session_id=None, kv_hints=None)) == Hint()
    assert compat.hint_of(SimpleNamespace(kv_transfer_params={SESSION: "b"}, session_id="a")) == Hint("b"), "vLLM 0.29"


def test_a_sessions_own_begin_where_its_first_request_found_nothing() -> None:
    sessions, goes_on, ends = Sessions(), Hint("a", True, again=True), Hint("a", True)
    for found in (256, 512):
        sessions.begin(Hint("a"), None, found)
        assert sessions.hinted(goes_on, None, None) == 256
    sessions.begin(Hint("a"), "tenant", 640)
    assert sessions.hinted(goes_on, None, None) == 256 and sessions.hinted(goes_on, "tenant", None) == 640
    sessions.begin(Hint(), None, 512)
    assert sessions.hinted(Hint(None, True), None, None) is None
    assert sessions.hinted(ends, None, None) == 256
    assert sessions.hinted(ends, None, None) is None and sessions.hinted(ends, "tenant", None) == 640


def test_the_session_that_was_used_longest_ago_is_forgotten() -> None:
    sessions = Sessions()
    for name in ("a", "b"):
        sessions.begin(Hint(name), None, 1)
    for number in range(SESSIONS - 2):
        sessions.begin(Hint(str(number)), None, 0)
    sessions.begin(Hint("a"), None, 2)
    sessions.begin(Hint("c"), None, 3)
    assert [sessions.hinted(Hint(name, True), None, None) for name in ("a", "b", "c")] == [1, None, 3]
