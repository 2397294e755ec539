"""An error of the system, the listener or its server ends at most one connection."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
from helpers.line.echo_server import expected
from helpers.line.listeners import both, listening
from helpers.line.peers import asked, closed, friend, served, stranger
from helpers.pools import eventually

from raykv.line import wire
from raykv.line.listener import Connection, Listener
from raykv.line.wire import frame


def test_a_port_is_listened_at_again_after_the_system_could_not_accept(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener may even be unable to watch the port for a while."""
    failures = {"accept": 2, "register": 2}

    def failing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if failures[name] and listener._socket in args:
                failures[name] -= 1
                raise OSError(f"can't {name}")
            return method(*args)

        return call

    monkeypatch.setattr(socket.socket, "accept", failing("accept", socket.socket.accept))
    monkeypatch.setattr(listener._selector, "register", failing("register", listener._selector.register))
    with friend(listener.address) as peer:
        assert asked(peer)
    assert failures == {"accept": 0, "register": 0}


@both
def test_no_error_ends_the_loop(listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Such errors are a lack of memory, or a bug of ours."""
    errors = [MemoryError(), RuntimeError("can't start new thread"), KeyError("bug")]

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if errors:
                raise errors.pop()
            return method(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(wire, "challenge", failing(wire.challenge))
        for _ in range(3):
            with stranger(listener.address) as peer:
                assert closed(peer)
    assert served(listener.address) and not errors
    errors[:] = [MemoryError(), RuntimeError("can't start new thread"), KeyError("bug")]
    monkeypatch.setattr(listener, "_expire", failing(listener._expire))
    assert served(listener.address)
    assert eventually(lambda: not errors)
    assert "can't start new thread" in caplog.text


def test_what_a_server_raises_ends_that_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    errors: dict[bytes, Exception] = {b"v": ValueError("nonsense"), b"o": OSError("gone"), b"b": KeyError("a bug")}

    def serve(connection: Connection, body: bytes) -> bytes:
        if body in errors:
            raise errors[body]
        return frame(expected(7, 100))

    with listening(serve) as listener, friend(listener.address) as other:
        for body in errors:
            with friend(listener.address) as peer:
                peer.sendall(frame(body))
                assert closed(peer)
            assert asked(other)
        assert len(listener.served) == 1
    assert "a bug" in caplog.text and "nonsense" not in caplog.text
