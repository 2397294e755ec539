"""Properties of all messages, and their form on a socket."""

import contextlib
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.actors.directory.directory import DirectoryActor
from raykv.line.directory_line import plain
from raykv.protocol.calls import CALLS
from raykv.protocol.clients import Call, Counted, Matched, MatchedParts, MatchRequest, Reserved
from raykv.protocol.packing import packed, unpacked

fields = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
messages = st.recursive(
    fields, lambda part: st.lists(part).map(tuple) | st.dictionaries(st.integers(0, 2**64 - 1), part)
)


def test_every_call_is_a_method_of_the_actor() -> None:
    assert all(callable(getattr(DirectoryActor, name)) for name in CALLS)


@given(messages)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert unpacked(packed(message)) == message


@given(st.binary())
def test_bytes_that_are_no_message_are_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        unpacked(data)


def test_half_a_message_is_a_value_error() -> None:
    data = packed(("match", (1, 2, b"held")))
    for stop in range(len(data)):
        with pytest.raises(ValueError):
            unpacked(data[:stop])


def test_every_answer_of_the_directory_begins_with_its_epoch() -> None:
    for answer in (Matched, MatchedParts, Reserved, Counted):
        assert answer._fields[0] == "epoch"


def test_messages_are_sent_as_plain_tuples() -> None:
    for message in (Call(1, 2, b"held"), MatchRequest(3, "node", b"keys", 4096, 9)):
        assert type(plain(message)) is tuple and type(message)(*plain(message)) == message
        assert packed((message, (message, message))) == packed(plain((message, (message, message))))


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf"], ids=["arrays", "dicts"])
def test_a_message_takes_little_memory_before_it_is_known_to_be_none(head: bytes) -> None:
    """Each head claims as many parts as there are bytes, and a decoder allocates the list of parts first."""
    size = 1 << 20
    data = b"".join(head + left.to_bytes(4, "big") for left in range(size, 0, -5))
    tracemalloc.start()
    with pytest.raises(ValueError, match="exceeds"):
        unpacked(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * size
