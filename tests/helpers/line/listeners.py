"""A listener that answers with a function of the test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from helpers.line.echo_server import end
from raykv.line.listener import Connection, Listener
from raykv.protocol.calls import CLIENT

both = pytest.mark.usefixtures("plain_and_tls")  # for tests that run in clear and in TLS
LONGEST = 1000  # bytes of a frame


@contextmanager
def listening(serve: Callable[[Connection, bytes], bytes | None]) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", "raykv-test", {CLIENT: LONGEST}, serve)
    try:
        yield listener
    finally:
        end(listener)
