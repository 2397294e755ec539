"""Calls over the directory's socket: which are allowed, and that all others do no harm."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.directory.checks import check_invariants
from helpers.directory.pool import KEYS as KEYS_OF_POOL
from helpers.directory.pool import PAGE, Pool
from hypothesis import given
from hypothesis import strategies as st

from raykv.actors.directory.metrics import DirectoryMetrics
from raykv.actors.directory.server import ERROR_CHARS, PARTS, DirectoryServer
from raykv.config import KEYS_PER_CALL, KEYS_PER_JOINT_CALL
from raykv.directory.calls.why_missing import ABSENT
from raykv.directory.directory import Directory
from raykv.line import wire
from raykv.protocol.calls import ADMINISTRATOR, CALLS, CLIENT, STORE
from raykv.protocol.clients import Call, CommitRequest, Intent, MatchRequest, NextWindowRequest, ReserveRequest
from raykv.protocol.location import KEY_BYTES, LOCATION
from raykv.protocol.packing import packed, unpacked
from raykv.protocol.stores import ArenaDescription, Inventory, SlabReport, SweepResult
from raykv.protocol.tiers import DemotionReport, ExistingBlocks, GpuDemotionReport, TierReport

ASKED = sorted((asked.by, call) for call, asked in CALLS.items() if asked.by != ADMINISTRATOR and call != "ping")
things = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=99),
    lambda part: st.lists(part, max_size=4).map(tuple) | st.dictionaries(st.integers(0, 9), part, max_size=3),
)


class Server(DirectoryServer):
    """A server that stands by, and takes any arguments for `ping`."""

    def __init__(self) -> None:
        super().__init__("p", DirectoryMetrics("p", "a"), lambda: 0.0)

    def ping(self, *arguments: Any) -> Any:
        return arguments[0]


def answer(server: DirectoryServer, request: bytes, side: bytes = CLIENT) -> tuple[bool, Any]:
    connection: Any = SimpleNamespace(side=side)
    framed = bytearray(server._answer(connection, request))
    body = wire.take_frame(framed, 1 << 20)
    assert body is not None and not framed
    done, result = unpacked(body)
    return done, result


@given(things)
def test_a_call_is_answered_with_what_it_returns(argument: Any) -> None:
    assert answer(Server(), packed(("ping", argument))) == (True, argument)


@given(st.binary(max_size=99) | things.map(packed))
def test_what_is_no_call_is_refused(request: bytes) -> None:
    assert not answer(Server(), request)[0]


@given(st.sampled_from(ASKED), st.lists(things, max_size=3))
def test_a_call_that_fails_says_why(asked: tuple[bytes, str], arguments: list[Any]) -> None:
    side, method = asked
    done, why = answer(Server(), packed((method, *arguments)), side)
    assert not done and "Error" in why


def test_clients_do_not_make_calls_of_stores_nor_stores_those_of_clients() -> None:
    """A client that invents nodes would use up memory. A client that joins as a living node would drop its blocks."""
    for method, asked in CALLS.items():
        for other in {CLIENT, STORE} - {asked.by}:
            done, why = answer(Server(), packed((method, "node")), other)
            assert not done and "no such call" in why


def test_failed_calls_say_and_log_little(caplog: pytest.LogCaptureFixture) -> None:
    """This holds however long the nonsense is, and however often it comes."""
    server, nonsense = Server(), packed(("match", b"x" * (3 << 20), *("y" * 1000 for _ in range(200))))
    for _ in range(10):
        done, why = answer(server, nonsense)
        assert not done and len(why) < 2 * ERROR_CHARS
    assert len(caplog.records) == 1 and len(caplog.text) < 4 * ERROR_CHARS
    for request in (packed(("pin", b"z" * (3 << 20))), packed((b"q" * (3 << 20),)), packed((None, "stored"))):
        answer(server, request)
    assert len(caplog.records) == 4 and len(caplog.text) < 16 * ERROR_CHARS


@pytest.mark.parametrize("method", ["pin", "unpin", "touch", "forget", "preempted"])
def test_keys_that_are_looked_at_one_by_one_come_in_steps(method: str) -> None:
    server = Server()
    server.serve(Directory())
    call = (1, 1, b"", b"", b"")
    terms = (60.0, "") if method == "touch" else ()
    assert answer(server, packed((method, call, bytes(KEYS_PER_CALL * KEY_BYTES), *terms)))[0]
    done, why = answer(server, packed((method, call, bytes((KEYS_PER_CALL + 1) * KEY_BYTES), *terms)))
    assert not done and f"at most {KEYS_PER_CALL}" in why


def test_a_session_is_done_with_a_long_chain_at_once() -> None:
    """Of one call the last key goes first, but of two calls no order is right for every pool."""
    server = Server()
    server.serve(Directory())
    assert answer(server, packed(("done", (1, 1, b"", b"", b""), bytes(KEYS_PER_JOINT_CALL * KEY_BYTES), True, "")))[0]


def test_a_follower_is_told_why_the_blocks_ahead_are_missing() -> None:
    """The reason is that of the blocks ahead, not of the block where the prefix ends, which is there."""
    pool, server = Pool(), Server()
    pool.store("a", KEYS_OF_POOL[:3])
    server.serve(pool.directory)
    server.follow((0, 0, 0))
    for asked, why in ((4, ABSENT), (3, "")):
        request = MatchRequest(1, "a", b"".join(KEYS_OF_POOL[:asked]), PAGE, 0, ahead=1)
        _, (part,), _, short = server.match_parts(pool.call("a"), (request,), None)
        assert (len(part[2]) // LOCATION.itemsize, short) == (2, why)


@pytest.mark.parametrize(("method", "sizes"), [("match", (4096, 0)), ("reserve", (0, 4096, ""))])
def test_keys_of_one_cache_are_bounded(method: str, sizes: tuple[Any, ...]) -> None:
    server = Server()
    server.serve(Directory())
    for keys in (KEYS_PER_CALL, KEYS_PER_CALL + 1):
        done, why = answer(server, packed((method, (1, 1, b"", b"", b""), (1, "", bytes(keys * KEY_BYTES), *sizes))))
        assert done == (keys == KEYS_PER_CALL), why


def test_parts_of_a_match_are_bounded() -> None:
    server = Server()
    server.serve(Directory())
    for parts in (PARTS, PARTS + 1):
        requests = tuple((lease, "", bytes(KEY_BYTES), 4096, 0, 0, 16) for lease in range(1, parts + 1))
        done, why = answer(server, packed(("match_parts", (1, 1, b"", b"", b""), requests, None)))
        assert done == (parts == PARTS), why


CALL, KEYS = Call(7, 5), KEYS_OF_POOL[0]
SOUND: dict[str, tuple[Any, ...]] = {  # arguments by call
    "match": (CALL, MatchRequest(1, "a", KEYS, PAGE, 1)),
    "match_parts": (CALL, (MatchRequest(1, "a", KEYS, PAGE, 1), MatchRequest(2, "a", KEYS, PAGE, 1)), Intent(3, True)),
    "next_window": (CALL, NextWindowRequest(7, 1, 0, 1, PAGE)),
    "reserve": (CALL, ReserveRequest(1, "a", KEYS, 0, PAGE)),
    "commit": (CALL, CommitRequest(1, b"", b"", b"")),
    "touch": (CALL, KEYS, 10.0, "a"),
    "done": (CALL, KEYS, True, "a"),
    **{name: (CALL, KEYS) for name in ("pin", "unpin", "forget", "preempted")},
    **{name: (KEYS,) for name in ("locate_prefix", "stored")},
    "client_heartbeat": (CALL,),
    "disconnect": (8,),
    "report_requests": ((b"line",), 0),
    "nodes": (),
    "join": ("a", ArenaDescription(b"b", 1 << 20, 1, 0)),
    "adopt": ("a", SlabReport(1, 1, b""), Inventory(b"", b"", b"", b"", b"")),
    "heartbeat": ("a", SlabReport(1, 1, b"")),
    "sweep_result": (SweepResult(b"", b"", b"", b""),),
    "tier_heartbeat": ("a", TierReport(1 << 20, False, True, b"")),
    "report_existing": ("a", ExistingBlocks(b"", b"", True)),
    "demote": ("a", DemotionReport(b"", b"", b"", 0, False)),
    "demote_gpu": ("a", GpuDemotionReport(b"", b"")),
}
OTHERS = (None, 1.5, 7, "text", b"bytes", (), {1: 2})


def confused(value: Any) -> Iterator[Any]:
    """Copies of a value, each with a wrong type in one place."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from ((*value[:i], wrong, *value[i + 1 :]) for wrong in confused(part))
    yield from (other for other in OTHERS if type(other) is not type(value) and not isinstance(value, tuple | bool))


