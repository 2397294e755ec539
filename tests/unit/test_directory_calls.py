"""Calls that come over the directory's socket: what may be asked, and that nothing else does harm."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.actors.directory_metrics import DirectoryMetrics
from raykv.actors.directory_server import CALLS, DirectoryServer
from raykv.protocol import packed, unpacked
from raykv.system import wire

CONNECTION: Any = None
things = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=99),
    lambda part: st.lists(part, max_size=4).map(tuple) | st.dictionaries(st.integers(0, 9), part, max_size=3),
)


class Server(DirectoryServer):
    """Stands by, and takes any arguments for `ping`."""

    def __init__(self) -> None:
        super().__init__("p", DirectoryMetrics("p", "a"))

    def ping(self, *arguments: Any) -> Any:
        return arguments[0]


def answer(server: DirectoryServer, request: bytes) -> tuple[bool, Any]:
    framed = bytearray(server._answer(CONNECTION, request))
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


@given(st.sampled_from(sorted(CALLS - {"ping"})), st.lists(things, max_size=3))
def test_a_call_that_fails_says_why(method: str, arguments: list[Any]) -> None:
    done, why = answer(Server(), packed((method, *arguments)))
    assert not done and "Error" in why


@pytest.mark.parametrize(
    "method", ["clear", "leave", "stay", "remove_node", "take_charge", "stats", "__init__", "_serve"]
)
def test_what_administrators_ask_is_refused(method: str) -> None:
    done, why = answer(Server(), packed((method, "node")))
    assert not done and "no such call" in why


def test_an_answer_that_can_not_be_sent_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not end the connection, which other threads of the caller use."""
    monkeypatch.setattr(Server, "ping", lambda self: object())
    assert not answer(Server(), packed(("ping",)))[0]
