"""The typed stub of the directory and the actor must not come apart: mypy believes the stub."""

import inspect
from typing import get_args, get_type_hints

from raykv.actors.directory import DirectoryActor
from raykv.client.directory_client import DirectoryStub, plain
from raykv.protocol import Call, Counted, Matched, MatchRequest, Reserved


def test_every_method_of_the_stub_is_the_actors_with_as_many_arguments() -> None:
    stub = get_type_hints(DirectoryStub)
    assert len(stub) >= 12
    for name, method in stub.items():
        asked, _ = get_args(method)
        parameters = [*inspect.signature(getattr(DirectoryActor, name)).parameters]
        parameters = [
            parameter for parameter in parameters if parameter != "_ray_trace_ctx"
        ]  # Ray's, once it has actors
        assert len(parameters) - 1 == len(asked), f"{name}{asked}, but the actor takes {parameters}"


def test_every_answer_of_the_directory_begins_with_its_epoch() -> None:
    for answer in (Matched, Reserved, Counted):
        assert answer._fields[0] == "epoch"


def test_messages_are_sent_as_plain_tuples() -> None:
    for message in (Call(1, 2, b"held"), MatchRequest(3, "node", b"keys", 4096)):
        assert type(plain(message)) is tuple and type(message)(*plain(message)) == message
