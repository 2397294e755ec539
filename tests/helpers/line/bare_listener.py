"""A listener that greets its peer, and then calls a function of the test."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from helpers.line.echo_server import PATIENCE_S
from raykv.line import tls, wire
from raykv.protocol.location import Address


def greet(connection: socket.socket, token: bytes) -> None:
    """Do a listener's part of the handshake."""
    ours = wire.challenge()
    connection.sendall(ours)
    theirs = wire.receive(connection, wire.CHALLENGE_BYTES + wire.PROOF_BYTES)[: wire.CHALLENGE_BYTES]
    connection.sendall(wire.proof(token, wire.LISTENER, ours + theirs))


def encrypted(connection: socket.socket) -> Any:
    """The connection in TLS if TLS is used; else as it is."""
    if not tls.used():
        return connection
    guarded = tls.TlsSocket(connection)
    while not guarded.shake():
        pass
    return guarded


@contextmanager
def peer(serve: Callable[[socket.socket], Any]) -> Iterator[Address]:
    """Serve each connection by this function, in a thread. The connection ends when the function returns."""
    token = b"t" * wire.TOKEN_BYTES

    def run() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with encrypted(connection) as connection, suppress(OSError):
                    greet(connection, token)
                    serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Address("127.0.0.1", listening.getsockname()[1], token)
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)
    assert not thread.is_alive()
