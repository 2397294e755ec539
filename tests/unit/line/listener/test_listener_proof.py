"""A peer and a listener prove to each other that they know the token, in time and in few bytes."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from helpers.line.echo_server import PATIENCE_S, question
from helpers.line.fuzz import SEED
from helpers.line.listeners import both
from helpers.line.peers import asked, closed, friend, served, stranger

from raykv.line import wire
from raykv.line.listener import Listener
from raykv.line.wire import frame
from raykv.protocol.calls import CLIENT
from raykv.protocol.location import Address


def test_who_does_not_prove_the_token_in_time_is_closed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.3)
    with stranger(listener.address) as silent, stranger(listener.address) as slow, friend(listener.address) as honest:
        slow.sendall(bytes(wire.CHALLENGE_BYTES + wire.PROOF_BYTES - 1))
        assert closed(silent) and closed(slow)
        assert asked(honest)


@both
@pytest.mark.parametrize("shift", (0, 1), ids=["guessed", "of another connection"])
def test_a_wrong_proof_ends_the_connection(listener: Listener, shift: int) -> None:
    with stranger(listener.address) as first, stranger(listener.address) as second:
        challenges = [wire.receive(peer, wire.CHALLENGE_BYTES, None) for peer in (first, second)]
        assert challenges[0] != challenges[1]
        token = listener.address.token if shift else b"guessed"
        for i, peer in enumerate((first, second)):
            mine = wire.challenge()
            shown = wire.proof(token, CLIENT, challenges[(i + shift) % 2] + mine)
            peer.sendall(mine + shown + frame(question(1)))
            assert closed(peer)
    assert served(listener.address)


@contextmanager
def impostor(address: Address, greet: Callable[[socket.socket], None]) -> Iterator[Address]:
    """A process on the port of a listener that is gone. It does not know the token, and greets in its own way."""

    def serve() -> None:
        with suppress(OSError):
            peer, _ = taken.accept()
            with peer:
                greet(peer)
                while peer.recv(1 << 16):
                    pass

    with socket.create_server((address.host, 0)) as taken:
        thread = threading.Thread(target=serve)
        thread.start()
        yield address._replace(port=taken.getsockname()[1])
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


def sends_the_proof_back(peer: socket.socket) -> None:
    peer.sendall(bytes(wire.CHALLENGE_BYTES))
    peer.sendall(wire.receive(peer, wire.CHALLENGE_BYTES + wire.PROOF_BYTES)[-wire.PROOF_BYTES :])


def relays_to(other: Address) -> Callable[[socket.socket], None]:
    """A greeting that passes the peer's challenge on to a listener with another token."""

    def greet(peer: socket.socket) -> None:
        with stranger(other) as there:
            peer.sendall(wire.receive(there, wire.CHALLENGE_BYTES))
            there.sendall(wire.receive(peer, wire.CHALLENGE_BYTES + wire.PROOF_BYTES))
            peer.sendall(wire.receive(there, wire.PROOF_BYTES))

    return greet


def test_who_listens_without_the_token_is_refused(listener: Listener) -> None:
    """The impostor is refused in time, before it gets a question."""
    gone = listener.address._replace(token=b"of a listener that is gone")
    rng = random.Random(SEED)

    def guesses(peer: socket.socket) -> None:
        peer.sendall(rng.randbytes(wire.CHALLENGE_BYTES + wire.PROOF_BYTES))

    def says_anything(peer: socket.socket) -> None:
        peer.sendall(rng.randbytes(rng.randrange(200)))
        peer.shutdown(socket.SHUT_WR)

    for greet in (guesses, sends_the_proof_back, relays_to(listener.address), *[says_anything] * 100):
        with impostor(gone, greet) as address, pytest.raises(ConnectionError):
            wire.connect(address)
    assert served(listener.address)


def test_who_listens_and_proves_nothing_is_refused_in_time(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.1)
    for greeting in (b"", bytes(wire.CHALLENGE_BYTES), bytes(wire.CHALLENGE_BYTES + wire.PROOF_BYTES - 1)):
        says = partial(lambda said, peer: peer.sendall(said), greeting)
        with impostor(listener.address, says) as address, pytest.raises(ConnectionError, match="says nothing"):
            wire.connect(address)


def test_bytes_before_the_proof_are_few(listener: Listener) -> None:
    with stranger(listener.address) as peer:
        with suppress(ConnectionError):
            for _ in range(100):
                peer.sendall(bytes(1 << 20))
        assert closed(peer)