def may_be(method: str, arguments: tuple[Any, ...]) -> bool:
    """Whether such arguments are allowed: a touch for whole seconds."""
    call, keys, seconds, *more = (*arguments, None, None, None)[:4]
    return method == "touch" and (call, keys, *more) == (CALL, KEYS, "a") and isinstance(seconds, int | float)


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked[1])
def test_a_part_of_another_type_is_refused_and_changes_nothing(asked: tuple[bytes, str]) -> None:
    """A call that failed halfway would leave changes that nobody owns."""
    side, method = asked
    pool = Pool(slots=8, slabs=2)
    pool.store("a", [KEYS])
    server = Server()
    server.serve(pool.directory)
    for arguments in confused(SOUND[method]):
        if may_be(method, arguments):
            continue
        before = server.stats()
        done, why = answer(server, packed((method, *arguments)), side)
        assert not done and "Error" in why, arguments
        assert server.stats() == before, arguments
        check_invariants(pool.directory)
    sound = packed((method, *SOUND[method]))
    assert answer(server, sound, side)[0] or method == "adopt"


@pytest.mark.parametrize(
    "method", ["clear", "leave", "stay", "remove_node", "take_charge", "stats", "__init__", "_serve"]
)
def test_what_administrators_ask_is_refused(method: str) -> None:
    done, why = answer(Server(), packed((method, "node")))
    assert not done and "no such call" in why


def test_an_answer_that_can_not_be_sent_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays open, because other threads of the caller use it."""
    monkeypatch.setattr(Server, "ping", lambda self: object())
    assert not answer(Server(), packed(("ping",)))[0]
