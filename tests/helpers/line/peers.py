"""Peers of a listener: strangers, and friends, who have proved the token."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from helpers.line.echo_server import PATIENCE_S, expected, question
from raykv.line import tls, wire
from raykv.line.wire import frame
from raykv.protocol.calls import CLIENT
from raykv.protocol.location import Address

RESET = b"\1\0\0\0\0\0\0\0"  # a value of SO_LINGER: a close resets the connection


@contextmanager
def stranger(address: Address) -> Iterator[Any]:
    """A connection that has not proved the token. If TLS is used, the peer has a certificate."""
    peer: Any = socket.create_connection(address[:2], PATIENCE_S)
    if tls.used():
        peer = tls.TlsSocket(peer, address.host)
        peer.agree(time.monotonic() + PATIENCE_S)
        peer.settimeout(PATIENCE_S)
    with peer:
        yield peer


def answer_to(peer: socket.socket, token: bytes) -> bytes:
    """A client's answer to a listener's challenge: a challenge of its own, and its proof."""
    both = wire.receive(peer, wire.CHALLENGE_BYTES) + wire.challenge()
    return both[wire.CHALLENGE_BYTES :] + wire.proof(token, CLIENT, both)


@contextmanager
def friend(address: Address) -> Iterator[Any]:
    """A connection that has proved the token."""
    with wire.connect(address) as peer:
        peer.settimeout(PATIENCE_S)
        yield peer


def receive_frame(peer: socket.socket) -> bytes:
    def receive(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = peer.recv(count - len(data))
            if not more:
                raise ConnectionError(f"closed after {len(data)} of {count} bytes")
            data += more
        return data

    return receive(wire.LENGTH.unpack(receive(wire.LENGTH.size))[0])


def asked(peer: socket.socket, number: int = 7) -> bool:
    peer.sendall(frame(question(number, 100)))
    return receive_frame(peer) == expected(number, 100)


def served(address: Address) -> bool:
    with friend(address) as peer:
        return asked(peer)


def closed(peer: socket.socket) -> bool:
    """Whether the other side closes the connection. Bytes before that are dropped."""
    with suppress(ConnectionError):
        while peer.recv(1 << 16):
            pass
    return True
