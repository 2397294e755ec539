"""Connections to a listener, in clear or in TLS, on which a relay alters a piece of what a side sends."""

import select
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from helpers.line.certificates import HOST, used
from helpers.line.echo_server import PATIENCE_S, end
from helpers.line.fuzz import Mutator
from helpers.pools import eventually
from raykv.line import wire
from raykv.line.listener import Listener
from raykv.line.pipeline import Pipeline, Request
from raykv.line.wire import frame
from raykv.protocol.calls import CLIENT
from raykv.protocol.location import Address

HANDSHAKE, TLS = 3, 3  # pieces of both challenges and both proofs; pieces of TLS before those
PIECES = HANDSHAKE + 3  # a question and an answer follow; the last number stands for no piece
QUIET_S = 0.02  # after an altered piece: the relay hangs up when both sides are silent for so long
LONGEST = 1 << 20  # bytes of a frame


class Piece(NamedTuple):
    """A piece that a side sent at once, and the piece that the relay passed on."""

    number: int
    said: bytes
    came: bytes


class ConnectionDoor:
    """A listener that echoes, and a `friend` whose connection checks that it still does."""

    def __init__(self, address: Address, encrypted: bool) -> None:
        self.address, self.encrypted = address, encrypted
        self.friend = Pipeline(address)

    def step(self, m: Mutator) -> None:
        """Make one connection. An altered proof must fail, and so must an altered answer in TLS."""
        number = m.randrange(PIECES + TLS * self.encrypted)
        altered, answer = self._ask_on_a_way(m, number)
        right = text(number)
        if altered is None or altered.came == altered.said:
            assert answer == right, f"{altered}"
        elif self.encrypted:
            assert answer in (None, right), f"{altered}"
        elif number < HANDSHAKE and not altered.came.startswith(altered.said):  # bytes after a proof are a message
            assert answer is None, f"{altered}"
        assert ask(self.friend, number) == right

    def _ask_on_a_way(self, m: Mutator, number: int) -> tuple[Piece | None, bytes | None]:
        """Ask through a relay that alters piece `number`. Returns (that piece, the answer), None if missing."""
        pieces: list[Piece] = []
        answer = None
        with socket.create_server((self.address.host, 0)) as way:
            carrier = Thread(target=lambda: pieces.extend(carry(m, way, self.address, number)))
            carrier.start()
            with suppress(OSError), closing(Pipeline(self.address._replace(port=way.getsockname()[1]))) as pipeline:
                answer = ask(pipeline, number)
            carrier.join()
        return next((piece for piece in pieces if piece.number == number), None), answer


def text(number: int) -> bytes:
    return bytes([number]) * 1000


def ask(pipeline: Pipeline, number: int) -> bytes:
    request = Request()
    pipeline.send(text(number), request.deliver)
    return pipeline.wait(request, PATIENCE_S)


def carry(m: Mutator, way: socket.socket, address: Address, number: int) -> Iterator[Piece]:
    """Relay a connection at `way` to a listener. number: the piece to alter."""
    count, altered = 0, False
    with way.accept()[0] as client, socket.create_connection(address[:2]) as listener, suppress(OSError):
        to = {client: listener, listener: client}
        while ready := select.select(list(to), [], [], QUIET_S if altered else None)[0]:
            for side in ready:
                if not (said := side.recv(1 << 16)):
                    return
                came = m.bytes_of(said) if count == number else said
                altered |= came != said
                yield Piece(count, said, came)
                to[side].sendall(came)
                count += 1


@contextmanager
def connections(encrypted: bool) -> Iterator[ConnectionDoor]:
    wire.HANDSHAKE_S = PATIENCE_S  # a machine may be busy; this process runs nothing but the door
    with tempfile.TemporaryDirectory() as folder, used(Path(folder)) if encrypted else nullcontext():
        listener = Listener(HOST, "raykv-test", {CLIENT: LONGEST}, lambda _, body: frame(body))
        door = ConnectionDoor(listener.address, encrypted)
        yield door
        eventually(lambda: len(listener.served) == 1 and not listener.unproven)  # only the friend is left
        door.friend.close()
        end(listener)
