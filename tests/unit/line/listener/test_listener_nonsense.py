"""A fuzzer sends nonsense to a listener, which goes on serving its other peers."""

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from helpers.line.echo_server import PATIENCE_S, open_files
from helpers.line.fuzz import SECONDS, SEED
from helpers.line.listeners import LONGEST, listening
from helpers.line.peers import RESET, friend, receive_frame
from helpers.pools import eventually

from raykv.line import wire
from raykv.line.listener import Connection, Listener
from raykv.line.wire import frame
from raykv.protocol.calls import CLIENT, STORE
from raykv.protocol.location import Address

HONEST = b"is always answered"


class Fuzzer:
    """Opens connections, sends any bytes in any pieces, and closes the connections in any way."""

    def __init__(self, seed: str) -> None:
        self.rng, self.served_by = random.Random(seed), random.Random(f"server/{seed}")
        self.peers: list[Any] = []
        self.answers = 0
        self.threads = ThreadPoolExecutor(4)

    def serve(self, listener: Listener, connection: Connection, body: bytes) -> bytes | None:
        """Answer or refuse a question, or have a thread do so."""
        if self.served_by.random() < 0.7 or body == HONEST:
            return frame(body)
        if self.served_by.random() < 0.2:
            raise ValueError("refused")
        self.threads.submit(self.serve_lent, listener, connection, body)
        return None

    def serve_lent(self, listener: Listener, connection: Connection, body: bytes) -> None:
        try:
            connection.socket.settimeout(0.1)
            connection.socket.sendall(frame(body))
        except OSError:
            listener.drop(connection)
        else:
            listener.drop(connection) if body[:1] < b"\x20" else listener.give_back(connection)

    def step(self, address: Address) -> None:
        rng = self.rng
        try:
            if not self.peers or rng.random() < 0.3:
                self.open(address)
            else:
                rng.choice((self.say, self.say, self.hear, self.leave))(rng.choice(self.peers))
        except OSError:  # the listener has closed the connection, or sends nothing
            pass
        if len(self.peers) > 15:
            self.leave(self.peers[0])

    def open(self, address: Address) -> None:
        if self.rng.random() < 0.2:
            address = address._replace(token=b"guessed")
        side = self.rng.choice((*[CLIENT] * 4, STORE, wire.LISTENER))  # this listener admits only clients
        if self.rng.random() < 0.8:
            peer: Any = wire.connect(address, side)
        else:
            peer = socket.create_connection(address[:2], PATIENCE_S)
        peer.settimeout(0.001)
        self.peers.append(peer)

    def say(self, peer: socket.socket) -> None:
        rng = self.rng
        data = b"".join(frame(rng.randbytes(rng.randrange(LONGEST))) for _ in range(rng.randrange(20)))
        data += rng.randbytes(rng.choice((0, 0, 0, 1, 31, 32, 33, 5000)))
        while data:
            piece = data[: rng.choice((1, 7, 100, 10_000))]
            peer.sendall(piece)
            data = data[len(piece) :]

    def hear(self, peer: socket.socket) -> None:
        self.answers += len(peer.recv(1 << 16)) > wire.CHALLENGE_BYTES

    def leave(self, peer: socket.socket) -> None:
        self.peers.remove(peer)
        with peer, suppress(OSError):
            if self.rng.random() < 0.3:
                peer.shutdown(self.rng.choice((socket.SHUT_WR, socket.SHUT_RD)))
            if self.rng.random() < 0.5:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def test_nonsense_of_all_kinds_hinders_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """To run for an hour: RAYKV_FUZZ_SECONDS=14400. For another seed: RAYKV_FUZZ_SEED=2."""
    end_at = time.monotonic() + SECONDS / 4
    fuzzer, before, rounds = Fuzzer(SEED), open_files(), 0
    with (
        fuzzer.threads,
        listening(lambda connection, body: fuzzer.serve(server, connection, body)) as server,
        friend(server.address) as honest,
    ):
        while time.monotonic() < end_at:
            fuzzer.step(server.address)
            rounds += 1
            if rounds % 10 == 0:
                honest.sendall(frame(HONEST))
                assert receive_frame(honest) == HONEST
        while fuzzer.peers:
            fuzzer.leave(fuzzer.peers[0])
        eventually(lambda: len(server.served) == 1 and not server.unproven)
        honest.sendall(frame(HONEST))
        assert receive_frame(honest) == HONEST
    assert open_files() <= before
    assert fuzzer.answers > 10, "it proved the token now and then"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
