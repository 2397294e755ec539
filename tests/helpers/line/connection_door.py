"""Connections to a listener on whose way somebody alters a piece of what either side says, in clear or in TLS."""

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

HANDSHAKE, TLS = 3, 3  # pieces: both challenges and both proofs; and what TLS says before
PIECES = HANDSHAKE + 3  # a question and an answer follow; that after the last one is none
QUIET_S = 0.02  # of both sides, after which whoever waits for more of an altered piece is hung up on
LONGEST = 1 << 20  # bytes of a frame


class Piece(NamedTuple):
    """What a side said at once, and what came to the other."""

    number: int
    said: bytes
    came: bytes


class ConnectionDoor:
    """A listener that says what it is told, and a friend who asks whether it still does."""

    def __init__(self, address: Address, encrypted: bool) -> None:
        self.address, self.encrypted = address, encrypted
        self.friend = Pipeline(address)

    def step(self, m: Mutator) -> None:
        """One connection. Nobody takes an altered proof, nor with TLS an altered answer."""
        number = m.randrange(PIECES + TLS * self.encrypted)
        altered, answer = self._ask_on_a_way(m, number)
        right = text(number)
        if altered is None or altered.came == altered.said:
            assert answer == right, f"{altered}"
        elif self.encrypted:
            assert answer in (None, right), f"{altered}"
        elif number < HANDSHAKE and not altered.came.startswith(altered.said):  # what follows a proof is a message
            assert answer is None, f"{altered}"
        assert ask(self.friend, number) == right

    def _ask_on_a_way(self, m: Mutator, number: int) -> tuple[Piece | None, bytes | None]:
        """Ask on a way that alters the piece of this number. Returns that, and the answer; None where none came."""
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
    """Between one who comes on this way, and a listener. number: of the piece to alter."""
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
    wire.HANDSHAKE_S = PATIENCE_S  # this process is the door's; a machine may be busy
    with tempfile.TemporaryDirectory() as folder, used(Path(folder)) if encrypted else nullcontext():
        listener = Listener(HOST, "raykv-test", {CLIENT: LONGEST}, lambda _, body: frame(body))
        door = ConnectionDoor(listener.address, encrypted)
        yield door
        eventually(lambda: len(listener.served) == 1 and not listener.unproven)  # the friend
        door.friend.close()
        end(listener)
